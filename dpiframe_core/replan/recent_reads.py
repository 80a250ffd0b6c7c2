"""How often rows of one table were read lately: of the rows that were read at all, so that the counts of a table of a billion
rows take as much memory as those of its rows in use. What is longer ago counts for less.
"""

import numpy as np
import numpy.typing as npt

from dpiframe_core.embedding.hot_rows import Ints

Floats = npt.NDArray[np.float64]
MOST_ROWS = 1 << 22  # that are counted: 64 MiB
_LEAST = 0.3  # a row that was read once, and then not twice over, is forgotten
_FRESH = 1 << 18  # reads that are put into order together


class RecentReads:
    """Of one table."""

    def __init__(self) -> None:
        self._ids: Ints = np.zeros(0, np.int64)
        self._counts: Floats = np.zeros(0)
        self._fresh: list[tuple[Ints, Ints]] = []
        self._waiting = 0

    def add(self, ids: Ints, times: Ints) -> None:
        """Each id was read so many times."""
        self._fresh.append((ids, times))
        self._waiting += len(ids)
        if self._waiting >= _FRESH:
            self._merge()

    def counted(self) -> tuple[Ints, Floats]:
        """The rows that were read, ascending, and how often."""
        self._merge()
        return self._ids, self._counts

    def fade(self, factor: float) -> None:
        """What was counted until now counts `factor` times as much from now on."""
        self._merge()
        self._counts = self._counts * factor
        self._keep(self._counts >= _LEAST)

    def _merge(self) -> None:
        if not self._fresh:
            return
        ids = np.concatenate([self._ids, *(ids for ids, _ in self._fresh)])
        counts = np.concatenate([self._counts, *(times for _, times in self._fresh)])
        self._fresh, self._waiting = [], 0
        self._ids, where = np.unique(ids, return_inverse=True)
        self._counts = np.bincount(where, counts, len(self._ids)).astype(np.float64)
        if len(self._ids) > MOST_ROWS:
            which = np.zeros(len(self._ids), np.bool_)
            which[np.argpartition(self._counts, -MOST_ROWS)[-MOST_ROWS:]] = True
            self._keep(which)  # those that were read least are forgotten

    def _keep(self, which: npt.NDArray[np.bool_]) -> None:
        self._ids, self._counts = self._ids[which], self._counts[which]
