"""Has rows that only files hold read before a request waits for a batch: others overtake it meanwhile, and no lane waits.

Owns how long a request waits for them, and what becomes of it then. Everything else is the scorer's behind it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

from deployments.batching.refusals import check_deadline
from deployments.batching.scorer import Reply, Scored, Scorer, forwarded
from deployments.config_tables import TablesHome
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock


class Lease(Protocol):
    """See `dpiframe_core.far_rows.lease`."""

    block: RowBlock
    reads: frozenset[Future[None]]

    def check(self, done: Iterable[Future[None]]) -> None: ...
    def settle(self) -> int: ...
    def close(self) -> None: ...


class LeasingScorer:
    """A `Scorer` before another one.

    Args:
        lease: `Engine.lease`.
        budget_s: how long a request waits for rows; then rows of unknown values take the place of those that are late, or that
            could not be read. None: it waits until its deadline, and fails if a row cannot be read.
    """

    def __init__(
        self,
        scorer: Scorer,
        lease: Callable[[RowBlock], Lease],
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scorer, self._lease, self._budget_s, self._clock = scorer, lease, budget_s, clock

    @property
    def accepting(self) -> bool:
        return self._scorer.accepting

    @property
    def queued_rows(self) -> int:
        return self._scorer.queued_rows

    def allocate(self, layout: BlockLayout, rows: int, contexts: int) -> RowBlock:
        return self._scorer.allocate(layout, rows, contexts)

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored:
        """As the scorer's.

        Raises:
            Overloaded, TooLarge, Unavailable: see `Lease`. DeadlineExceeded: it passed while rows were read.
        """
        started = self._clock()
        lease = self._lease(block)
        try:
            left = None if deadline is None else deadline - started
            await _over(lease.reads, left if self._budget_s is None else self._budget_s)
            late = 0
            if self._budget_s is None:
                check_deadline(deadline, self._clock(), "while its rows were read")
                lease.check(lease.reads)
            elif any(not read.done() or read.exception() for read in lease.reads):
                late = lease.settle()
            waited_ms = (self._clock() - started) * 1e3
            scored = await self._scorer.submit(lease.block, deadline, priority)
            return scored._replace(queue_ms=scored.queue_ms + waited_ms, degraded_rows=late)
        finally:
            lease.close()

    def send(self, block: RowBlock, deadline: float | None, priority: int, reply: Reply) -> asyncio.Task[None]:
        """As `Scorer.send`. It may wait for files, hence a task of its own."""
        return asyncio.create_task(forwarded(self.submit(block, deadline, priority), reply))

    def flush(self) -> None:
        """Nothing: each request goes on as soon as its rows are read."""

    def over(self, sent: asyncio.Task[None], /) -> None:
        sent.cancel()


class Leases(Protocol):
    """The part of `Engine` that this needs."""

    @property
    def reads_ahead(self) -> bool: ...

    def lease(self, block: RowBlock) -> Lease: ...


def ahead_of(scorer: Scorer, engine: Leases, tables: TablesHome | None) -> Scorer:
    """A `LeasingScorer` ahead of the scorer, if rows of the engine's tables lie in files."""
    if not engine.reads_ahead:
        return scorer
    budget_ms = None if tables is None else tables.miss_budget_ms
    return LeasingScorer(scorer, engine.lease, None if budget_ms is None else budget_ms / 1e3)


async def _over(reads: frozenset[Future[None]], seconds: float | None) -> None:
    """Until all are over; for so long at most."""
    left = sum(not read.done() for read in reads)
    if not left:
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def ended() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            over.set()

    left = len(reads)
    for read in reads:
        read.add_done_callback(lambda _: _tell(loop, ended))
    try:
        await asyncio.wait_for(over.wait(), None if seconds is None else max(0.0, seconds))
    except TimeoutError:
        return


def _tell(loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(ended)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
