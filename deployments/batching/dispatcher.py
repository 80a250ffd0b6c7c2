"""Lane threads: each takes the next batch the moment it is free, runs it and hands the scores on, whoever submitted the rows.

They pull, so that a busy event loop or transport never leaves the device without work. A thread that submits may run a short
batch in their place. Knows no asyncio, no Ray, no torch: the device is a blocking callable, and answers go to a `Replies`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from deployments.batching.device_load import DeviceLoad
from deployments.batching.refusals import check_room
from deployments.batching.row_queue import Part, RowQueue, Ticket
from deployments.batching.run_times import RunTimes
from deployments.metrics import BatchSeen
from dpiframe_core.errors import Unavailable
from dpiframe_core.features.row_block import BatchResult, RowBlock

log = logging.getLogger(__name__)

Run = Callable[[Sequence[RowBlock]], BatchResult]


class Waiting(Protocol):
    """A request as lanes see it. `bound_at`: when its first rows were bound to a batch; a lane sets it."""

    block: RowBlock
    bound_at: float | None


W = TypeVar("W", bound=Waiting)


class Replies(Protocol[W]):
    """Where answers go. Called from lane threads, and from the one that calls `step_here`."""

    def expired(self, tickets: list[Ticket[W]]) -> None:
        """Their deadlines passed before all their rows were bound."""

    def finished(self, parts: list[Part[W]], result: BatchResult | None) -> None:
        """One run's scores, in the order of the parts; None if it failed."""


class Source(Protocol):
    """Where requests come from that nobody admits: it is asked before each batch. The dispatcher's lock is held."""

    def take_in(self, now: float) -> None:
        """Admits what has arrived since."""

    def formed(self) -> None:
        """A batch was taken from the queue, or there was none to take."""

    def ran(self, parts: list[Part[Any]], result: BatchResult | None) -> None:
        """A run is over, and its rows are off the load. As `Replies.finished`, which comes next, without the lock."""

    def idle(self, lanes: int) -> None:
        """So many lanes sleep, or are about to: whoever asks must wake one. Of others, each looks before it sleeps."""

    @property
    def waiting(self) -> bool:
        """Whether something has arrived that was not taken in. The lock is not held."""


class _Batch(NamedTuple, Generic[W]):
    """What was taken from the queue at one moment. `more`: something still waits. `number`: of the run, if there is one."""

    parts: list[Part[W]]
    expired: list[Ticket[W]]
    rows: int
    bound_at: float
    more: bool
    number: int


def _ended(blocks: Sequence[RowBlock]) -> BatchResult:
    raise Unavailable("lanes: got a batch after they have ended, expected none")


