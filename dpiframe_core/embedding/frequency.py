"""Rows in the order of falling frequency: millions of rows as the few distinct counts that they have, and the rank of each row.

Sorts nothing that a histogram can tell: of 40 million rows of a real log all but some thousand are read less than 65,536 times.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpiframe_core.embedding.row_counts import Counts
from dpiframe_core.errors import InputError

Ranks = npt.NDArray[np.uint32]

_LARGE = np.iinfo(np.uint16).max  # counts below it fit 16 bits, whose stable sort is a radix sort
_MOST_ROWS = 2**32


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """A table's rows by falling count. Filled by `frequencies`.

    Attributes:
        negated: int64[k]: the distinct counts times -1, rising.
        rows, reads: int64[k + 1]: rows that have one of the first i counts, and their reads.
    """

    negated: Counts
    rows: Counts
    reads: Counts

    def rows_above(self, count: int) -> int:
        """The rows that are read more than `count` times."""
        return int(self.rows[np.searchsorted(self.negated, np.int64(-count))])

    def reads_of(self, rows: int) -> int:
        """The reads of the `rows` rows that are read most."""
        i = int(np.searchsorted(self.rows, np.int64(rows), side="right")) - 1
        rest = rows - int(self.rows[i])
        return int(self.reads[i]) - (rest * int(self.negated[i]) if rest else 0)

    def count_at(self, rank: int) -> int:
        """The reads of the row at a rank below the number of rows."""
        return -int(self.negated[np.searchsorted(self.rows, np.int64(rank), side="right") - 1])


def frequencies(counts: Counts) -> Frequencies:
    """Of int64[rows], none below 0."""
    small = np.bincount(_clipped(counts), minlength=_LARGE + 1)[:_LARGE]
    distinct, rows = np.unique(counts[counts >= _LARGE], return_counts=True)
    present = np.flatnonzero(small)
    distinct, rows = np.concatenate((present, distinct))[::-1], np.concatenate((small[present], rows))[::-1]
    return Frequencies(-distinct, _running(rows), _running(distinct * rows))


def frequency_ranks(counts: Counts) -> Ranks | None:
    """uint32[rows]: the rank of each row, the most read one first, equal ones in the order of ids. None: ids are ranks.

    Raises:
        InputError: more rows than ranks.
    """
    if in_order(counts):
        return None
    if len(counts) > _MOST_ROWS:
        raise InputError("rows to rank", len(counts), f"at most {_MOST_ROWS}, or rows in the order of falling frequency")
    falling = _clipped(counts)
    np.subtract(_LARGE, falling, out=falling)
    order = np.argsort(falling, kind="stable")
    head = order[: np.count_nonzero(falling == 0)]
    head[:] = head[np.argsort(-counts[head], kind="stable")]
    ranks = np.empty(len(counts), np.uint32)
    ranks[order] = np.arange(len(counts), dtype=np.uint32)
    return ranks


def in_order(counts: Counts) -> bool:
    """Whether no row is read more often than the one before it."""
    return not bool((counts[1:] > counts[:-1]).any())


def _clipped(counts: Counts) -> npt.NDArray[np.uint16]:
    """The counts, `_LARGE` for the larger ones, without another int64 array in between."""
    return np.minimum(counts, _LARGE, out=np.empty(counts.shape, np.uint16), casting="unsafe")


def _running(values: Counts) -> Counts:
    """The sums of the first 0, 1, 2, .. values."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))
