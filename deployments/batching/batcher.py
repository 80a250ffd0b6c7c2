"""The late-binding row batcher of one process: many requests in, each request's own scores out.

Waits on an event loop for what the lane threads of a `Dispatcher` do, or does what is short itself. Knows no Ray, no FastAPI,
no torch: the device is a blocking callable.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np

from deployments.batching.dispatcher import Dispatcher, Run
from deployments.batching.refusals import check_deadline, expired
from deployments.batching.row_queue import Part, Ticket
from deployments.batching.scorer import Reply, Scored
from deployments.metrics import BatchSeen
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, Floats, RowBlock


class _Reply:
    """What it takes to answer one request. Touched by the event loop only, but `bound_at`, which the first lane sets."""

    __slots__ = ("block", "bound_at", "device_ms", "future", "missing", "scores", "timer")

    def __init__(self, block: RowBlock, future: Reply) -> None:
        self.block = block
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.missing = block.rows
        self.scores: Floats | None = None
        self.device_ms = 0.0
        self.bound_at: float | None = None


_Part = Part[_Reply]
_Ticket = Ticket[_Reply]

_HERE_S = 200e-6  # on a quiet host the hand-over takes some 130 us; under load it waits for the interpreter besides


class RowBatcher:
    """Scores requests through `run`, a blocking callable that may be called from `lanes` threads at once.

    All requests come from one event loop. It runs a batch itself, at the end of the round in which its requests came, if that
    is expected to take no longer than handing it to a lane's thread and back: 0.2 ms. Longer runs gain nothing there: on two
    CPU cores a lone request saves 45 us of hand-over, and pays as much for caches that the run has swept. `on_batch` is called
    from whichever thread has run the batch.
    """

    def __init__(
        self,
        run: Run,
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
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the event loop's
        self._due = False  # `_run_here` is scheduled
        self._open: set[_Ticket] = set()  # the event loop's
        self._drained = asyncio.Event()
        self._accepting = True
        self.dispatcher: Dispatcher[_Reply] = Dispatcher(
            run,
            self,
            max_batch_rows=max_batch_rows,
            lanes=lanes,
            max_queued_rows=max_queued_rows,
            clock=clock,
            on_batch=on_batch,
        )
        self.dispatcher.start()

    @property
    def accepting(self) -> bool:
        return self._accepting

    @property
    def queued_rows(self) -> int:
        return self.dispatcher.queued_rows

    def allocate(self, layout: BlockLayout, rows: int, contexts: int) -> RowBlock:
        return RowBlock.allocate(layout, rows, contexts)

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored:
        """Waits for the block's scores. `deadline` is in seconds on the batcher's clock; a higher `priority` goes first.

        Cancelling the caller takes its waiting rows out of the queue.

        Raises:
            DeadlineExceeded: the deadline passed first.
            Overloaded: its rows do not fit into the bound on waiting rows.
            TooLarge: they never will.
            Unavailable: the batcher is closed, or the run that held some of the rows failed.
        """
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        ticket = self.send(block, deadline, priority, future)
        if not self.dispatcher.short(_HERE_S):
            self.dispatcher.wake()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._run_here)
        try:
            return await future
        finally:
            self.over(ticket)

    def send(self, block: RowBlock, deadline: float | None, priority: int, reply: Reply) -> "_Ticket":
        """As `Scorer.send`. Raises as `submit`."""
        self._loop = loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        now, dispatcher = self._clock(), self.dispatcher
        check_deadline(deadline, now, "before it was queued")
        ticket = Ticket(_Reply(block, reply), block.rows, deadline, priority, now)
        with dispatcher.lock:
            if not self._accepting:
                raise Unavailable("batcher: got a request after it was closed, expected it at another replica")
            dispatcher.admit(ticket)
        self._open.add(ticket)
        if deadline is not None:
            ticket.item.timer = loop.call_later(deadline - now, self._expire, [ticket])
        return ticket

    def flush(self) -> None:
        """Runs what was sent, if it is short; else has a lane do it."""
        self.dispatcher.step_here(_HERE_S)

    def over(self, ticket: "_Ticket", /) -> None:
        self._open.discard(ticket)
        if ticket.item.timer is not None:
            ticket.item.timer.cancel()
        if ticket.left:  # cancelled, expired or failed: what is not bound yet goes no further
            with self.dispatcher.lock:
                self.dispatcher.queue.discard(ticket)
        if not self.accepting:  # it may be the last one, with no batch to come that would tell
            self._settle()

    async def close(self, drain_s: float) -> None:
        """Refuses new requests, gives what waits `drain_s` seconds to finish, then answers the rest with Unavailable."""
        if not self._accepting:
            return
        with self.dispatcher.lock:
            self._accepting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                self._settle()
                await self._drained.wait()
        self.dispatcher.stop()
        self._fail(list(self._open), f"batcher: got a request still open {drain_s:g} s into closing, expected all to be done")

    def fail(self, why: str) -> None:
        """Refuses new requests from now on, and answers all that are open with Unavailable. Any thread may call it."""
        with self.dispatcher.lock:
            self._accepting = False
            self.dispatcher.queue.clear()
        if self._loop is not None:  # else there was no request yet
            self._post(lambda: self._fail(list(self._open), why))

    # What whoever runs batches calls.

    def expired(self, tickets: list[_Ticket]) -> None:
        self._post(self._expire, tickets)

    def finished(self, parts: list[_Part], result: BatchResult | None) -> None:
        self._post(self._deliver, parts, result)

    def _post(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None  # a part came from a submit, which set it
        if threading.get_ident() == self._thread:
            call(*args)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to answer
            self._loop.call_soon_threadsafe(call, *args)

    # On the event loop.

    def _run_here(self) -> None:
        self._due = False
        self.dispatcher.step_here(_HERE_S)

    def _deliver(self, parts: list[_Part], result: BatchResult | None) -> None:
        if result is None:
            self._fail([part.ticket for part in parts], "device: got an error on this request's batch, expected scores")
        else:
            now, at = self._clock(), 0
            for part in parts:
                ticket, count = part.ticket, part.stop - part.start
                if ticket.deadline is not None and ticket.deadline <= now:  # during a run here no timer could tell
                    self._expire([ticket])
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
                ticket.item.future.set_exception(expired(where))

    def _settle(self) -> None:
        with self.dispatcher.lock:
            done = not self.dispatcher.queued_rows and not self.dispatcher.inflight_rows
        if done and all(ticket.item.future.done() for ticket in self._open):
            self._drained.set()


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
