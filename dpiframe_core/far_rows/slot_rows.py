"""Brings rows from a source into slots: those of mapped files by one copy, those of others as they send them."""

from collections.abc import Sequence

import numpy as np
import torch

from dpiframe_core.far_rows.row_slots import Ints, RowSlots
from dpiframe_core.far_rows.row_source import RowSource, Wanted
from dpiframe_core.far_rows.spare import Spare
from kernels.copies.row_copies import RowCopies, row_copies


class SlotRows:
    """Keys of rows and numbers of slots are those of `numbers`, made for the same spares. Any thread may fill slots."""

    def __init__(self, spares: Sequence[Spare], source: RowSource, numbers: RowSlots) -> None:
        self._spares, self._source = spares, source
        self._first_keys, self._first_slots = numbers.first_keys, numbers.first_slots
        self._copies: RowCopies | None = None
        if (mapped := source.mapped) is not None:
            groups = [[(mapped[t], to) for t, to in zip(s.group.tables, s.rows, strict=True)] for s in spares]
            self._copies = row_copies(groups)

    def fill(self, keys: Ints, slots: Ints) -> None:
        """Has the rows of these keys, which ascend, lie in these slots; all are one of the source's parts.

        Raises:
            Exception: as `RowSource.read`.
        """
        if self._copies is not None:
            self._copies.copy(keys, slots)
            return
        ends = np.searchsorted(keys, self._first_keys)
        wanted, places = [], []
        for group in np.flatnonzero(ends[1:] > ends[:-1]).tolist():
            span, spare = slice(ends[group], ends[group + 1]), self._spares[group]
            ids = keys[span] - self._first_keys[group]
            to = torch.from_numpy(slots[span] - self._first_slots[group])
            wanted += [Wanted(table, ids) for table in spare.group.tables]
            places += [(rows, to) for rows in spare.rows]
        for (rows, to), values in zip(places, self._source.read(wanted), strict=True):
            rows.index_copy_(0, to, values)
