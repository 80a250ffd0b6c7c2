"""What an ingress and an engine process tell each other through shared memory: two rings of entries of one size each.

A ring has one writer and one reader. An entry is written before the count that publishes it, and x86-64 lets nobody see these
stores in another order; on processors that do, this needs fences, so `require_ordered_stores` refuses them.
"""

import mmap
from enum import IntEnum
from struct import Struct
from typing import Any

SLOTS = 4096  # requests of one ingress that one engine may have at a time; a ring never overflows, see `Rings`

# kind, slot, offset of the block in the memory, rows, contexts, deadline and arrival (CLOCK_MONOTONIC seconds), priority.
_ASK = Struct("<IIQIIddi4x")
# slot, status, queue and device milliseconds, retry after (seconds).
_ANSWER = Struct("<IIfff4x")
_LINE = 64  # a count has a cache line of its own

NO_DEADLINE = float("inf")


class Ask(IntEnum):
    """What an ingress asks of an engine."""

    SCORE = 1
    CANCEL = 2  # of the slot's request; nothing if it has been answered meanwhile


class Status(IntEnum):
    """How a request ended. Its slot and its bytes of the request memory are the ingress's again."""

    OK = 1
    CANCELLED = 2
    EXPIRED = 3
    OVERLOADED = 4
    FAILED = 5


class Ring:
    """Entries from one writer to one reader in `memory` (of at least `nbytes`); each side makes its own."""

    def __init__(self, memory: memoryview, entry: Struct, capacity: int) -> None:
        if capacity & (capacity - 1):
            raise ValueError(f"capacity: got {capacity}, expected a power of two")
        self._capacity, self._mask, self._size = capacity, capacity - 1, entry.size
        self._pack, self._unpack, self._unpack_all = entry.pack_into, entry.unpack_from, entry.iter_unpack
        self._published = memory[:8].cast("Q")
        self._entries = memory[_LINE : self.nbytes(entry, capacity)]
        self._at = self._published[0]

    @staticmethod
    def nbytes(entry: Struct, capacity: int) -> int:
        return _LINE + -(-entry.size * capacity // _LINE) * _LINE

    def put(self, *fields: float) -> None:
        """Writes an entry. The reader sees it after `publish`."""
        at = self._at
        self._pack(self._entries, (at & self._mask) * self._size, *fields)
        self._at = at + 1

    def publish(self) -> None:
        self._published[0] = self._at

    @property
    def waiting(self) -> bool:
        """Whether something was published since the last time."""
        return bool(self._published[0] != self._at)

    def new(self) -> list[tuple[Any, ...]]:
        """What was published since the last time."""
        end = self._published[0]
        if end == self._at:
            return []
        size = self._size
        if end == self._at + 1:  # as for a lone request, at a third of the time
            self._at = end
            return [self._unpack(self._entries, ((end - 1) & self._mask) * size)]
        first, last = self._at & self._mask, end & self._mask
        self._at = end
        if first < last:
            return list(self._unpack_all(self._entries[first * size : last * size]))
        ring = self._entries[: self._capacity * size]
        return [*self._unpack_all(ring[first * size :]), *self._unpack_all(ring[: last * size])]


class Rings:
    """The two rings between an ingress and an engine, in a memfd that the ingress makes.

    A slot is used again only after its answer was seen. By then its request was read; of its life before, at most a late CANCEL
    may lie unread: three entries a slot at most, in a ring of four.
    """

    NBYTES = Ring.nbytes(_ASK, 4 * SLOTS) + Ring.nbytes(_ANSWER, SLOTS) + _LINE

    ENTRIES = 4 * SLOTS, SLOTS  # asks, and answers

    def __init__(self, fd: int) -> None:
        self.memory = memory = memoryview(mmap.mmap(fd, self.NBYTES))
        at = Ring.nbytes(_ASK, 4 * SLOTS)
        self.asks = Ring(memory[:at], _ASK, 4 * SLOTS)
        self.answers = Ring(memory[at:-_LINE], _ANSWER, SLOTS)
        self._rows = memory[-_LINE:].cast("Q")  # taken, and asked for

    @property
    def taken_rows(self) -> int:
        """Rows of all requests that the engine has read so far: of those asked for since, its board does not know yet."""
        return self._rows[0]

    @taken_rows.setter
    def taken_rows(self, rows: int) -> None:
        self._rows[0] = rows

    def asked(self, rows: int) -> None:
        """The ingress has put a request of so many rows."""
        self._rows[1] += rows

    @property
    def unread_rows(self) -> int:
        """Asked for, and not read yet."""
        return self._rows[1] - self._rows[0]
