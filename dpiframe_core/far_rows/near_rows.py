"""The rows of files that lie in a nearer memory than the slots for a while. Who asked for one while it lay there finds it there
until it closes its lease.
"""

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dpiframe_core.far_rows.row_slots import Ints, RowSlots

_PATIENCE_S = 5.0  # for leases of rows that are to leave; a queue is shorter


class NearRows:
    """One thread changes which they are. Groups are those of `RowsAhead`, whose lock and slots these are.

    Attributes:
        count: of such rows.
    """

    def __init__(self, lock: threading.Lock, slots: RowSlots) -> None:
        self._lock, self._slots, self.count = lock, slots, 0

    def promoted(self, group: int, ids: Ints) -> npt.NDArray[np.bool_]:
        """bool[k]: which rows of a group lie in a nearer memory."""
        with self._lock:
            return self._slots.near(ids + self._slots.first_keys[group])

    def promote(self, group: int, ids: Ints) -> int:
        """Rows of a group lie in a nearer memory, where each lookup that begins finds them by their ids: the first so many."""
        with self._lock:
            brought = self._slots.bring(ids + self._slots.first_keys[group])
            self.count += brought
        return brought

    def demote(self, group: int, ids: Ints, check: Callable[[], None]) -> npt.NDArray[np.bool_]:
        """bool[k]: which of these rows are to stay in the nearer memory, as a lease has held them for too long. All others are
        asked for as if they never had been there. What `check` raises ends the wait.
        """
        keys, give_up = ids + self._slots.first_keys[group], time.monotonic() + _PATIENCE_S
        with self._lock:
            self.count -= self._slots.leave(keys)
        while True:
            check()
            with self._lock:
                held = np.isin(keys, self._slots.lingering())
                if held.any() and time.monotonic() > give_up:
                    # Each such row has a number of its own for those who come.
                    self.count += self._slots.bring(keys[held])
                    return held
            if not held.any():
                return held
            time.sleep(0.001)
