"""Which rows of a table lie in a GPU's memory, while that changes: rows come in the place of others, which lie in the host's
memory as all rows do, or in files. Nothing moves that another process reads.

A lookup finds a row by its place: uint32[rows] on the device, twice, one of each generation of descriptors. Only those are
written that no batch reads: first the rows that go are given their places in the host's memory, and when no batch reads the
former generation any more, others are copied to where they were.

Tables whose rows have the same form share their slots: a row may take the place of another table's. So what each has of the
memory follows traffic, too.
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
        table: its number. rows: int64[k], ids, distinct. slots: int64[k], distinct: where each goes, of those that its table
            shares with others.
        values: [k, dim] of rows that only files hold; None: the host's memory holds them all.
    """

    table: int
    rows: Ints
    slots: Ints
    values: torch.Tensor | None = None

    def of(self, which: npt.NDArray[np.bool_], values: torch.Tensor | None = None) -> "Move":
        """Some of its rows."""
        return Move(self.table, self.rows[which], self.slots[which], values)


class HotSlots:
    """Places in a GPU's memory for rows of one form, and which row lies in each.

    Args:
        hot: of each table that shares them its number, and how many are its own at first. like: [*, dim], a table of theirs.

    Attributes:
        memory: [slots, dim] on the device. tables, rows: int64[slots], the number of the table, -1 if there is none, and the
            row. own: by table, where those begin and end that are its own at first.
    """

    def __init__(self, hot: Sequence[tuple[int, int]], like: torch.Tensor, device: torch.device) -> None:
        ends = np.cumsum([n for _, n in hot]).tolist()
        self.memory = torch.empty(ends[-1], like.shape[1], dtype=like.dtype, device=device)
        self.tables: Ints = np.repeat([table for table, _ in hot], [n for _, n in hot])
        self.rows: Ints = np.zeros(ends[-1], np.int64)
        self.own = {table: (end - n, end) for (table, n), end in zip(hot, ends, strict=True)}


class HotRows:
    """Of one table. Its owner has one thread that changes it.

    Args:
        table: its number. ranks: of each row; None: ids are ranks. spare: slots behind the rows, for those of files.
        homes: [held, dim] in the host's memory, in the order of ranks.

    Attributes:
        places: of each generation, uint32[rows + spare] on the device (as int32).
        end: places of slots that are the table's own at first, and of rows that are not hot, are below it, those of others'
            slots from it on, below `last`.
    """

    def __init__(
        self, table: int, p: TablePlacement, ranks: Ranks | None, spare: int, slots: HotSlots, homes: torch.Tensor
    ) -> None:
        self._table, self._p, self._ranks, self._behind = table, p, ranks, p.rows + spare
        self.slots, self._homes = slots, homes
        self.end = self._behind + p.hot
        self.last = self.end + len(slots.rows)
        self._begin, self._own_end = slots.own[table]
        own = np.arange(p.rows, dtype=np.uint32) if ranks is None else ranks
        self._place = np.where(own < p.held, own, np.uint32(0)) if p.in_files else own.copy()
        near = np.flatnonzero(own < p.hot)
        slots.rows[self._begin + own[near]] = near
        every = np.concatenate([self._place, np.arange(p.rows, self._behind, dtype=np.uint32)])
        self.places = [torch.from_numpy(every.view(np.int32)).to(slots.memory.device, copy=True) for _ in range(2)]
        self._changed: list[list[Ints]] = [[], []]

    @staticmethod
    def move(p: TablePlacement, spare: int) -> bool:
        """Whether rows of a table can: there are some nearer than others, and places have room in 32 bits."""
        return 0 < p.hot < p.rows and p.rows + spare + p.hot < _MOST_PLACES

    def slot_of(self, ids: Ints) -> Ints:
        """The slot of each row; -1 of those that lie in none. (The place of a row in files is 0: nobody asks for it.)"""
        places = self._place[ids].astype(np.int64)
        found = np.where(places < self._p.hot, places + self._begin, places - self.end)
        far = (places >= self._p.hot) & (places < self.end)
        found[far] = 0
        own = ~far & (self.slots.rows[found] == ids) & (self.slots.tables[found] == self._table)
        return np.where(own, found, -1)

    def in_files(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which rows no memory of the host holds."""
        found: npt.NDArray[np.bool_] = self._home_ranks(ids) >= self._p.held
        return found

    def warm(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """Which rows are read in the memory of the host's GPUs while they are not in this one's; others in the host's."""
        ranks = self._home_ranks(ids)
        found: npt.NDArray[np.bool_] = (ranks >= self._p.hot) & (ranks < self._p.warm)
        return found

    def leave(self, rows: Ints) -> None:
        """From the next generation on these rows are read in the host's memory; nobody asks for those that files hold."""
        slots = self.slot_of(rows)
        self.slots.tables[slots[slots >= 0]] = -1
        ranks = self._home_ranks(rows)
        held = np.where(ranks < self._p.held, ranks, 0)
        self._put(rows, np.where(ranks < self._p.hot, ranks + self._behind, held))

    def arrive(self, rows: Ints, slots: Ints, values: torch.Tensor | None = None) -> None:
        """Copies rows into slots that nobody reads, from where they lie in the host's memory, or `values`. From the next
        generation on they are read there.
        """
        memory = self.slots.memory
        step = max(1, _PART_BYTES // (memory.shape[1] * memory.element_size()))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            if values is None:
                found = self._homes.index_select(0, torch.from_numpy(self._home_ranks(rows[part])))
            else:
                found = values[part]
            memory.index_copy_(0, torch.from_numpy(slots[part]).to(memory.device), found.to(memory.device))
        self.slots.tables[slots], self.slots.rows[slots] = self._table, rows
        self._put(rows, np.where((slots >= self._begin) & (slots < self._own_end), slots - self._begin, slots + self.end))

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


def shared_slots(
    places: Sequence[TablePlacement],
    tables: Sequence[torch.Tensor],
    spares: Sequence[int],
    moves: Sequence[bool],
    device: torch.device,
) -> list[HotSlots | None]:
    """Of each table whose rows move, the slots that it shares with all tables whose rows have the same form."""
    most = sum(p.hot for p, may in zip(places, moves, strict=True) if may)
    together: dict[object, list[tuple[int, int]]] = {}
    for i, (p, t, spare, may) in enumerate(zip(places, tables, spares, moves, strict=True)):
        if may:  # a table whose places have no room for others' slots keeps to its own
            shares = p.rows + spare + p.hot + most < _MOST_PLACES
            together.setdefault((t.shape[1], t.dtype) if shares else i, []).append((i, p.hot))
    found: list[HotSlots | None] = [None] * len(places)
    for hot in together.values():
        slots = HotSlots(hot, tables[hot[0][0]], device)
        for i, _ in hot:
            found[i] = slots
    return found


def place_bytes(places: Sequence[TablePlacement]) -> int:
    """Of each GPU's memory, beyond a placement's own, to have its rows move."""
    return PLACE_BYTES * sum(p.rows for p in places if HotRows.move(p, 0))
