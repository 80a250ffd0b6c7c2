"""The port between a route and whatever scores its rows, in this process or in another one, and what comes back through it."""

from dataclasses import dataclass
from typing import Protocol

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import Floats, RowBlock


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
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


class Scorer(Protocol):
    """`RowBatcher` in the process of the engine, `FanInScorer` in one beside it."""

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored: ...

    def allocate(self, layout: BlockLayout, rows: int, contexts: int) -> RowBlock:
        """A block of zeros to encode into, where the rows have the shortest way to the device. `submit` takes any block."""

    @property
    def accepting(self) -> bool: ...

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a lane."""