class Dispatcher(Generic[W]):
    """`lanes` threads between a queue and `run`, a blocking callable. At no time are more than `lanes` calls of it under way.

    Attributes:
        lock: guards the queue and the load; held for microseconds, never over a run.
        wake_fd: an eventfd. Whoever has something for an idle lane writes to it, from any thread or process.
    """

    def __init__(
        self,
        run: Run,
        replies: Replies[W],
        source: Source | None = None,
        *,
        max_batch_rows: int,
        lanes: int,
        max_queued_rows: int,
        clock: Callable[[], float],
        on_batch: Callable[[BatchSeen], None] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.queue: RowQueue[W] = RowQueue(max_batch_rows)
        self.max_queued_rows = max_queued_rows
        self.load = DeviceLoad()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._run, self._replies, self._source, self._clock, self._on_batch = run, replies, source, clock, on_batch
        self._times = RunTimes(max_batch_rows)
        self._idle = 0
        self._runs: dict[int, None] = {}  # under way, in the order of their start
        self._numbers = count()
        self._stopped = False
        self.threads = [threading.Thread(target=self._work, name=f"lane-{i}", daemon=True) for i in range(lanes)]
        self._alive = lanes
        self._most_running = max(lanes, 1)  # without threads, whoever calls `step` is the lane

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    @property
    def queued_rows(self) -> int:
        return self.queue.rows

    @property
    def inflight_rows(self) -> int:
        return self.load.rows

    @property
    def busy_s(self) -> float:
        """As `DeviceLoad.busy_s`, now."""
        with self.lock:
            return self.load.busy_s(self._clock())

    @property
    def oldest_run(self) -> int | None:
        """The number of the run that has been under way for longest."""
        with self.lock:
            return next(iter(self._runs), None)

    @property
    def over(self) -> bool:
        """It is stopped, and no run is under way any more."""
        return self._stopped and not self._runs

    def admit(self, ticket: Ticket[W]) -> None:
        """Queues a request. The lock is held. Raises as `check_room`."""
        rows, queue = ticket.rows, self.queue
        if rows < 1 or queue.rows + rows > self.max_queued_rows:
            check_room(rows, queue.rows, self.max_queued_rows, self.load.seconds_per_row)
        queue.push(ticket)

    def wake(self) -> None:
        """Has idle lanes look for work. Free when none is idle."""
        if self._idle:
            os.eventfd_write(self.wake_fd, 1)

    def stop(self) -> None:
        """Drops what waits; the threads end with the runs that they have."""
        with self.lock:
            self._stopped = True
            self.queue.clear()
            if self._alive:
                os.eventfd_write(self.wake_fd, 1)  # with the lock held: the last thread to end closes it
            else:
                os.close(self.wake_fd)

    def short(self, limit_s: float) -> bool:
        """Whether all that waits is one batch, expected to run for at most `limit_s` seconds, and not all lanes have one."""
        rows = self.queue.rows
        if not 1 <= rows <= self.queue.max_batch_rows or self.load.batches == self._most_running:
            return False
        return self._times.expected(rows) <= limit_s

    def step(self) -> bool:
        """A lane's turn: forms and runs one batch; False if there is none for it."""
        with self.lock:
            batch = self._form()
            if not batch.parts:
                self._rest(1)  # before the lock is released: who queues something from now on must wake this lane
        self._carry_out(batch, here=False)
        return bool(batch.parts)

    def step_here(self, limit_s: float) -> None:
        """Runs what waits on the caller's thread if it is `short`, in place of a lane; else has a lane do it.

        Raises:
            KeyboardInterrupt, SystemExit: they came during the run, which has failed for that.
        """
        with self.lock:
            batch = self._form() if self.short(limit_s) else None
        fault = None if batch is None else self._carry_out(batch, here=True)
        if self.queue.rows:  # too much for this thread, or a lane meanwhile found all of them taken
            self.wake()
        if fault is not None and not isinstance(fault, Exception):
            raise fault

    def _rest(self, more: int) -> None:
        self._idle += more
        if self._source is not None:
            self._source.idle(self._idle)

    def _form(self) -> _Batch[W]:
        """The next batch, counted as running; empty if nothing waits or all lanes have one. The lock is held."""
        now = self._clock()
        if self._source is not None and not self._stopped:
            self._source.take_in(now)
        free = self.queue.rows > 0 and self.load.batches < self._most_running
        parts, expired = self.queue.form(now) if free else ([], [])
        rows = sum([stop - start for _, start, stop in parts])
        number = next(self._numbers)
        if parts:
            self.load.started(rows, now)
            self._runs[number] = None
        if self._source is not None:
            self._source.formed()
        return _Batch(parts, expired, rows, now, self.queue.rows > 0, number)

    def _carry_out(self, batch: _Batch[W], *, here: bool) -> BaseException | None:
        """Runs a batch and hands its scores on. Returns why the run failed, if it did."""
        parts, expired, rows, bound_at, more, number = batch
        if expired:
            self._replies.expired(expired)
        if not parts:
            return None
        if more:
            self.wake()
        blocks = []
        for ticket, start, stop in parts:
            item = ticket.item
            if start == 0:
                item.bound_at = bound_at
            blocks.append(item.block if stop - start == ticket.rows else item.block.window(start, stop))
        result, fault = None, None
        timed = not here and self._source is None  # with a source nobody asks what a run on his thread would take
        cpu_s = -time.thread_time() if timed else 0.0
        try:
            result = self._run(blocks)
            if result.scores.shape[0] != rows:
                raise RuntimeError(f"run: got scores of {result.scores.shape[0]} rows, expected {rows}")
        except BaseException as error:  # whatever it is, its clients must be answered and this lane must live on
            result, fault = None, error
            log.exception("a batch of %d rows from %d requests failed", rows, len(parts))
        if timed:
            cpu_s += time.thread_time()
        with self.lock:
            now = self._clock()
            self.load.finished(rows, now)
            del self._runs[number]
            if result is None:  # before this lane forms its next batch: the rest of these requests is of no use
                for part in parts:
                    self.queue.discard(part.ticket)
            elif here:
                self._times.ran_here(rows, now - bound_at)
            elif timed:
                self._times.ran_elsewhere(rows, now - bound_at, cpu_s)
            if self._source is not None:
                self._source.ran(parts, result)
        self._replies.finished(parts, result)
        self._observe(rows, len(parts), result)
        return fault

    def _observe(self, rows: int, requests: int, result: BatchResult | None) -> None:
        if self._on_batch is None:
            return
        computed, device_ms = (0, 0.0) if result is None else (result.bucket, result.device_ms)
        seen = BatchSeen(rows, computed, requests, rows / self.queue.max_batch_rows, device_ms, failed=result is None)
        try:
            self._on_batch(seen)
        except Exception:  # a broken observer must not end the lane
            log.exception("observing a batch failed")

    def _work(self) -> None:
        while True:
            try:
                found = self.step()
            except Exception:  # a fault of the source; a lane that ends would leave the device idle for good
                log.exception("a lane failed between two batches")
                continue
            if found:
                continue
            if self._stopped:
                break
            # Who saw all lanes busy wakes none. The release of the lock was a fence, so either that was seen or this is.
            if self._source is None or not self._source.waiting:
                os.eventfd_read(self.wake_fd)
            with self.lock:
                self._rest(-1)
        os.eventfd_write(self.wake_fd, 1)  # the next lane's turn to end
        with self.lock:
            self._alive -= 1
            if not self._alive:
                os.close(self.wake_fd)
                self._run = (
                    _ended  # an engine's memory is not to wait until a collection finds this in its cycle with `replies`
                )
