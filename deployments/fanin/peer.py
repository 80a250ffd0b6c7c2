"""An ingress as the engine process sees it: its memory, its rings, and its requests that are not answered yet."""

import contextlib
import mmap
import os
import socket
import weakref

import numpy as np

from deployments.batching.row_queue import Ticket
from deployments.fanin.request_memory import Bytes
from deployments.fanin.rings import Rings, Status
from dpiframe_core.features.row_block import RowBlock


class PeerRequest:
    """One request of a peer. Touched with the dispatcher's lock held, but for its block and peer. `scores_at`: offset in its
    memory.
    """

    __slots__ = ("block", "bound_at", "device_ms", "done", "ended", "peer", "scores_at", "slot")

    def __init__(self, peer: "Peer", slot: int, block: RowBlock, scores_at: int) -> None:
        self.peer, self.slot, self.block, self.scores_at = peer, slot, block, scores_at
        self.bound_at: float | None = None
        self.device_ms = 0.0
        self.done = 0  # rows that were bound and have come back
        self.ended: Status | None = None  # why no further row of it is bound


class Peer:
    """An ingress that is connected for one model. Its requests live in its own memory.

    Attributes:
        memory: uint8[memory_bytes], the ingress's. writable: the same bytes, for scores.
        tickets: the requests that it has here, by slot. taken_rows: of all that were ever read.
        blocks: by offset, rows and contexts, and where the scores go: a listener's requests come to the same places again.

    Raises:
        OSError, ValueError: the descriptors are not of such memory. Until it joins an engine, they are the caller's to close.
    """

    def __init__(self, sock: socket.socket, memory_fd: int, rings_fd: int, wake_fd: int, memory_bytes: int) -> None:
        self.sock, self._wake_fd = sock, wake_fd
        self.memory: Bytes = np.frombuffer(mmap.mmap(memory_fd, memory_bytes), np.uint8)
        self.writable = self.memory.data
        self.rings = Rings(rings_fd)
        self._mapped_fds = memory_fd, rings_fd
        self.tickets: dict[int, Ticket[PeerRequest]] = {}
        self.blocks: dict[tuple[int, int, int], tuple[RowBlock, int]] = {}
        self.taken_rows = 0
        self.gone = False

    def joined(self) -> None:
        """Its descriptors are closed, the mappings stay. That which wakes it is closed with the last use of this object."""
        for fd in self._mapped_fds:
            os.close(fd)
        weakref.finalize(self, os.close, self._wake_fd).atexit = False

    def answer(self, ticket: Ticket[PeerRequest], status: Status, retry_after_s: float = 0.0) -> None:
        """Puts an answer on its ring, unless there was one. The peer sees it after `publish`, and looks after `wake`."""
        request = ticket.item
        slot, bound_at = request.slot, request.bound_at
        if self.tickets.get(slot) is ticket:  # else it is answered, and the slot may be another request's
            del self.tickets[slot]
            queue_ms = 0.0 if bound_at is None else (bound_at - ticket.arrived) * 1e3
            self.rings.answers.put(slot, status, queue_ms, request.device_ms, retry_after_s)

    def publish(self) -> None:
        if not self.gone:
            self.rings.answers.publish()

    def wake(self) -> None:
        """Needs no lock, and is best called without: a system call gives the interpreter away."""
        if not self.gone:
            os.eventfd_write(self._wake_fd, 1)

    def drop(self) -> None:
        """Its memory is written no more; whoever reads its socket learns that it is over, and closes it. Once."""
        self.gone = True
        self.tickets.clear()
        self.blocks.clear()
        with contextlib.suppress(OSError):  # it may be so already
            self.sock.shutdown(socket.SHUT_RDWR)
