"""The engine's end of the fan-in: reads the requests of every ingress of its node, batches them and writes their scores back.

The lane threads do all of it, between two batches: no other thread of this process touches a request. Knows no Ray.
"""

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deployments.batching.dispatcher import Lanes, Run
from deployments.batching.row_queue import Part, Ticket
from deployments.fanin import rings
from deployments.fanin.handshake import Welcome
from deployments.fanin.request_memory import Bytes
from deployments.fanin.rings import Ask, Board, Channel, Status
from deployments.metrics import BatchSeen
from dpiframe_core.errors import InputError, Overloaded
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock


class Peer:
    """An ingress that is connected for one model. Its requests live in its own memory.

    Raises:
        OSError, ValueError: the descriptors are not of such memory. Until it joins an engine, they are the caller's to close.
    """

    def __init__(self, connection: socket.socket, slab_fd: int, channel_fd: int, wake_fd: int, slab_bytes: int) -> None:
        self.connection, self.wake_fd = connection, wake_fd
        self.slab: Bytes = np.frombuffer(mmap.mmap(slab_fd, slab_bytes), np.uint8)
        self.memory = self.slab.data
        self.channel = Channel(channel_fd)
        self.mapped_fds = slab_fd, channel_fd
        self.tickets: dict[int, Ticket[Request]] = {}
        self.taken_rows = 0
        self.gone = False


class Request:
    """One request of a peer. Touched with the lanes' lock held, but for its block. `scores_at`: their offset in the slab."""

    __slots__ = ("block", "bound_at", "device_ms", "done", "ended", "peer", "scores_at", "slot")

    def __init__(self, peer: Peer, slot: int, block: RowBlock, scores_at: int) -> None:
        self.peer, self.slot, self.block, self.scores_at = peer, slot, block, scores_at
        self.bound_at: float | None = None
        self.device_ms = 0.0
        self.done = 0  # rows that were bound and have come back
        self.ended: Status | None = None  # why no further row of it is bound


