"""The multi-table lookup on a CPU that reads rows where they lie, from memory-mapped files: no table is copied or packed, so
tables may be larger than memory. See `reference.lookup` for the plain version; `PackedLookup` is faster where tables fit.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.lookup.id_record import Ids, Rows
from kernels.lookup.plan import ALWAYS_ROW_0, Batch, Kind, LookupPlan, Slot, rows_of

Floats = npt.NDArray[np.float32]


class MappedLookup:
    """As `PackedLookup`. Safe to use from several threads.

    Args:
        tables: [rows, dim] in the plan's order, best memory-mapped: float32, float16, bfloat16, or int8 with scales.
        scales: of each int8 table its float32[dim]: a value is int8 * scale. None where a table is not int8.
        out_dtype: of x.
        spares: of each table, further rows, [n, dim]: ids from its rows on lead there. (), None: there are none.

    Attributes:
        out_of_range: ids so far that were outside their table.
    """

    def __init__(
        self,
        plan: LookupPlan,
        tables: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor | None] | None = None,
        out_dtype: torch.dtype = torch.float32,
        spares: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.plan, self.out_of_range = plan, 0
        self._tables, self._scales, self._out_dtype = tables, scales or [None] * len(tables), out_dtype
        self._spares = spares or [None] * len(tables)
        self._counting = threading.Lock()

    def __call__(self, batch: Batch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """x[rows, x_width] and total float32[rows, 1], as `reference.lookup`; None for an output the plan lacks."""
        return self.read(rows_of(batch, rows))

    def read(self, batch: Rows, _into: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The same for exactly the rows to read."""
        request = batch.request_of_row
        plan = self.plan
        ids = (
            plan.candidate_ids.widened(batch.candidate_ids, np.int64),
            plan.context_ids.widened(batch.context_ids, np.int64)[request],
        )
        numbers = batch.candidate_dense, batch.context_dense[request]
        x = total = None
        if plan.x_slots:
            x = torch.empty(len(request), plan.x_width, dtype=self._out_dtype)
            for slot in plan.x_slots:
                x[:, slot.out : slot.out + slot.dim] = self._values(slot, ids, numbers)
        if plan.total_slots:
            total = torch.zeros(len(request), 1)
            for slot in plan.total_slots:
                total += self._values(slot, ids, numbers)
        return x, total

    def _values(self, slot: Slot, ids: tuple[Ids, Ids], numbers: tuple[Floats, Floats]) -> torch.Tensor:
        """float32[rows, dim] of a slot, whose side is of candidates, or of contexts."""
        rows = len(ids[0])
        number = torch.ones(rows, 1)
        if slot.kind in (Kind.SCALE, Kind.COPY):
            place = slot.number if slot.number >= 0 else -1 - slot.number
            number = torch.from_numpy(numbers[slot.number < 0][:, [place]])
        if slot.kind == Kind.COPY:
            return number
        column = self.plan.columns[slot.first]
        own: Ids = np.zeros((rows, slot.columns), np.int64)
        if column.source != ALWAYS_ROW_0:
            first = column.source if column.source >= 0 else -1 - column.source
            own = ids[column.source < 0][:, first : first + slot.columns]
        padded = (own == -1) & column.may_pad
        if slot.kind == Kind.MASK:
            return torch.from_numpy(~padded).float()
        table, scale = self._tables[column.table], self._scales[column.table]
        spare = self._spares[column.table]
        ahead = (own >= len(table)) & (own < len(table) + (0 if spare is None else len(spare)))
        outside = ((own < 0) | (own >= len(table))) & ~padded & ~ahead
        self._count(int(outside.sum()))
        values = table[torch.from_numpy(np.where(outside | padded | ahead, column.oov, own))].float()
        if spare is not None:
            values[torch.from_numpy(ahead)] = spare[torch.from_numpy(own[ahead] - len(table))].float()
        if scale is not None:
            values *= scale
        here = torch.from_numpy(~padded)[:, :, None]
        found = here.sum(1)
        if slot.largest:
            largest = torch.where(here, values, -torch.inf).amax(1)
            return torch.where(found > 0, largest, 0.0)
        pooled = torch.where(here, values, 0.0).sum(1)
        return pooled / found.clamp(min=1) if slot.mean else pooled * number

    def _count(self, outside: int) -> None:
        if outside:
            with self._counting:
                self.out_of_range += outside
