"""Which rows of a packed table (several, one after the other) a batch's ids name: one vectorised pass over all id columns,
whatever the ids.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.lookup.id_record import Ids, Records
from kernels.lookup.plan import ALWAYS_ROW_0, IdColumn, LookupPlan

Run = tuple[int, int, int]  # columns [first, first + count) of one array are [second, second + count) of another


class _Tiled:
    """One row of constants, repeated: NumPy broadcasts a short row slowly (256 x 39 ids in 19 us, 14 us so)."""

    def __init__(self, constants: npt.NDArray[np.integer]) -> None:
        self._repeated = constants[None]

    def __call__(self, rows: int) -> npt.NDArray[np.integer]:
        """[rows, constants]."""
        repeated = self._repeated
        if len(repeated) < rows:
            self._repeated = repeated = np.tile(repeated[:1], (rows, 1))
        return repeated[:rows]


class RowsByNumpy:
    """The id columns of a packed table, for all groups of slots that read equal columns of equal tables.

    Args:
        first_rows: of each column's table, its first row within the packed one. zero_row: the row of padding.

    Attributes:
        readers: the groups that read these rows.
    """

    def __init__(self, plan: LookupPlan, columns: Sequence[IdColumn], first_rows: Sequence[int], zero_row: int) -> None:
        self.zero_row, self.readers = zero_row, 0
        self._records = plan.candidate_ids, plan.context_ids
        self._candidates = plan.candidate_width
        sources = [(place(c.source, plan.candidate_width), i) for i, c in enumerate(columns) if c.source != ALWAYS_ROW_0]
        self._runs = runs(sources, border=plan.candidate_width)
        self._whole = self._runs == ((0, 0, plan.candidate_width),) and len(columns) == plan.candidate_width
        self._columns = len(columns)
        small = np.dtype(np.int32 if zero_row < 2**31 else np.int64)
        self._first = _Tiled(np.array(first_rows, small))
        rows = np.array([plan.tables[c.table].rows for c in columns], np.uint64)
        self._rows = {4: _Tiled(np.minimum(rows, 2**31).astype(np.uint32)), 8: _Tiled(rows)}  # by the bytes of an id
        self._oov = np.array([first + c.oov for first, c in zip(first_rows, columns, strict=True)], small)
        self._may_pad = np.array([c.may_pad for c in columns], np.bool_)

    def __call__(self, request: npt.NDArray[np.int32], candidates: Records, contexts: Records) -> tuple[Ids, int]:
        """id[rows, columns], each within its table whatever the id, and how many of the ids were outside.

        candidates, contexts: uint8[rows or contexts, bytes of an `IdRecord`].
        """
        candidate_ids, context_ids = self._widened(candidates, contexts)
        own = candidate_ids if self._whole else self._side_by_side(request, candidate_ids, context_ids)
        limit = self._rows[own.itemsize](len(own))
        outside = own.view(limit.dtype) >= limit  # seen as unsigned, a negative id is larger than any table
        rows: Ids = own + self._first(len(own))
        if not np.count_nonzero(outside):
            return rows, 0
        at = np.flatnonzero(outside)
        column = at % outside.shape[1]
        padded = (own.reshape(-1)[at] == -1) & self._may_pad[column]
        rows.reshape(-1)[at] = np.where(padded, self.zero_row, self._oov[column])
        return rows, len(at) - int(np.count_nonzero(padded))

    def _widened(self, candidates: Records, contexts: Records) -> tuple[Ids, Ids]:
        candidate, context = self._records
        dtype = np.int64 if 8 in candidate.widths + context.widths else np.int32
        return candidate.widened(candidates, dtype), context.widened(contexts, dtype)

    def _side_by_side(self, request: npt.NDArray[np.int32], candidate_ids: Ids, context_ids: Ids) -> Ids:
        """id[rows, columns], 0 for a column without ids."""
        own: Ids = np.zeros((len(request), self._columns), candidate_ids.dtype)
        contexts = context_ids if len(context_ids) == 1 or not context_ids.shape[1] else context_ids[request]
        for source, to, count in self._runs:
            side, start = (candidate_ids, source) if source < self._candidates else (contexts, source - self._candidates)
            own[:, to : to + count] = side[:, start : start + count]
        return own


def runs(pairs: Sequence[tuple[int, int]], border: int = -1) -> tuple[Run, ...]:
    """(from, to) pairs as runs that go up by one on both sides; none crosses `border` on the from side."""
    found: list[Run] = []
    for pair in pairs:
        first, second, count = found[-1] if found else (0, 0, 0)
        if count and pair == (first + count, second + count) and pair[0] != border:
            found[-1] = (first, second, count + 1)
        else:
            found.append((*pair, 1))
    return tuple(found)


def place(source: int, candidates: int) -> int:
    """Where in [candidate columns | context columns] an `IdColumn.source` or `Slot.number` points."""
    return source if source >= 0 else candidates - 1 - source
