"""The row batcher of an engine process: reads the requests of every ingress of its node, batches them, writes the scores.

The lane threads do all of it, between two batches: no other thread of this process touches a request. Knows no Ray.
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from deployments.batching.dispatcher import Dispatcher, Run
from deployments.batching.row_queue import Part, Ticket
from deployments.fanin.board import Board
from deployments.fanin.handshake import Welcome
from deployments.fanin.peer import Peer, PeerRequest
from deployments.fanin.request_memory import Bytes
from deployments.fanin.rings import NO_DEADLINE, Ask, Status
from deployments.fanin.shared_memory import require_ordered_stores, shared_memory
from deployments.metrics import BatchSeen
from dpiframe_core.errors import InputError, Overloaded
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock

if TYPE_CHECKING:
    from dpiframe_core.engine.engine import Engine

_KNOWN_BLOCKS = 4096  # of a peer
_CANCEL, _OK = Ask.CANCEL, Status.OK  # members of an enum take longer to look up


class FanInBatcher:
    """Serves one model to any number of ingresses through `run`, a blocking callable that `lanes` threads may call at once.

    A lane that becomes free reads what all ingresses have asked since, forms a batch of it, runs it, writes each request's
    scores behind its rows, and wakes each ingress concerned once. `read_ahead` is told of each request that comes in, and
    `lock_pages` of the memory of each ingress.
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
        read_ahead: Callable[[RowBlock], None] | None = None,
        lock_pages: Callable[[Bytes], None] | None = None,
    ) -> None:
        require_ordered_stores()
        self.fingerprint = fingerprint
        self.layout, self.tasks, self._clock = layout, tasks, clock
        self._read_ahead, self._lock_pages = read_ahead, lock_pages
        self._peers: tuple[Peer, ...] = ()
        self.dispatcher: Dispatcher[PeerRequest] = Dispatcher(
            run,
            self,
            self,
            max_batch_rows=max_batch_rows,
            lanes=lanes,
            max_queued_rows=max_queued_rows,
            clock=clock,
            on_batch=on_batch,
        )
        self.welcome = Welcome(
            device=device, precision=precision, buckets=buckets, max_batch_rows=max_batch_rows, max_queued_rows=max_queued_rows
        )
        self.board_fd = shared_memory("dpiframe-board", Board.nbytes(max_batch_rows))
        self.board = Board(self.board_fd, max_batch_rows)
        self.dispatcher.start()

    @classmethod
    def of(cls, engine: "Engine", max_queued_rows: int, on_batch: Callable[[BatchSeen], None]) -> Self:
        """Before an engine that is warm."""
        return cls(
            engine.run_batch,
            engine.schema.block_layout,
            len(engine.manifest.tasks),
            engine.bundle.fingerprint,
            max_batch_rows=engine.max_batch_rows,
            lanes=engine.lanes,
            max_queued_rows=max_queued_rows,
            read_ahead=engine.read_ahead if engine.reads_ahead else None,
            device=engine.device,
            precision=engine.precision,
            buckets=engine.buckets,
            on_batch=on_batch,
            lock_pages=engine.lock_pages,
        )

    @property
    def peers(self) -> int:
        return len(self._peers)

    def join(self, peer: Peer) -> None:
        """From now on a peer's requests are read."""
        if self._lock_pages:  # while the descriptors are the caller's: it may raise
            self._lock_pages(peer.memory)
        peer.joined()
        with self.dispatcher.lock:
            self._peers = (*self._peers, peer)
        self.dispatcher.wake()

    def leave(self, peer: Peer) -> None:
        """The ingress has died or closed: what it still waits for goes no further, and its memory is written no more."""
        with self.dispatcher.lock:
            self._drop(peer)

    def close(self, drain_s: float) -> None:
        """Has the ingresses go elsewhere, serves those that stay for at most `drain_s` seconds, then drops what is left."""
        self.board.leave()
        give_up = time.monotonic() + drain_s
        while self._peers and time.monotonic() < give_up:
            time.sleep(0.01)
        self.dispatcher.stop()
        self._lock_pages = None  # an engine's memory is not to wait until a collection finds this
        with self.dispatcher.lock:
            for peer in self._peers:
                self._drop(peer)
        os.close(self.board_fd)

    def fail(self, why: str) -> None:
        """Has the ingresses go elsewhere; what they have here fails with the end of this process."""
        self.board.leave()

    # What the lane threads call.

    def take_in(self, now: float) -> None:
        for peer in self._peers:
            asks = peer.rings.asks.new()
            if not asks:
                continue
            try:
                self._read(peer, asks)
            except (InputError, ValueError):  # it does not write what it should: no ingress of ours, or one that is broken
                self._drop(peer)
            peer.rings.taken_rows = peer.taken_rows

    def formed(self) -> None:
        load = self.dispatcher.load
        self.board.write(self.dispatcher.queue.rows, load.rows, load.seconds_per_row)

    def idle(self, lanes: int) -> None:
        self.board.write_busy(not lanes)

    @property
    def waiting(self) -> bool:
        return any(peer.rings.asks.waiting for peer in self._peers)

    def expired(self, tickets: list[Ticket[PeerRequest]]) -> None:
        peers = {ticket.item.peer for ticket in tickets}
        with self.dispatcher.lock:
            for ticket in tickets:
                self._end(ticket, Status.EXPIRED)
            for peer in peers:
                peer.publish()
        for peer in peers:
            peer.wake()

    def ran(self, parts: list[Part[PeerRequest]], result: BatchResult | None) -> None:
        at, size = 0, self.tasks * 4
        peers: set[Peer] = set()
        scores, device_ms = None, 0.0
        if result is not None:
            scores, device_ms = np.ascontiguousarray(result.scores, np.float32).data.cast("B"), result.device_ms
        for ticket, start, stop in parts:
            request = ticket.item
            peer, rows = request.peer, stop - start
            request.done = done = request.done + rows
            if scores is None:
                request.ended = request.ended or Status.FAILED
            elif not peer.gone:  # else its bytes may be somebody else's by now
                first = request.scores_at
                peer.writable[first + start * size : first + stop * size] = scores[at * size : (at + rows) * size]
                request.device_ms += device_ms
            at += rows
            if done == ticket.rows and request.ended is None:  # as nearly all
                peer.answer(ticket, _OK)
            else:
                self._settle(ticket)
            peers.add(peer)
        if result is not None:
            self.board.ran(at)
        self.formed()
        for peer in peers:
            peer.publish()

    def finished(self, parts: list[Part[PeerRequest]], result: BatchResult | None) -> None:
        for peer in {ticket.item.peer for ticket, _, _ in parts}:
            peer.wake()

    # With the lock held.

    def _read(self, peer: Peer, asks: list[tuple[Any, ...]]) -> None:
        tickets, blocks, read_ahead, admit = peer.tickets, peer.blocks, self._read_ahead, self.dispatcher.admit
        for kind, slot, offset, rows, contexts, deadline, arrived, priority in asks:
            ticket = tickets.get(slot)
            if kind == _CANCEL:
                if ticket is not None:
                    self._end(ticket, Status.CANCELLED)
                    peer.publish()
                    peer.wake()
                continue
            if ticket is not None:
                raise InputError("ask", slot, "a free slot")
            block, scores_at = blocks.get((offset, rows, contexts)) or self._placed(peer, offset, rows, contexts)
            if read_ahead is not None:
                read_ahead(block)
            request = PeerRequest(peer, slot, block, scores_at)
            ticket = Ticket(request, rows, None if deadline == NO_DEADLINE else deadline, priority, arrived)
            peer.taken_rows += rows
            tickets[slot] = ticket
            try:
                admit(ticket)
            except Overloaded as error:
                peer.answer(ticket, Status.OVERLOADED, error.retry_after_s)
                peer.publish()
                peer.wake()

    def _placed(self, peer: Peer, offset: int, rows: int, contexts: int) -> tuple[RowBlock, int]:
        block = RowBlock.over(peer.memory[offset:], self.layout, rows, contexts)
        scores_at = offset + block.places[-1]
        if scores_at + rows * self.tasks * 4 > peer.memory.size:
            raise InputError("ask", (offset, rows, contexts), "bytes of the request memory")
        if self._read_ahead is None:  # else a block is one request's: it is told whether its rows were read
            if len(peer.blocks) == _KNOWN_BLOCKS:
                peer.blocks.clear()
            peer.blocks[offset, rows, contexts] = block, scores_at
        return block, scores_at

    def _end(self, ticket: Ticket[PeerRequest], why: Status) -> None:
        """No further row of it goes to the device."""
        self.dispatcher.queue.discard(ticket)
        ticket.item.ended = ticket.item.ended or why
        self._settle(ticket)

    def _settle(self, ticket: Ticket[PeerRequest]) -> None:
        """Answers a request of which nothing is on the device any more and nothing will be."""
        request = ticket.item
        if request.done == ticket.next_row and (request.ended or request.done == ticket.rows):
            request.peer.answer(ticket, request.ended or Status.OK)

    def _drop(self, peer: Peer) -> None:
        if peer.gone:
            return
        self._peers = tuple(other for other in self._peers if other is not peer)
        for ticket in peer.tickets.values():
            self.dispatcher.queue.discard(ticket)
        peer.drop()
