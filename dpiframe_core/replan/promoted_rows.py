"""Rows that only files hold, and that are read often now: which of them lie in a GPU's memory, and which are to stay in the
host's slots for rows of files, where all others come and go.

A row is promoted in all tables that its id reads in files, or in none: a lookup then finds it by its id. It goes when the
leases that found it so are closed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.embedding.hot_rows import HotRows, Ints, Move
from dpiframe_core.far_rows.rows_ahead import RowsAhead
from dpiframe_core.replan.chosen_moves import rows_in_files, whole
from dpiframe_core.replan.recent_reads import Floats, RecentReads

_STAYING = 0.75  # of a group's slots at most: the others are for rows that pass
_LEAST = 2.0  # a row that was read once says nothing


class _Group(NamedTuple):
    """Of tables read by the same ids: its number among those of `RowsAhead`, and the tables that have rows in files."""

    number: int
    tables: tuple[int, ...]


class PromotedRows:
    """One thread's.

    Args:
        moving: of each table, its rows in the GPU's memory; None: they stay, or there is no GPU.
        check: what it raises ends a wait for requests.

    Attributes:
        together: tables of which rows in files may come into the GPU's memory, those of a group together.
    """

    def __init__(self, ahead: RowsAhead, moving: Sequence[HotRows | None], check: Callable[[], None]) -> None:
        self._ahead, self._moving, self._check = ahead, moving, check
        far = (
            _Group(i, tuple(t for t, held in zip(s.group.tables, s.held, strict=True) if held < s.group.rows))
            for i, s in enumerate(ahead.spares)
        )
        self._groups = [g for g in far if all(moving[t] is not None for t in g.tables)]
        self.together = [g.tables for g in self._groups]
        self._recent = RecentReads()
        ahead.count()

    def count(self) -> None:
        """Counts what requests asked for."""
        for keys in self._ahead.asked():
            self._recent.add(keys, np.ones(len(keys), np.int64))

    def prepared(self, moves: Sequence[Move]) -> list[Move]:
        """The moves that can be made now: their rows of files have been read, and nobody holds those whose places they take."""
        moves = whole(self._released(moves), self._moving, self.together)
        found = list(moves)
        for g in self._groups:
            found = self._fetched(g, found)
        return found

    def arrived(self, moves: Sequence[Move]) -> None:
        """Lookups find the moves' rows of files from now on."""
        for g in self._groups:
            own = [rows_in_files(m, self._hot(m.table)) for m in moves if m.table in g.tables]
            ids = np.unique(np.concatenate([np.zeros(0, np.int64), *own]))
            self._leave(g, ids[self._ahead.near.promote(g.number, ids) :])

    def keep(self, fade: float) -> None:
        """Has those rows stay in slots that were asked for most and do not lie nearer; what was counted fades."""
        keys, counts = self._recent.counted()
        keep = []
        for first, slots, own, asked in self._by_group(keys, counts):
            often = np.flatnonzero(asked >= _LEAST)
            most = often[np.argsort(-asked[often], kind="stable")[: int(_STAYING * slots)]]
            keep.append(np.sort(own[most]) + first)
        self._ahead.keep(np.concatenate(keep))
        self._recent.fade(fade)

    def _by_group(self, keys: Ints, counts: Floats) -> list[tuple[int, int, Ints, Floats]]:
        """Of each group its first key, its slots, and the ids of rows that are not near, with their counts."""
        found, first = [], 0
        for number, s in enumerate(self._ahead.spares):
            begin, end = np.searchsorted(keys, [first, first + s.group.rows])
            ids, own = keys[begin:end] - first, counts[begin:end]
            far = ~self._ahead.near.promoted(number, ids)
            found.append((first, s.slots, ids[far], own[far]))
            first += s.group.rows
        return found

    def _released(self, moves: Sequence[Move]) -> list[Move]:
        """The moves without those that would take the place of a row that a request still holds."""
        for g in self._groups:
            going = [self._going(m)[1][self._of(g, m)] for m in moves]
            ids = np.unique(np.concatenate([np.zeros(0, np.int64), *going]))
            if not len(ids):
                continue
            held = self._ahead.near.demote(g.number, ids, self._check)
            self._leave(g, ids[~held])
            moves = [m.of(~(self._of(g, m) & np.isin(self._going(m)[1], ids[held]))) for m in moves]
        return list(moves)

    def _going(self, move: Move) -> tuple[Ints, Ints]:
        """The tables and the rows whose places a move takes."""
        slots = self._hot(move.table).slots
        return slots.tables[move.slots], slots.rows[move.slots]

    def _of(self, group: _Group, move: Move) -> npt.NDArray[np.bool_]:
        """Which of the rows that go are promoted ones of a group."""
        tables, rows = self._going(move)
        found = np.zeros(len(rows), np.bool_)
        for table in group.tables:
            own = tables == table
            found[own] = self._hot(table).in_files(rows[own])
        return found

    def _leave(self, group: _Group, ids: Ints) -> None:
        """Rows have no places in the GPU's memory any more, in any table."""
        for table in group.tables:
            hot = self._hot(table)
            own = ids[hot.in_files(ids)]
            hot.leave(own[hot.slot_of(own) >= 0])

    def _fetched(self, group: _Group, moves: Sequence[Move]) -> list[Move]:
        """With the values of a group's rows in files; without those that cannot be read."""
        mine = [(m, self._hot(m.table).in_files(m.rows)) for m in moves if m.table in group.tables and m.values is None]
        ids = np.unique(np.concatenate([np.zeros(0, np.int64), *(m.rows[files] for m, files in mine)]))
        if not len(ids):
            return list(moves)
        there, values = self._ahead.fetch(ids, group.tables)
        read = ids[there]
        found = [m for m in moves if m.table not in group.tables or m.values is not None]
        for m, files in mine:
            come = files & np.isin(m.rows, read)
            at = torch.from_numpy(np.searchsorted(read, m.rows[come]))
            if come.any():
                found.append(m.of(come, values[group.tables.index(m.table)][at]))
            if not files.all():
                found.append(m.of(~files))
        return found

    def _hot(self, table: int) -> HotRows:
        hot = self._moving[table]
        assert hot is not None  # of a group, or of a move
        return hot
