"""float32 tables read by lookup.c straight from id records: rows times their numbers, plain numbers beside them, the
first-order sum and FM's term, in one pass over a batch.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.dense import Layers
from kernels.cpu.openmp_pool import pool_arguments
from kernels.cpu.rows_c import RowsByC
from kernels.lookup.id_record import RowAddresses
from kernels.lookup.plan import NO_NUMBER, LookupPlan

MOST_DIM, MORE, WIDEST_X = 256, -2, 512  # of lookup.c
_COLUMNWISE = ("number", "weight_number", "to", "copied", "copied_to", "marked", "marked_to")


class _Floats(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("dim", "width", "copies", "marks", "plain", "apart", "candidate_numbers", "context_numbers")
        ),
        *((name, ctypes.c_void_p) for name in ("table", "weights", *_COLUMNWISE)),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class FloatTables:
    """What a batch's ids name, where one set of id columns serves all.

    Attributes:
        table: float32[*, dim], None if only sums are wanted. weights: float32[*, 1], summed, or None.
        numbers, weight_numbers: of each column, the number that its row or weight is multiplied by, as in `Slot.number`.
    """

    library: ctypes.CDLL
    plan: LookupPlan
    rows: RowsByC
    table: torch.Tensor | None
    weights: torch.Tensor | None
    numbers: Sequence[int]
    weight_numbers: Sequence[int]


class FloatLookup:
    """Args:
    to: of each id column, its first column of x, or -1; MORE, of a bag: added where the column before goes.
    copies: (number, column of x). width: of x. marks: (id column that may be padding, column of x).
    """

    def __init__(
        self, tables: FloatTables, to: Sequence[int], copies: Sequence[tuple[int, int]], width: int,
        marks: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        by_column = {
            "number": tables.numbers, "weight_number": tables.weight_numbers, "to": to,
            "copied": [n for n, _ in copies], "copied_to": [c for _, c in copies],
            "marked": [n for n, _ in marks], "marked_to": [c for _, c in marks],
        }  # fmt: skip
        held = {name: np.array(values, np.int32) for name, values in by_column.items()}
        table, weights, plan = tables.table, tables.weights, tables.plan
        dim = 0 if table is None else table.shape[1]
        scaled = any(n != NO_NUMBER for n in (*tables.numbers, *tables.weight_numbers))
        plain = not scaled and list(to) == list(range(0, width, max(1, dim)))
        self._floats = _Floats(
            dim=dim, width=width, copies=len(copies), marks=len(marks), plain=plain, apart=not scaled and MORE not in to,
            candidate_numbers=plan.candidate_numbers, context_numbers=plan.context_numbers,
            table=None if table is None else table.data_ptr(), weights=None if weights is None else weights.data_ptr(),
            **{name: array.ctypes.data for name, array in held.items()},
        )  # fmt: skip
        self._held = held, table, weights  # what the struct points into
        self._rows, self._run, self._address = tables.rows, tables.library.dpi_floats, ctypes.addressof(self._floats)
        self._x_width, self._sums = 0 if table is None else width, weights is not None

    def __call__(
        self, rows: RowAddresses, fm: bool = False, x: torch.Tensor | None = None, layers: Layers | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, int]:
        """x float32[rows, width], the given one if there is one, or what `layers` make of it; the sums and FM's term of all
        columns, [rows, 1] each, and how many ids were outside.

        Raises:
            ValueError: rows that are not of the plan's records.
        """
        self._rows.check(rows)
        n = rows.rows
        x = torch.empty(n, layers.shape[1] if layers else self._x_width) if self._x_width and x is None else x
        total = torch.empty(n, 1) if self._sums else None
        term = torch.empty(n, 1) if fm else None
        out = [None if t is None else t.data_ptr() for t in (x, total, term)]
        of_layers = layers.arguments if layers else (None, 0, 0)
        return x, total, term, self._run(self._rows.address, self._address, *rows[:7], *out, *of_layers, *pool_arguments())
