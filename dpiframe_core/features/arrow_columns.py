"""Columns of Arrow as C reads them, in the buffers where they lie, once Arrow has found them sound. Twin of arrow.h in
kernels/columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dpiframe_core.features.packed_column import ColumnsInPlace, JsonColumns, PackedColumns
from kernels.runtime import c_build

Parts = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class ArrowColumns(ColumnsInPlace):
    """Columns of one record batch, in its order. An array is made of one when it is asked for."""

    batch: pa.RecordBatch

    def __getitem__(self, name: str) -> pa.Array:
        return self.batch.column(self.parts[name][3] >> 16)  # arrow.c says what is in it


IN_PLACE = frozenset({JsonColumns, PackedColumns, ArrowColumns})  # the mappings of columns that have `parts` and `rows`


def rows_in(columns: Mapping[str, Any]) -> int:
    """How many values each column has; 0 if there is none."""
    if type(columns) in IN_PLACE:
        return columns.rows  # type: ignore[attr-defined, no-any-return]
    return len(next(iter(columns.values()), ()))


def columns_of_batch(batch: pa.RecordBatch, names: Sequence[str]) -> Mapping[str, pa.Array]:
    """Columns by these names, all different, of a batch that Arrow has validated in full and that holds no extension types."""
    functions = c_build.request_extension()
    if functions is None:
        return dict(zip(names, batch.columns, strict=True))
    parts = functions.arrow_columns(*batch.__arrow_c_array__())
    return ArrowColumns(dict(zip(names, parts, strict=True)), batch.num_rows, batch)


def in_one_batch(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same columns, in place if all are Arrow's, sound and of one length."""
    if not isinstance(next(iter(columns.values()), None), pa.Array | pa.ChunkedArray):
        return columns
    arrays = list(columns.values())
    batch = sound_batch(arrays) if all(isinstance(a, pa.Array | pa.ChunkedArray) for a in arrays) else None
    return columns if batch is None else columns_of_batch(batch, list(columns))


def sound_batch(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.RecordBatch | None:
    """The columns in one batch. None: one is of an extension type, not sound or of another length, or Arrow does not join its
    dictionaries.
    """
    kinds = {kind for c in columns for kind in (c.type, getattr(c.type, "value_type", None))}
    if any(isinstance(kind, pa.BaseExtensionType) for kind in kinds):
        return None
    try:
        arrays = [c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for c in columns]
        batch = pa.RecordBatch.from_arrays(arrays, [""] * len(arrays))
        batch.validate(full=True)
    except pa.ArrowException:
        return None
    return batch


def arrow_parts(values: pa.Array | pa.ChunkedArray) -> Parts | None:
    """One column, for C. None: it is left to the careful way."""
    functions = c_build.request_extension()
    batch = None if functions is None else sound_batch([values])
    return None if functions is None or batch is None else functions.arrow_columns(*batch.__arrow_c_array__())[0]
