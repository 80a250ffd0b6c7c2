"""The same as rows_numpy.py by lookup.c, straight from id records."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.openmp_pool import pool_arguments
from kernels.lookup.id_record import Ids, Records
from kernels.lookup.plan import ALWAYS_ROW_0, IdColumn, LookupPlan


class _Stretch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("context", "start", "stop")]


class _Columns(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("columns", "stretches", "candidate_bytes", "context_bytes")),
        ("stretch", ctypes.POINTER(_Stretch)),
        *((name, ctypes.c_void_p) for name in ("word", "shift", "mask", "first", "rows", "oov", "pad", "pads")),
    ]


class RecordArguments(NamedTuple):
    """A batch's records as lookup.c takes them: addresses, None where there is none. held: the arrays they point into."""

    rows: int
    candidate: int | None
    context: int | None
    request: int | None
    contexts: int
    held: tuple[npt.NDArray[np.generic], ...]


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
        self._held = constants, stretches  # what the struct points into
        self._bytes = plan.candidate_ids.nbytes, plan.context_ids.nbytes
        self._columns = _Columns(
            columns=len(columns), stretches=len(stretches), candidate_bytes=self._bytes[0], context_bytes=self._bytes[1],
            stretch=stretches, **{name: array.ctypes.data for name, array in constants.items()},
        )  # fmt: skip
        self.address, self.columns, self._run = ctypes.addressof(self._columns), len(columns), library.dpi_lookup

    def __call__(self, request: npt.NDArray[np.int32], candidate_ids: Records, context_ids: Records) -> tuple[Ids, int]:
        """As `RowsByNumpy`.

        Raises:
            ValueError: arrays that are not of the plan's records.
        """
        at: Ids = np.empty((len(request), self.columns), self._dtype)
        a = self.arguments(request, candidate_ids, context_ids)
        rows = a.rows, a.candidate, a.context, a.request, a.contexts
        return at, int(self._run(self.address, self.wide, *rows, address(at), *pool_arguments()))

    def arguments(self, request: npt.NDArray[np.int32], candidate_ids: Records, context_ids: Records) -> RecordArguments:
        """
        Raises:
            ValueError: arrays that are not of the plan's records.
        """
        rows, contexts = len(request), len(context_ids)
        shapes = (rows, self._bytes[0]), (contexts, self._bytes[1])
        if (candidate_ids.shape, context_ids.shape) != shapes or candidate_ids.itemsize * context_ids.itemsize != 1:
            got = [(a.dtype, a.shape) for a in (candidate_ids, context_ids)]
            raise ValueError(f"lookup ids: got {got}, expected uint8 {shapes}")
        if not (candidate_ids.flags.c_contiguous and context_ids.flags.c_contiguous and request.flags.c_contiguous):
            candidate_ids, context_ids = np.ascontiguousarray(candidate_ids), np.ascontiguousarray(context_ids)
            request = np.ascontiguousarray(request)
        has_candidate, has_context = self._bytes
        return RecordArguments(
            rows, address(candidate_ids) if has_candidate else None, address(context_ids) if has_context else None,
            address(request) if contexts != 1 else None, contexts, held=(request, candidate_ids, context_ids),
        )  # fmt: skip


def address(array: npt.NDArray[np.generic]) -> int:
    """Of the first byte; quicker than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])


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
