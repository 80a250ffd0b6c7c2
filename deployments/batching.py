"""The late-binding row batcher: many requests in, full batches on the device, each request's own scores out.

Lane threads pull their next batch the moment they are free, so that a busy event loop never leaves the device without work.
Knows no Ray, no FastAPI, no torch: the device is a blocking callable.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from deployments.metrics import BatchSeen
from deployments.row_queue import DrainRate, Part, RowQueue, Ticket
from dpiframe_core.errors import DeadlineExceeded, InputError, Overloaded, TooLarge, Unavailable
from dpiframe_core.types import BatchResult, Floats, RowBlock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A request's answer. Filled by a `Scorer`.

    Attributes:
        scores: float32[n, tasks], in the order of the block's rows.
        queue_ms: from submission until its first rows were bound to a batch.
        device_ms: the device time of the batches that held its rows, added up.
    """

    scores: Floats
    queue_ms: float
    device_ms: float


class Scorer(Protocol):
    """The port between an ingress and whatever scores its rows, in this process or in another one."""

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored: ...

    @property
    def accepting(self) -> bool: ...

    @property
    def queued_rows(self) -> int: ...

    @property
    def inflight_rows(self) -> int: ...


class _Reply:
    """What it takes to answer one request. Touched by the event loop only, but `bound_at`, which the first lane sets."""

    __slots__ = ("block", "bound_at", "device_ms", "future", "missing", "scores")

    def __init__(self, block: RowBlock, future: asyncio.Future[Scored]) -> None:
        self.block = block
        self.future = future
        self.missing = block.rows
        self.scores: Floats | None = None
        self.device_ms = 0.0
        self.bound_at: float | None = None


_Part = Part[_Reply]
_Ticket = Ticket[_Reply]


