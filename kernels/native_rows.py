"""The same as `stack_rows` by stacked.c, straight from id records, with the gather and the first-order sum in the same call."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.id_record import Ids, Records
from kernels.lookup_plan import ALWAYS_ROW_0, IdColumn, LookupPlan


class _Run(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("context", "byte", "width", "column", "count")]


class _Stack(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("columns", "runs", "candidate_bytes", "context_bytes")),
        ("run", ctypes.POINTER(_Run)),
        *((name, ctypes.c_void_p) for name in ("first", "rows", "oov", "pad", "pads")),
    ]


class NativeRows:
    """Arguments as `StackRows`; `library`: of `native`."""

    def __init__(
        self, library: ctypes.CDLL, plan: LookupPlan, columns: Sequence[IdColumn], first_rows: Sequence[int], zero_row: int
    ) -> None:
        places = [_place(plan, c) for c in columns]
        self._wide = zero_row >= 2**31 or any(width == 8 for _, _, width in places)
        self._dtype = np.dtype(np.int64 if self._wide else np.int32)
        runs = _runs(places)
        rows = [min(plan.tables[c.table].rows, 2**63 - 1 if self._wide else 2**31 - 1) for c in columns]
        oov = [first + c.oov for first, c in zip(first_rows, columns, strict=True)]
        pad = [zero_row if c.may_pad else o for o, c in zip(oov, columns, strict=True)]
        constants = [np.array(v, self._dtype) for v in (first_rows, rows, oov, pad, [int(c.may_pad) for c in columns])]
        made = (_Run * len(runs))(*(_Run(*run) for run in runs))
        self._held = constants, made  # what the struct points into
        self._bytes = plan.candidate_ids.nbytes, plan.context_ids.nbytes
        self._stack = _Stack(len(columns), len(runs), *self._bytes, made, *(c.ctypes.data for c in constants))
        self._address, self._columns, self._run = ctypes.addressof(self._stack), len(columns), library.dpi_lookup

    def __call__(
        self,
        request: npt.NDArray[np.int32],
        candidate_ids: Records,
        context_ids: Records,
        x: tuple[torch.Tensor, torch.Tensor] | None = None,
        total: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[Ids, int]:
        """id[rows, columns], each within its table whatever the id, and how many of the ids were outside.

        Args:
            x: a stack [*, dim] and where its rows go, [rows, columns * dim] of the same dtype.
            total: a stack float32[*, 1] and where each row's sum goes, float32[rows, 1].

        Raises:
            ValueError: arrays that are not of the plan's records.
        """
        rows = len(request)
        shapes = (rows, self._bytes[0]), (len(context_ids), self._bytes[1])
        if (candidate_ids.shape, context_ids.shape) != shapes or candidate_ids.dtype != np.uint8 != context_ids.dtype:
            got = [(a.dtype, a.shape) for a in (candidate_ids, context_ids)]
            raise ValueError(f"lookup ids: got {got}, expected uint8 {shapes}")
        arrays = [a if a.flags.c_contiguous else np.ascontiguousarray(a) for a in (candidate_ids, context_ids, request)]
        at: Ids = np.empty((rows, self._columns), self._dtype)
        table, x_to = x or (None, None)
        weights, total_to = total or (None, None)
        outside = self._run(
            self._address, self._wide, rows, *(_address(a) for a in arrays), len(context_ids), _address(at),
            None if table is None else table.data_ptr(), 0 if table is None else table.shape[1] * table.element_size(),
            None if x_to is None else x_to.data_ptr(),
            None if weights is None else weights.data_ptr(), None if total_to is None else total_to.data_ptr(),
        )  # fmt: skip
        return at, outside


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _place(plan: LookupPlan, column: IdColumn) -> tuple[int, int, int]:
    """(whether of the context, first byte in its side's record, width; 0 for a column without ids)."""
    if column.source == ALWAYS_ROW_0:
        return 0, 0, 0
    side, i = (plan.candidate_ids, column.source) if column.source >= 0 else (plan.context_ids, -1 - column.source)
    return int(column.source < 0), side.offsets[i], side.widths[i]


def _runs(places: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int, int]]:
    """Columns that lie side by side in one record, as many as possible at once."""
    found: list[tuple[int, int, int, int, int]] = []
    for column, (context, byte, width) in enumerate(places):
        if found:
            c, b, w, first, count = found[-1]
            if (c, w) == (context, width) and byte == b + count * width:
                found[-1] = (c, b, w, first, count + 1)
                continue
        found.append((context, byte, width, column, 1))
    return found
