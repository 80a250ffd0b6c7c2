"""A sample of the rows that are scored, taken where batches run and counted elsewhere: lanes pay for a look at the clock, and
ten times a second for a copy of some rows' ids.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock

EVERY_S = 0.1
_MOST_ROWS = 256  # of a sample. To count one takes 1.8 ms, of 26 features with two tables each
_KEPT = 64  # that nobody has counted yet


class ReadSample:
    """Any thread may offer and take.

    Args:
        restore: puts ids of rows into a copy of a block, in the place of those of slots (`RowsAhead.restore`).
    """

    def __init__(
        self,
        layout: BlockLayout,
        clock: Callable[[], float] = time.monotonic,
        restore: Callable[[RowBlock], None] | None = None,
    ) -> None:
        self._layout, self._clock, self._next, self._restore = layout, clock, 0.0, restore
        self._kept: deque[RowBlock] = deque(maxlen=_KEPT)

    def offer(self, blocks: Sequence[RowBlock]) -> None:
        """The blocks of a batch, whose slots are still held. Keeps a copy of some rows of one of them if the time has come."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + EVERY_S
        (block,) = random.choices(blocks, [b.rows for b in blocks])
        first = random.randint(0, max(0, block.rows - _MOST_ROWS))
        part = block.window(first, min(block.rows, first + _MOST_ROWS))
        own = RowBlock.allocate(self._layout, part.rows, part.contexts)  # the block's memory may be another request's soon
        own.fill((part,))
        if self._restore is not None:
            self._restore(own)
        self._kept.append(own)

    def take(self) -> list[RowBlock]:
        """What was kept since the last call."""
        return [self._kept.popleft() for _ in range(len(self._kept))]