class RowBatcher:
    """Scores requests through `run`, a blocking callable that may be called from `lanes` threads at once.

    All requests come from one event loop. `on_batch` is called from the lane threads.
    """

    def __init__(
        self,
        run: Callable[[Sequence[RowBlock]], BatchResult],
        *,
        max_batch_rows: int,
        lanes: int,
        max_queued_rows: int,
        clock: Callable[[], float] = time.monotonic,
        on_batch: Callable[[BatchSeen], None] | None = None,
    ) -> None:
        for name, value in (("max_batch_rows", max_batch_rows), ("lanes", lanes), ("max_queued_rows", max_queued_rows)):
            if value < 1:
                raise InputError(name, value, "at least 1")
        self.max_queued_rows = max_queued_rows
        self.lanes = lanes
        self._run = run
        self._clock = clock
        self._on_batch = on_batch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[_Ticket] = set()  # the event loop's
        self._drained = asyncio.Event()
        self._lock = threading.Lock()  # guards all below; held for microseconds, never over a run
        self._queue: RowQueue[_Reply] = RowQueue(max_batch_rows)
        self._drain = DrainRate()
        self._inflight_rows = 0
        self._busy_s = 0.0
        self._idle = 0
        self._accepting = True
        self._stopped = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"lane-{i}", daemon=True) for i in range(lanes)]
        for thread in self._threads:
            thread.start()

    @property
    def accepting(self) -> bool:
        return self._accepting

    @property
    def queued_rows(self) -> int:
        return self._queue.rows

    @property
    def inflight_rows(self) -> int:
        return self._inflight_rows

    @property
    def busy_s(self) -> float:
        """Device time of all finished batches, over all lanes, in seconds."""
        return self._busy_s

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored:
        """Waits for the block's scores. `deadline` is in seconds on the batcher's clock; a higher `priority` goes first.

        Cancelling the caller takes its waiting rows out of the queue.

        Raises:
            DeadlineExceeded: the deadline passed first.
            Overloaded: its rows do not fit into the bound on waiting rows.
            TooLarge: they never will.
            Unavailable: the batcher is closed, or the run that held some of the rows failed.
        """
        self._loop = loop = asyncio.get_running_loop()
        now, rows = self._clock(), block.rows
        if rows < 1:
            raise InputError("rows", rows, "at least 1")
        if rows > self.max_queued_rows:
            raise TooLarge("rows", rows, f"at most {self.max_queued_rows}, all that may wait at once")
        if deadline is not None and deadline <= now:
            raise _expired("before it was queued")
        ticket = Ticket(_Reply(block, loop.create_future()), rows, deadline, priority, now)
        with self._lock:
            if not self._accepting:
                raise Unavailable("batcher: got a request after it was closed, expected it at another replica")
            waiting = self._queue.rows
            if waiting + rows > self.max_queued_rows:
                raise Overloaded(waiting, self.max_queued_rows - rows, self._drain.seconds_for(waiting))
            self._queue.push(ticket)
            wake = self._idle > 0
            self._idle -= wake
        if wake:
            self._wake.put(None)
        self._open.add(ticket)
        timer = None if deadline is None else loop.call_later(deadline - now, self._expire, [ticket])
        try:
            return await ticket.item.future
        finally:
            self._open.discard(ticket)
            if timer is not None:
                timer.cancel()
            if ticket.left:  # cancelled, expired or failed: what is not bound yet goes no further
                with self._lock:
                    self._queue.discard(ticket)

    async def close(self, drain_s: float) -> None:
        """Refuses new requests, gives what waits `drain_s` seconds to finish, then answers the rest with Unavailable."""
        with self._lock:
            self._accepting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                self._settle()
                await self._drained.wait()
        with self._lock:
            self._stopped = True
            self._queue.clear()
        self._fail(list(self._open), f"batcher: got a request still open {drain_s:g} s into closing, expected all to be done")
        for _ in self._threads:
            self._wake.put(None)

    # On the lane threads.

    def _work(self) -> None:
        while True:
            with self._lock:
                now = self._clock()
                parts, expired = self._queue.form(now)
                rows = sum(part.stop - part.start for part in parts)
                if parts:
                    if not self._inflight_rows:
                        self._drain.busy_from(now)
                    self._inflight_rows += rows
                elif self._stopped:
                    return
                else:
                    self._idle += 1
            if expired:
                self._post(self._expire, expired)
            if not parts:
                self._wake.get()
                continue
            for part in parts:
                if part.start == 0:
                    part.ticket.item.bound_at = now
            result: BatchResult | None = None
            try:
                blocks = [_rows_of(part) for part in parts]
                result = self._run(blocks)
                if result.scores.shape[0] != rows:
                    raise RuntimeError(f"run: got scores of {result.scores.shape[0]} rows, expected {rows}")
            except BaseException:  # whatever it is, its clients must be answered and this lane must live on
                result = None
                log.exception("a batch of %d rows from %d requests failed", rows, len(parts))
            with self._lock:
                self._inflight_rows -= rows
                self._drain.finished(rows, self._clock())
                if result is not None:
                    self._busy_s += result.device_ms / 1e3
                else:  # before this lane forms its next batch: the rest of these requests is of no use
                    for part in parts:
                        self._queue.discard(part.ticket)
            self._post(self._deliver, parts, result)
            if self._on_batch is not None:
                computed, device_ms = (0, 0.0) if result is None else (result.bucket, result.device_ms)
                fill = rows / self._queue.max_batch_rows
                seen = BatchSeen(rows, computed, len(parts), fill, device_ms, failed=result is None)
                try:
                    self._on_batch(seen)
                except Exception:  # a broken observer must not end the lane
                    log.exception("observing a batch failed")

    def _post(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None  # a part came from a submit, which set it
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to answer
            self._loop.call_soon_threadsafe(call, *args)

    # On the event loop.

    def _deliver(self, parts: list[_Part], result: BatchResult | None) -> None:
        if result is None:
            self._fail([part.ticket for part in parts], "device: got an error on this request's batch, expected scores")
        else:
            at = 0
            for part in parts:
                count = part.stop - part.start
                _fill(part, result.scores[at : at + count], result.device_ms)
                at += count
        if not self._accepting:
            self._settle()

    def _fail(self, tickets: list[_Ticket], message: str) -> None:
        for ticket in tickets:
            if not ticket.item.future.done():
                ticket.item.future.set_exception(Unavailable(message))

    def _expire(self, tickets: list[_Ticket]) -> None:
        for ticket in tickets:
            if not ticket.item.future.done():
                where = "in the queue" if ticket.left else "on the device"
                ticket.item.future.set_exception(_expired(where))

    def _settle(self) -> None:
        with self._lock:
            done = not self._queue.rows and not self._inflight_rows
        if done and all(ticket.item.future.done() for ticket in self._open):
            self._drained.set()


def _rows_of(part: _Part) -> RowBlock:
    block = part.ticket.item.block
    return block if part.stop - part.start == block.rows else block.part(part.start, part.stop)


def _fill(part: _Part, scores: Floats, device_ms: float) -> None:
    reply = part.ticket.item
    if reply.future.done():
        return
    if part.stop - part.start == part.ticket.rows:
        reply.scores = scores
    else:
        if reply.scores is None:
            reply.scores = np.empty((part.ticket.rows, scores.shape[1]), np.float32)
        reply.scores[part.start : part.stop] = scores
    reply.missing -= part.stop - part.start
    reply.device_ms += device_ms
    if not reply.missing:
        waited = part.ticket.arrived if reply.bound_at is None else reply.bound_at
        reply.future.set_result(Scored(reply.scores, (waited - part.ticket.arrived) * 1e3, reply.device_ms))


def _expired(where: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"deadline: got past it {where}, expected the scores before it")
