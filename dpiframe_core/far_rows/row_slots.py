"""Which rows lie in which slots of a memory that holds few of them, and which slots are the next to be given to other rows; and
which rows need none, as they lie in a nearer memory for now.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_WINDOW = 1024  # slots that are looked at together


class Found(NamedTuple):
    """Where rows lie. Filled by `RowSlots.take`.

    Attributes:
        slots: of each key asked for; from `RowSlots.total` on of rows that lie nearer. missing: which of them nobody reads yet.
        reads: the numbers of those reads to wait for.
    """

    slots: Ints
    missing: npt.NDArray[np.bool_]
    reads: Ints


class RowSlots:
    """Of several groups of tables: a row's key is its id behind all rows of the groups before, and so are slots numbered.

    Not thread-safe: its owner holds a lock. A row stays in its slot while it is held or read. Of the others those give way that
    nobody has asked for since a hand last came by, which goes round a group's slots ("clock", second chance); those that are to
    `stay` only if there are no others. A row that lies nearer has a number behind all slots: so it is known who holds it.

    Args:
        near: how many rows may lie nearer at a time.

    Attributes:
        total: of slots.
    """

    def __init__(self, rows: Sequence[int], slots: Sequence[int], near: int = 0) -> None:
        self.first_keys = np.cumsum([0, *rows])
        self.first_slots = np.cumsum([0, *slots])
        self.total = int(self.first_slots[-1])
        numbers = self.total + near
        # Zeros: pages that are never touched take no memory.
        self._slot = np.zeros(int(self.first_keys[-1]), np.uint32)  # and 1 more: 0 is none
        self._key = np.zeros(numbers, np.int64)  # and 1 more
        self._holders = np.zeros(numbers, np.int32)
        self._read = np.zeros(numbers, np.int64)  # the number of the read that fills it; 0: none
        self._asked = np.zeros(numbers, np.bool_)
        self._stays, self._staying = np.zeros(self.total, np.bool_), np.zeros(0, np.int64)  # of each slot; keys, ascending
        self._hands = self.first_slots[:-1].copy()
        self._unused, self._returned = self.total, np.zeros(0, np.int64)  # numbers of near rows: from the first on, and these
        self._leaving = np.zeros(0, np.int64)

    def held(self, group: int) -> int:
        """Slots of a group that somebody holds."""
        return int(np.count_nonzero(self._holders[self.first_slots[group] : self.first_slots[group + 1]]))

    def take(self, keys: Ints, read: int) -> Found | int:
        """Holds each of the rows, whose keys are distinct and ascending; those that are missing will be filled by `read`, a
        number above 0. Or the group that has not slots enough: nothing is held then.
        """
        slots = self._slot[keys].astype(np.int64) - 1
        missing = slots < 0
        known = slots[~missing]
        self._holders[known] += 1
        if missing.any():
            lost = keys[missing]
            ends = np.searchsorted(lost, self.first_keys)
            free = []
            for group in np.flatnonzero(ends[1:] > ends[:-1]).tolist():
                own = self._free(group, int(ends[group + 1] - ends[group]))
                if own is None:
                    self._holders[known] -= 1
                    return int(group)
                free.append(own)
            given = np.concatenate(free)
            self._drop(given)
            self._slot[lost], self._key[given] = given + 1, lost + 1
            self._stays[given] = self._stay(lost)
            self._holders[given], self._read[given] = 1, read
            slots[missing] = given
        self._asked[slots] = True
        waits = np.unique(self._read[known])
        return Found(slots, missing, waits[waits > 0])

    def arrived(self, slots: Ints) -> None:
        """Their rows lie there."""
        self._read[slots] = 0

    def forget(self, slots: Ints) -> None:
        """Their rows could not be read: who asks for them next has them read again."""
        self._drop(slots)
        self._key[slots], self._read[slots] = 0, 0

    def lies(self, keys: Ints, slots: Ints) -> npt.NDArray[np.bool_]:
        """Which of the rows lie in these slots."""
        there: npt.NDArray[np.bool_] = (self._key[slots] == keys + 1) & (self._read[slots] == 0)
        return there

    def give_back(self, slots: Ints) -> None:
        """One holder of each is done with it."""
        self._holders[slots] -= 1

    def keys_of(self, slots: Ints) -> Ints:
        """Of the rows that lie in them; -1: none."""
        return self._key[slots] - 1

    def stay(self, keys: Ints) -> None:
        """Of all rows these, whose keys are ascending, are to stay in their slots, as soon as they have one."""
        slots = self._slot[keys].astype(np.int64) - 1
        self._staying = keys
        self._stays[:] = False
        self._stays[slots[(slots >= 0) & (slots < self.total)]] = True

    @property
    def staying(self) -> int:
        """Slots with rows that are to stay."""
        return int(np.count_nonzero(self._stays))

    def _stay(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Which rows are to."""
        if not len(self._staying):
            return np.zeros(len(keys), np.bool_)
        at = np.minimum(np.searchsorted(self._staying, keys), len(self._staying) - 1)
        found: npt.NDArray[np.bool_] = self._staying[at] == keys
        return found

    def near(self, keys: Ints) -> npt.NDArray[np.bool_]:
        """Which rows lie nearer."""
        found: npt.NDArray[np.bool_] = self._slot[keys] > self.total
        return found

    def bring(self, keys: Ints) -> int:
        """From now on these rows, none of which did, lie nearer: the first so many. Who holds their slots finds them there."""
        again = self._returned[: len(keys)]
        more = np.arange(self._unused, min(len(self._key), self._unused + len(keys) - len(again)))
        numbers = np.concatenate([again, more])
        self._returned, self._unused = self._returned[len(again) :], self._unused + len(more)
        own = keys[: len(numbers)]
        before = self._slot[own].astype(np.int64) - 1
        before = before[before >= 0]
        self._asked[before] = self._stays[before] = False
        self._slot[own], self._key[numbers] = numbers + 1, own + 1
        return len(own)

    def leave(self, keys: Ints) -> int:
        """From now on these rows do not lie nearer for those who ask. How many did."""
        own = keys[self.near(keys)]
        self._leaving = np.concatenate([self._leaving, self._slot[own].astype(np.int64) - 1])
        self._slot[own] = 0
        return len(own)

    def lingering(self) -> Ints:
        """The keys of those that left, but that somebody still holds who asked before."""
        held = self._holders[self._leaving] > 0
        self._returned = np.concatenate([self._returned, self._leaving[~held]])
        self._leaving = self._leaving[held]
        return self._key[self._leaving] - 1

    def _drop(self, slots: Ints) -> None:
        """Their rows do not lie there any more; those of them that lie nearer stay near."""
        keys = self._key[slots] - 1
        slots, keys = slots[keys >= 0], keys[keys >= 0]
        self._slot[keys[self._slot[keys] == slots + 1]] = 0
        self._stays[slots] = False

    def _free(self, group: int, count: int) -> Ints | None:
        """Slots of a group that may be given away, in the order of the hand."""
        low, high = int(self.first_slots[group]), int(self.first_slots[group + 1])
        found: list[Ints] = []
        hand, passed, taken = int(self._hands[group]), 0, np.zeros(0, np.int64)
        while passed < 4 * (high - low):  # the second time nothing has been asked for since; then what is to stay goes, too
            end = min(high, hand + _WINDOW)
            window = slice(hand, end)
            may = (self._holders[window] == 0) & (self._read[window] == 0) & ~self._asked[window]
            if passed < 2 * (high - low):
                may &= ~self._stays[window]
            own = hand + np.flatnonzero(may)
            if passed + end - hand > high - low:
                own = np.setdiff1d(own, taken, assume_unique=True)
            own = own[: count - len(taken)]
            if len(taken) + len(own) == count:
                end = int(own[-1]) + 1
            self._asked[hand:end] = False
            found.append(own)
            taken = np.concatenate(found)
            passed += end - hand
            hand = low if end == high else end
            if len(taken) == count:
                self._hands[group] = hand
                return taken
        return None
