"""The same as rows_numpy.py by lookup.c, straight from id records."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.cpu.openmp_pool import pool_arguments
from kernels.lookup.id_record import Ids, RowAddresses, address
from kernels.lookup.plan import ALWAYS_ROW_0, IdColumn, LookupPlan


class _Stretch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("context", "start", "stop")]


class _Columns(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("columns", "stretches", "candidate_bytes", "context_bytes")),
        ("stretch", ctypes.POINTER(_Stretch)),
        *((name, ctypes.c_void_p) for name in ("word", "shift", "mask", "first", "rows", "oov", "pad", "pads")),
    ]


class RowsByC:
    """Arguments as `RowsByNumpy`; `library`: `cpu_library`."""

    def __init__(
        self, library: ctypes.CDLL, plan: LookupPlan, columns: Sequence[IdColumn], first_rows: Sequence[int], zero_row: int
    ) -> None:
        places = [_place(plan, c) for c in columns]
        self.wide = zero_row >= 2**31 or any(width == 8 for _, _, width in places)
        self._dtype = np.dtype(np.int64 if self.wide else np.int32)
        stretches = _stretches([context for context, _, _ in places])
        oov = [first + c.oov for first, c in zip(first_rows, columns, strict=True)]
        by_column = {
            "mask": [2 ** (8 * width) - 1 for _, _, width in places], "first": first_rows,
            "rows": [plan.tables[c.table].rows for c in columns], "oov": oov,
            "pad": [zero_row if c.may_pad else o for o, c in zip(oov, columns, strict=True)],
            "pads": [c.may_pad for c in columns],
        }  # fmt: skip
        unsigned = np.uint64 if self.wide else np.uint32
        most = np.iinfo(unsigned).max
        constants: dict[str, npt.NDArray[np.generic]] = {
            name: np.minimum(np.array(values, np.uint64), most).astype(unsigned) for name, values in by_column.items()
        }
        constants["word"] = np.array([byte // 4 for _, byte, _ in places], np.int32)
        constants["shift"] = np.array([byte % 4 * 8 for _, byte, _ in places], np.int32)
        self.first_rows = tuple(first_rows)
        numbers = 4 * plan.context_numbers, 4 * plan.candidate_numbers
        self._held = constants, stretches  # what the struct points into
        self._widths = 4, *(r.nbytes for r in (plan.context_ids, plan.candidate_ids)), *numbers
        self._columns = _Columns(
            columns=len(columns), stretches=len(stretches), candidate_bytes=self._widths[2], context_bytes=self._widths[1],
            stretch=stretches, **{name: array.ctypes.data for name, array in constants.items()},
        )  # fmt: skip
        self.address, self.columns, self._run = ctypes.addressof(self._columns), len(columns), library.dpi_lookup

    def __call__(self, rows: RowAddresses) -> tuple[Ids, int]:
        """As `RowsByNumpy`. Raises as `check`."""
        self.check(rows)
        at: Ids = np.empty((rows.rows, self.columns), self._dtype)
        return at, int(self._run(self.address, self.wide, *rows[:5], address(at), *pool_arguments()))

    def check(self, rows: RowAddresses) -> None:
        """
        Raises:
            ValueError: rows that are not of the plan's records.
        """
        if rows.widths != self._widths:
            raise ValueError(f"lookup rows: got {rows.widths} bytes of a row and a context, expected {self._widths}")


def _place(plan: LookupPlan, column: IdColumn) -> tuple[int, int, int]:
    """(1 if of the context, first byte in its side's record, width); a column without ids has none, and reads id 0."""
    if column.source == ALWAYS_ROW_0:
        return 0, 0, 0
    side, i = (plan.candidate_ids, column.source) if column.source >= 0 else (plan.context_ids, -1 - column.source)
    return int(column.source < 0), side.offsets[i], side.widths[i]


def _stretches(sides: Sequence[int]) -> "ctypes.Array[_Stretch]":
    """Neighbouring columns of one side, as many as possible at once."""
    starts = [i for i, side in enumerate(sides) if not i or side != sides[i - 1]]
    stops = [*starts[1:], len(sides)]
    return (_Stretch * len(starts))(*(_Stretch(sides[a], a, b) for a, b in zip(starts, stops, strict=True)))
