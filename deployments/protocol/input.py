"""The tensors of an inference request -> the `RowBlock` of one model: raw values by feature, ids by feature, or whole sections.

Owns which tensor means what; that values fit is for the encoders to check.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from deployments.protocol.raw_tensors import RawColumn, bounded, in_place, raw_columns
from deployments.protocol.request import InferRequest
from deployments.protocol.tensors import DTYPES, Tensor, numbers_of, texts_of
from deployments.scoring.faults import Words
from deployments.scoring.job import Job
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import SECTIONS, Section
from dpiframe_core.features.packed_column import PackedColumn, PackedColumns, PackedParts
from dpiframe_core.features.preencoded import CONTEXT_ROWS, check_context_rows
from dpiframe_core.features.raw_columns import ColumnValues
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema, Scope
from kernels.runtime import c_build


def first_value(request: InferRequest, name: str) -> object:
    """The first value of the tensor of that name, as Python has it; None if there is none.

    Raises:
        InputError: the tensor is damaged.
    """
    tensor = request.tensors.get(name)
    if tensor is None or not prod(tensor.shape):
        return None
    values = texts_of([tensor])[0] if tensor.datatype == "BYTES" else numbers_of(tensor).reshape(-1).tolist()
    return values[0]


def encode(served: ServedModel, request: InferRequest, max_rows: int, job: Job) -> RowBlock:
    """Encodes a request, whichever of the three forms it has. Raw values are noted in its job.

    Raises:
        InputError: a tensor is unknown, lacks, or has a wrong shape or datatype, or a value breaks its feature's rule.
        TooLarge: it has more than `max_rows` candidates.
    """
    form, encoded = request.form, served.encoded
    if form is not None and request.data is not None and form.plan is not None and form.plan[0] is encoded:
        block = encoded.planned(form.plan[1], request.data, served.scorer.allocate)
        if block is not None:
            return block
    schema, tensors = encoded.schema, request.tensors
    context_rows, features = _context_rows(schema, tensors)
    sections: list[Section] = [s for s in SECTIONS if s in tensors and s not in schema.columns]
    if sections:
        for name in tensors:
            if name not in sections and not (name == CONTEXT_ROWS and context_rows is not None):
                raise InputError("inputs", name, f"one of {', '.join(SECTIONS)}, as there is {sections[0]}")
        bounded(max(t.shape[0] for t in tensors.values()), max_rows)
        given = {section: _array(tensors[section]) for section in sections}
        block = encoded.block(given, served.scorer.allocate, context_rows)
        if form is not None and context_rows is None:
            # The next of this form, in which it found nothing wrong but for values, takes less.
            ends = dict(zip(tensors, form.ends, strict=True))
            form.plan = encoded, encoded.plan({s: (tensors[s].shape, DTYPES[tensors[s].datatype], ends[s]) for s in sections})
        return block
    if request.parameters.encoded:
        bounded(max(t.shape[0] for t in tensors.values()), max_rows)
        arrays = {name: _array(tensor) for name, tensor in features.items()}
        return encoded.features(arrays, served.scorer.allocate, context_rows)
    if c_build.request_extension() is not None:
        try:
            parts, left = in_place(encoded.single, features, max_rows)
            if not left and context_rows is None and (block := _encoded_in_place(served, parts, job)) is not None:
                return block
            packed = {name: RawColumn(PackedColumn(*part), part[1]) for name, part in parts.items()}
            return _encoded(served, packed | raw_columns(schema, left, max_rows), context_rows, job)
        except (InputError, ValueError):  # to be said below, of values as Python has them
            pass
    return _encoded(served, raw_columns(schema, features, max_rows), context_rows, job)


def _encoded_in_place(served: ServedModel, parts: dict[str, PackedParts], job: Job) -> RowBlock | None:
    """As `_encoded`, of columns that are in place; None if their lengths differ. A `RawColumn` for each of forty would take as
    long as the values of a small request.
    """
    alone = _of_context({name: part[1] for name, part in parts.items()}, served.encoded.scopes)
    candidates = {name: part for name, part in parts.items() if name not in alone}
    if len(lengths := {part[1] for part in candidates.values()}) != 1:
        return None
    context = {name: PackedColumn(*parts[name]).values()[0] for name in alone}
    job.given = PackedColumns(candidates, *lengths), context
    return served.encode(*job.given)


def _of_context(rows: Mapping[str, int], scopes: Mapping[str, Scope]) -> set[str]:
    """The columns that are one value for the whole request."""
    most = max(rows.values())
    return {name for name, count in rows.items() if count == 1 and (most > 1 or scopes[name] == "context")}


def _encoded(
    served: ServedModel, columns: Mapping[str, RawColumn], context_rows: npt.NDArray[np.int64] | None, job: Job
) -> RowBlock:
    scopes = served.encoded.scopes
    if context_rows is None:
        alone = _of_context({name: column.rows for name, column in columns.items()}, scopes)
        candidates: dict[str, ColumnValues] = {name: column.values for name, column in columns.items() if name not in alone}
        context: dict[str, Any] = {name: columns[name].only for name in alone}
        job.given = candidates, context
        return served.encode(candidates, context)
    candidates, context = {}, {}
    rows, contexts = int(context_rows.sum()), len(context_rows)
    check_context_rows(context_rows, rows)
    for name, column in columns.items():
        if column.rows not in (rows, contexts):
            raise InputError(f"inputs.{name}", column.rows, f"{rows} rows, or {contexts}, one a context")
        of_context = column.rows != rows or (contexts == rows and scopes[name] == "context")
        (context if of_context else candidates)[name] = column.values
    return served.encode(candidates, context, context_rows)


def _context_rows(
    schema: FeatureSchema, tensors: Mapping[str, Tensor]
) -> tuple[npt.NDArray[np.int64] | None, Mapping[str, Tensor]]:
    """How many candidates each context is for, if the request says so, and its other tensors."""
    tensor = None if CONTEXT_ROWS in schema.columns else tensors.get(CONTEXT_ROWS)
    if tensor is None:
        return None, tensors
    if tensor.datatype not in ("INT32", "INT64") or len(tensor.shape) != 1:
        got = Words(f"{tensor.datatype} {list(tensor.shape)}")
        raise InputError(CONTEXT_ROWS, got, "INT32 or INT64 [contexts]")
    return numbers_of(tensor).astype(np.int64), {name: t for name, t in tensors.items() if t is not tensor}


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.datatype == "BYTES":
        raise InputError(tensor.where, "BYTES", "ids or numbers, in an encoded request")
    return numbers_of(tensor)
