"""Which rows of a table lie in a GPU's memory, while that changes: rows come in the place of others, which lie in the host's
memory as all rows do. Nothing moves that another process reads.

A lookup finds a row by its place: uint32[rows] on the device, twice, one of each generation of descriptors. Only those are
written that no batch reads: first the rows that go are given their places in the host's memory, and when no batch reads the
former generation any more, others are copied to where they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.embedding.placement import TablePlacement

Ints = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.uint32]
PLACE_BYTES = 8  # of a GPU's memory for each row of a table whose rows move
_MOST_PLACES = 2**32
_PART_BYTES = 16 << 20  # copied at once


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Rows of a table that are to lie in a GPU's memory, in the place of others. Filled by `chosen_moves`.

    Attributes:
        table: its number. rows: int64[k], ids, distinct. slots: int64[k], distinct: where in the GPU's memory each goes.
    """

    table: int
    rows: Ints
    slots: Ints


class HotRows:
    """Of one table. Its owner has one thread that changes it.

    Args:
        ranks: of each row; None: ids are ranks. spare: slots behind the rows, for those of files.
        hot: [hot, dim] on the device. homes: [held, dim] in the host's memory, in the order of ranks.

    Attributes:
        places: of each generation, uint32[rows + spare] on the device (as int32).
        rows: int64[hot], the row in each slot.
        end: places are below it.
    """

    def __init__(self, p: TablePlacement, ranks: Ranks | None, spare: int, hot: torch.Tensor, homes: torch.Tensor) -> None:
        self._p, self._ranks, self._behind = p, ranks, p.rows + spare
        self._hot, self._homes = hot, homes
        self.end = self._behind + p.hot
        own = np.arange(p.rows, dtype=np.uint32) if ranks is None else ranks
        self._place = np.where(own < p.held, own, np.uint32(0)) if p.in_files else own.copy()
        self.rows: Ints = np.zeros(p.hot, np.int64)
        near = np.flatnonzero(own < p.hot)
        self.rows[own[near]] = near
        every = np.concatenate([self._place, np.arange(p.rows, self._behind, dtype=np.uint32)])
        self.places = [torch.from_numpy(every.view(np.int32)).to(hot.device, copy=True) for _ in range(2)]
        self._changed: list[list[Ints]] = [[], []]

    @staticmethod
    def move(p: TablePlacement, spare: int) -> bool:
        """Whether rows of a table can: there are some nearer than others, and places have room in 32 bits."""
        return 0 < p.hot < p.held and p.rows + spare + p.hot < _MOST_PLACES

    def at(self, ids: Ints) -> Ints:
        """The place of each row; below `hot` it is in the GPU's memory."""
        return self._place[ids].astype(np.int64)

    def far(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which rows some memory holds, but not the GPU's own. (Places of rows of files are 0: nobody asks for them.)"""
        found: npt.NDArray[np.bool_] = self._place[ids] >= self._p.hot
        return found

    def warm(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which rows are read in the memory of the host's GPUs while they are not in this one's; others in the host's."""
        ranks = self._home_ranks(ids)
        found: npt.NDArray[np.bool_] = (ranks >= self._p.hot) & (ranks < self._p.warm)
        return found

    def leave(self, slots: Ints) -> None:
        """From the next generation on the rows in these slots are read where they lie in the host's memory."""
        rows = self.rows[slots]
        ranks = self._home_ranks(rows)
        self._put(rows, np.where(ranks < self._p.hot, ranks + self._behind, ranks))

    def arrive(self, rows: Ints, slots: Ints) -> None:
        """Copies rows into slots that nobody reads. From the next generation on they are read there."""
        step = max(1, _PART_BYTES // (self._hot.shape[1] * self._hot.element_size()))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            found = self._homes.index_select(0, torch.from_numpy(self._home_ranks(rows[part])))
            self._hot.index_copy_(0, torch.from_numpy(slots[part]).to(self._hot.device), found.to(self._hot.device))
        self.rows[slots] = rows
        self._put(rows, slots)

    def catch_up(self, generation: int) -> None:
        """Has the places of a generation, which no batch reads, tell what was changed."""
        if not self._changed[generation]:
            return
        rows = np.unique(np.concatenate(self._changed[generation]))
        self._changed[generation] = []
        memory = self.places[generation]
        now = torch.from_numpy(self._place[rows].view(np.int32))
        memory.index_copy_(0, torch.from_numpy(rows).to(memory.device), now.to(memory.device))

    def _put(self, rows: Ints, places: Ints) -> None:
        self._place[rows] = places
        for changed in self._changed:
            changed.append(rows)

    def _home_ranks(self, ids: Ints) -> Ints:
        return ids if self._ranks is None else self._ranks[ids].astype(np.int64)


def place_bytes(places: Sequence[TablePlacement]) -> int:
    """Of each GPU's memory, beyond a placement's own, to have its rows move."""
    return PLACE_BYTES * sum(p.rows for p in places if HotRows.move(p, 0))
