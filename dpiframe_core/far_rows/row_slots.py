"""Which rows lie in which slots of a memory that holds few of them, and which slots are the next to be given to other rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_WINDOW = 1024  # slots that are looked at together


class Found(NamedTuple):
    """Where rows lie. Filled by `RowSlots.take`.

    Attributes:
        slots: of each key asked for. missing: which of them nobody reads yet. reads: the numbers of those reads to wait for.
    """

    slots: Ints
    missing: npt.NDArray[np.bool_]
    reads: Ints


class RowSlots:
    """Of several groups of tables: a row's key is its id behind all rows of the groups before, and so are slots numbered.

    Not thread-safe: its owner holds a lock. A row stays in its slot while it is held or read. Of the others those give way that
    nobody has asked for since a hand last came by, which goes round a group's slots ("clock", second chance).
    """

    def __init__(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        self.first_keys = np.cumsum([0, *rows])
        self.first_slots = np.cumsum([0, *slots])
        total = int(self.first_slots[-1])
        # Zeros: pages that are never touched take no memory.
        self._slot = np.zeros(int(self.first_keys[-1]), np.uint32)  # and 1 more: 0 is none
        self._key = np.full(total, -1, np.int64)
        self._holders = np.zeros(total, np.int32)
        self._read = np.zeros(total, np.int64)  # the number of the read that fills it; 0: none
        self._asked = np.zeros(total, np.bool_)
        self._hands = self.first_slots[:-1].copy()

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
            before = self._key[given]
            self._slot[before[before >= 0]] = 0
            self._slot[lost], self._key[given] = given + 1, lost
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
        self._slot[self._key[slots]] = 0
        self._key[slots], self._read[slots] = -1, 0

    def lies(self, keys: Ints, slots: Ints) -> npt.NDArray[np.bool_]:
        """Which of the rows lie in these slots."""
        there: npt.NDArray[np.bool_] = (self._key[slots] == keys) & (self._read[slots] == 0)
        return there

    def give_back(self, slots: Ints) -> None:
        """One holder of each is done with it."""
        self._holders[slots] -= 1

    def _free(self, group: int, count: int) -> Ints | None:
        """Slots of a group that may be given away, in the order of the hand."""
        low, high = int(self.first_slots[group]), int(self.first_slots[group + 1])
        found: list[Ints] = []
        hand, passed, taken = int(self._hands[group]), 0, np.zeros(0, np.int64)
        while passed < 2 * (high - low):  # the second time nothing has been asked for since
            window = np.arange(hand, min(high, hand + _WINDOW))
            own = window[(self._holders[window] == 0) & (self._read[window] == 0) & ~self._asked[window]]
            if passed + len(window) > high - low:
                own = np.setdiff1d(own, taken, assume_unique=True)
            own = own[: count - len(taken)]
            end = int(own[-1]) + 1 if len(taken) + len(own) == count else int(window[-1]) + 1
            self._asked[hand:end] = False
            found.append(own)
            taken = np.concatenate(found)
            passed += end - hand
            hand = low if end == high else end
            if len(taken) == count:
                self._hands[group] = hand
                return taken
        return None
