"""Keeps the rows in a GPU's memory that are read most now: counts samples of what was scored, and moves rows from time to time.

Nothing that other processes read moves: the host's memory and the shares of warm rows stay as the placement has them. Rows of
files stay with the slots of `RowsAhead`, which follow what is read by themselves.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.row_counts import block_reads
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.replan.chosen_moves import chosen_moves
from dpiframe_core.replan.read_sample import ReadSample
from dpiframe_core.replan.recent_reads import RecentReads

log = logging.getLogger(__name__)
_FADE = 0.5  # what was read before the last move counts half


@dataclass(frozen=True, slots=True)
class TableReads:
    """Since the start: reads of sampled rows by where they were served, and rows that came into the GPU's memory."""

    hot: int = 0
    peers: int = 0
    host: int = 0
    files: int = 0
    rows_moved: int = 0


class Replanner:
    """Its `step` is one thread's.

    Args:
        over: see `Tiers.move`. slots: of each table, for rows of files.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        tiers: Tiers,
        home: Home,
        slots: dict[str, int],
        over: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sample = ReadSample(schema.block_layout, clock)
        self._schema, self._tiers, self._slots, self._over, self._clock = schema, tiers, slots, over, clock
        self._every_s, self._most_bytes, self._gpus = home.replan_s or 0.0, home.move_bytes, home.placement.gpus
        self._number = {t.name: i for i, t in enumerate(schema.tables)}
        self._row_bytes = [t.row_bytes for t in schema.tables]
        self._recent = [RecentReads() for _ in schema.tables]
        self._totals = np.zeros(4, np.int64)
        self._moved = 0
        self._due = clock() + self._every_s

    @property
    def reads(self) -> TableReads:
        hot, peers, host, files = self._totals.tolist()
        return TableReads(hot, peers, host, files, self._moved)

    def step(self) -> None:
        """Counts what was sampled; moves rows if it is time."""
        for block in self.sample.take():
            for name, ids, times in block_reads(self._schema, block, self._slots):
                table = self._number[name]
                self._totals += np.bincount(self._tiers.tiers_of(table, ids), times, 4).astype(np.int64)
                if self._tiers.moving[table] is not None:
                    held = ids < self._schema.tables[table].rows
                    self._recent[table].add(ids[held], times[held])
        if self._clock() >= self._due:
            self.move()
            self._due = self._clock() + self._every_s

    def move(self) -> None:
        """Has rows move by what was counted."""
        counted = [recent.counted() for recent in self._recent]
        moves = chosen_moves(counted, self._tiers.moving, self._row_bytes, self._most_bytes, self._gpus)
        for recent in self._recent:
            recent.fade(_FADE)
        if moves:
            moved = self._tiers.move(moves, self._over)
            self._moved += moved
            log.info("%d rows came into %s's memory", moved, self._tiers.descriptors.tables.device)
