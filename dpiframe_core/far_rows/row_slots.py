"""Which rows lie in which slots of a memory that holds few of them, and which slot is the next to be given to another row."""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

Read = Future[None]


class Found(NamedTuple):
    """Where rows lie. Filled by `RowSlots.take`.

    Attributes:
        slots: of each row asked for. missing: (row, slot) of those that nobody reads yet.
        reads: those that others have begun, and which are not over.
    """

    slots: list[int]
    missing: list[tuple[int, int]]
    reads: set[Read]


class RowSlots:
    """Not thread-safe: its owner holds a lock. A row stays in its slot while it is held; of the others, those go first that
    were given back first.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))[::-1]
        self._slot: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # rows that nobody holds
        self._reads: dict[int, Read] = {}

    @property
    def held(self) -> int:
        """Rows that somebody holds."""
        return len(self._holders)

    def take(self, rows: Iterable[int]) -> Found | None:
        """Holds each of the rows, which are distinct. None: there are not slots enough, and nothing is held."""
        found = Found([], [], set())
        taken: list[int] = []
        for row in rows:
            slot = self._slot.get(row)
            if slot is None:
                slot = self._free_slot()
                if slot is None:
                    self.give_back(taken)
                    for lost, _ in found.missing:
                        self.forget(lost)
                    return None
                self._slot[row] = slot
                found.missing.append((row, slot))
            elif row in self._reads:
                found.reads.add(self._reads[row])
            self._idle.pop(row, None)
            self._holders[row] = self._holders.get(row, 0) + 1
            taken.append(row)
            found.slots.append(slot)
        return found

    def reading(self, rows: Iterable[int], read: Read) -> None:
        """They are being read: until `arrived` or `forget`, none of them gives up its slot."""
        for row in rows:
            self._reads[row] = read

    def arrived(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._reads.pop(row, None)
            if row in self._slot and row not in self._holders:
                self._idle[row] = None

    def is_read(self, row: int) -> bool:
        """Whether it lies in its slot."""
        return row in self._slot and row not in self._reads

    def give_back(self, rows: Iterable[int]) -> None:
        """One holder of each is done with it."""
        for row in rows:
            left = self._holders.get(row, 0) - 1
            if left > 0:
                self._holders[row] = left
                continue
            self._holders.pop(row, None)
            if row in self._slot and row not in self._reads:
                self._idle[row] = None

    def forget(self, row: int) -> None:
        """It could not be read: who asks for it next has it read again. Its slot is free once nobody holds it."""
        self._reads.pop(row, None)
        slot = self._slot.pop(row, None)
        self._idle.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        row, _ = self._idle.popitem(last=False)
        return self._slot.pop(row)
