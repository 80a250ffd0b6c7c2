"""The port between a route and whatever scores its rows, in this process or in another one, and what comes back through it."""

from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import Floats, RowBlock


class Scored(NamedTuple):
    """A request's answer. Filled by a `Scorer`.

    Attributes:
        scores: float32[n, tasks], in the order of the block's rows.
        queue_ms: from submission until its first rows were bound to a batch.
        device_ms: the device time of the batches that held its rows, added up.
        degraded_rows: rows of tables that were late, and for which it read those of unknown values.
    """

    scores: Floats
    queue_ms: float
    device_ms: float
    degraded_rows: int = 0


class Reply(Protocol):
    """Where a request's answer goes, on the event loop: an `asyncio.Future`, or what costs less than one and a task."""

    def done(self) -> bool: ...
    def set_result(self, scored: Scored, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


class Scorer(Protocol):
    """`RowBatcher` in the process of the engine, `FanInScorer` in one beside it."""

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored: ...

    def send(self, block: RowBlock, deadline: float | None, priority: int, reply: Reply) -> Any:
        """`submit` in parts: raises what can be said at once, the reply is told the rest. Many may be sent, then `flush` has
        all of them looked at; each is `over`, with what this returned, when it is answered or given up.
        """

    def flush(self) -> None: ...

    def over(self, sent: Any, /) -> None: ...

    def allocate(self, layout: BlockLayout, rows: int, contexts: int) -> RowBlock:
        """A block of zeros to encode into, where the rows have the shortest way to the device. `submit` takes any block."""

    @property
    def accepting(self) -> bool: ...

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a lane."""


async def forwarded(scores: Awaitable[Scored], reply: Reply) -> None:
    """Tells a reply what it waits for, where a scorer cannot do without a task. Cancelled, it tells nothing."""
    try:
        scored = await scores
    except Exception as error:
        if not reply.done():
            reply.set_exception(error)
    else:
        if not reply.done():
            reply.set_result(scored)