class FanInEngine:
    """Serves one model to any number of ingresses through `run`, a blocking callable that `lanes` threads may call at once.

    A lane that becomes free reads what all ingresses have asked since, forms a batch of it, runs it, writes each request's
    scores behind its rows, and wakes each ingress concerned once.
    """

    def __init__(
        self,
        run: Run,
        layout: BlockLayout,
        tasks: int,
        fingerprint: str,
        *,
        max_batch_rows: int,
        lanes: int,
        max_queued_rows: int,
        device: str = "cpu",
        precision: str = "fp32",
        buckets: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        on_batch: Callable[[BatchSeen], None] | None = None,
    ) -> None:
        rings.require_ordered_stores()
        self.fingerprint = fingerprint
        self._layout, self._tasks, self._clock = layout, tasks, clock
        self._peers: tuple[Peer, ...] = ()
        self.lanes: Lanes[Request] = Lanes(
            run,
            self,
            max_batch_rows=max_batch_rows,
            count=lanes,
            max_queued_rows=max_queued_rows,
            clock=clock,
            on_batch=on_batch,
        )
        self.welcome = Welcome(
            device=device,
            precision=precision,
            buckets=buckets,
            max_batch_rows=max_batch_rows,
            max_queued_rows=max_queued_rows,
        )
        self.board_fd = rings.shared_memory("dpiframe-board", Board.nbytes(max_batch_rows))
        self.board = Board(self.board_fd, max_batch_rows)
        self.lanes.start()

    @property
    def queued_rows(self) -> int:
        return self.lanes.queue.rows

    @property
    def inflight_rows(self) -> int:
        return self.lanes.inflight_rows

    @property
    def busy_s(self) -> float:
        return self.lanes.busy_s

    @property
    def peers(self) -> int:
        return len(self._peers)

    def join(self, peer: Peer) -> None:
        """From now on a peer's requests are read."""
        for fd in peer.mapped_fds:  # the mappings stay
            os.close(fd)
        with self.lanes.lock:
            self._peers = (*self._peers, peer)
        self.lanes.wake()

    def leave(self, peer: Peer) -> None:
        """The ingress has died or closed: what it still waits for goes no further, and its memory is written no more."""
        with self.lanes.lock:
            self._drop(peer)

    def close(self, drain_s: float) -> None:
        """Has the ingresses go elsewhere, serves those that stay for at most `drain_s` seconds, then drops what is left."""
        self.board.leave()
        give_up = time.monotonic() + drain_s
        while self._peers and time.monotonic() < give_up:
            time.sleep(0.01)
        self.lanes.stop()
        with self.lanes.lock:
            for peer in self._peers:
                self._drop(peer)
        os.close(self.board_fd)

    # What the lane threads call.

    def take_in(self, now: float) -> None:
        for peer in self._peers:
            asks = peer.channel.asks.new()
            if not asks:
                continue
            try:
                for ask in asks:
                    self._take(peer, ask)
            except (InputError, ValueError):  # it does not write what it should: no ingress of ours, or one that is broken
                self._drop(peer)
            peer.channel.taken_rows = peer.taken_rows

    def formed(self, now: float) -> None:
        lanes = self.lanes
        self.board.write(lanes.queue.rows, lanes.inflight_rows, lanes.busy_at(now), lanes.seconds_per_row)

    def expired(self, tickets: list[Ticket[Request]]) -> None:
        with self.lanes.lock:
            for ticket in tickets:
                self._end(ticket, Status.EXPIRED)
            self._wake({ticket.item.peer for ticket in tickets})

    def finished(self, parts: list[Part[Request]], result: BatchResult | None) -> None:
        at, size = 0, self._tasks * 4
        peers = set()
        scores, device_ms = None, 0.0
        if result is not None:
            scores, device_ms = np.ascontiguousarray(result.scores, np.float32).data.cast("B"), result.device_ms
        with self.lanes.lock:
            for ticket, start, stop in parts:
                request = ticket.item
                request.done += stop - start
                end = at + stop - start
                if scores is None:
                    request.ended = request.ended or Status.FAILED
                elif not request.peer.gone:  # else its bytes may be somebody else's by now
                    first = request.scores_at
                    request.peer.memory[first + start * size : first + stop * size] = scores[at * size : end * size]
                    request.device_ms += device_ms
                at = end
                self._settle(ticket)
                peers.add(request.peer)
            if result is not None:
                self.board.counts[at] += 1
            self.formed(self._clock())
            self._wake(peers)

    # With the lock held.

    def _take(self, peer: Peer, ask: tuple[Any, ...]) -> None:
        kind, slot, offset, rows, contexts, deadline, arrived, priority = ask
        ticket = peer.tickets.get(slot)
        if kind == Ask.CANCEL:
            if ticket is not None:
                self._end(ticket, Status.CANCELLED)
                self._wake({peer})
            return
        block = RowBlock.over(peer.slab[offset:], self._layout, rows, contexts)
        scores_at = offset + block.places[-1]
        if ticket is not None or scores_at + rows * self._tasks * 4 > peer.slab.size:
            raise InputError("ask", ask, "a free slot and bytes of the slab")
        ticket = Ticket(
            Request(peer, slot, block, scores_at),
            rows,
            None if deadline == rings.NO_DEADLINE else deadline,
            priority,
            arrived,
        )
        peer.taken_rows += rows
        peer.tickets[slot] = ticket
        try:
            self.lanes.admit(ticket)
        except Overloaded as error:
            self._answer(ticket, Status.OVERLOADED, error.retry_after_s)
            self._wake({peer})

    def _end(self, ticket: Ticket[Request], why: Status) -> None:
        """No further row of it goes to the device."""
        self.lanes.queue.discard(ticket)
        ticket.item.ended = ticket.item.ended or why
        self._settle(ticket)

    def _settle(self, ticket: Ticket[Request]) -> None:
        """Answers a request of which nothing is on the device any more and nothing will be."""
        request = ticket.item
        if request.done == ticket.next_row and (request.ended or request.done == ticket.rows):
            self._answer(ticket, request.ended or Status.OK, 0.0)

    def _answer(self, ticket: Ticket[Request], status: Status, retry_after_s: float) -> None:
        request = ticket.item
        peer = request.peer
        if peer.tickets.get(request.slot) is ticket:  # else it is answered, and the slot may be another request's
            del peer.tickets[request.slot]
            queue_ms = 0.0 if request.bound_at is None else (request.bound_at - ticket.arrived) * 1e3
            peer.channel.answers.put(request.slot, status, queue_ms, request.device_ms, retry_after_s)

    def _wake(self, peers: set[Peer]) -> None:
        for peer in peers:
            if not peer.gone:
                peer.channel.answers.publish()
                os.eventfd_write(peer.wake_fd, 1)

    def _drop(self, peer: Peer) -> None:
        if peer.gone:
            return
        peer.gone = True
        self._peers = tuple(other for other in self._peers if other is not peer)
        for ticket in peer.tickets.values():
            self.lanes.queue.discard(ticket)
        peer.tickets.clear()
        os.close(peer.wake_fd)
        with contextlib.suppress(OSError):  # it may be so already
            peer.connection.shutdown(socket.SHUT_RDWR)  # whoever reads it closes it
