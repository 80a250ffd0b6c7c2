"""Keeps the rows in a GPU's memory that are read most now: counts samples of what was scored, and moves rows from time to time.

Nothing that other processes read moves: the host's memory and the shares of warm rows stay as the placement has them. Rows that
only files hold come, too (`PromotedRows`); those that are read less, and all on a CPU, stay in slots of the host's memory.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.hot_rows import Ints
from dpiframe_core.embedding.row_counts import block_reads
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.far_rows.rows_ahead import RowsAhead
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.replan.chosen_moves import chosen_moves
from dpiframe_core.replan.promoted_rows import PromotedRows
from dpiframe_core.replan.read_sample import ReadSample
from dpiframe_core.replan.recent_reads import RecentReads

log = logging.getLogger(__name__)
_FADE = 0.5  # what was read before the last move counts half


@dataclass(frozen=True, slots=True)
class TableReads:
    """Since the start: reads of sampled rows by where they were served, and rows that came into the GPU's memory. files: in the
    slots for rows of files.
    """

    hot: int = 0
    peers: int = 0
    host: int = 0
    files: int = 0
    rows_moved: int = 0


class Replanner:
    """Its `step` is one thread's.

    Args:
        tiers: None on a CPU. ahead: reads the rows of files; None: there are none. over: see `Tiers.move`. check: raises if the
            engine is closed.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        tiers: Tiers | None,
        ahead: RowsAhead | None,
        home: Home,
        over: Callable[[], None],
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sample = ReadSample(schema.block_layout, clock, None if ahead is None else ahead.restore)
        self._schema, self._tiers, self._over, self._clock, self._placement = schema, tiers, over, clock, home.placement
        self._moving = tiers.moving if tiers is not None else [None] * len(schema.tables)
        self._promoted = None if ahead is None else PromotedRows(ahead, self._moving, check)
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
            for name, ids, times in block_reads(self._schema, block):
                table = self._number[name]
                self._totals += np.bincount(self._tiers_of(table, ids), times, 4).astype(np.int64)
                if self._moving[table] is not None:
                    self._recent[table].add(ids, times)
        if self._promoted is not None:
            self._promoted.count()
        if self._clock() >= self._due:
            self.move()
            self._due = self._clock() + self._every_s

    def move(self) -> None:
        """Has rows move by what was counted."""
        if self._tiers is not None:
            self._move(self._tiers)
        if self._promoted is not None:
            self._promoted.keep(_FADE)

    def _move(self, tiers: Tiers) -> None:
        counted, promoted = [recent.counted() for recent in self._recent], self._promoted
        together = () if promoted is None else promoted.together
        moves = chosen_moves(counted, self._moving, self._row_bytes, self._most_bytes, self._gpus, together=together)
        for recent in self._recent:
            recent.fade(_FADE)
        if promoted is not None:
            moves = promoted.prepared(moves)
        if moves:
            moved = tiers.move(moves, self._over)
            self._moved += moved
            log.info("%d rows came into %s's memory", moved, tiers.descriptors.tables.device)
        if promoted is not None:
            promoted.arrived(moves)

    def _tiers_of(self, table: int, ids: Ints) -> npt.NDArray[np.intp]:
        """As `Tiers.tiers_of`; a CPU has all that files do not hold alone in the host's memory."""
        if self._tiers is not None:
            return self._tiers.tiers_of(table, ids)
        p = self._placement.tables[table]
        ranks = self._placement.ranks.get(p.table)
        return np.maximum(p.tiers(ids if ranks is None else ranks[ids]), 2)
