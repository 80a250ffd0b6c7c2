"""The tensors of an inference request -> the `RowBlock` of one model: raw values by feature, ids by feature, or whole sections.

Owns which tensor means what; that values fit is for the encoders to check.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deployments.protocol.request import InferRequest
from deployments.protocol.tensors import DTYPES, Tensor, numbers_of, texts_of
from deployments.scoring.faults import Words
from deployments.scoring.job import Job
from deployments.scoring.served_model import ServedModel
from dpiframe_core.errors import InputError, TooLarge
from dpiframe_core.features.block_layout import SECTIONS, Section
from dpiframe_core.features.packed_column import ARRAYS, Form, PackedColumn
from dpiframe_core.features.preencoded import CONTEXT_ROWS, check_context_rows
from dpiframe_core.features.raw_columns import ColumnValues
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric
from kernels.runtime import c_build


@dataclass(frozen=True, slots=True, eq=False)
class RawColumn:
    """A feature's raw values, one entry a row."""

    values: ColumnValues
    rows: int

    @property
    def only(self) -> object:
        """The value of a column of one row, as Python has it."""
        if isinstance(self.values, PackedColumn):
            return self.values.values()[0]
        value = cast(Any, self.values)[0]
        return value.as_py() if isinstance(value, pa.Scalar) else value.tolist() if hasattr(value, "tolist") else value


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
        _bounded(max(t.shape[0] for t in tensors.values()), max_rows)
        given = {section: _array(tensors[section]) for section in sections}
        block = encoded.block(given, served.scorer.allocate, context_rows)
        if form is not None and context_rows is None:
            # The next of this form, in which it found nothing wrong but for values, takes less.
            ends = dict(zip(tensors, form.ends, strict=True))
            form.plan = encoded, encoded.plan({s: (tensors[s].shape, DTYPES[tensors[s].datatype], ends[s]) for s in sections})
        return block
    if request.parameters.encoded:
        _bounded(max(t.shape[0] for t in tensors.values()), max_rows)
        arrays = {name: _array(tensor) for name, tensor in features.items()}
        return encoded.features(arrays, served.scorer.allocate, context_rows)
    if c_build.request_extension() is not None:
        try:
            return _encoded(served, _columns(schema, features, max_rows, packed=True), context_rows, job)
        except (InputError, ValueError):  # to be said below, of values as Python has them
            pass
    return _encoded(served, _columns(schema, features, max_rows, packed=False), context_rows, job)


def _encoded(
    served: ServedModel, columns: Mapping[str, RawColumn], context_rows: npt.NDArray[np.int64] | None, job: Job
) -> RowBlock:
    scopes = served.encoded.scopes
    candidates: dict[str, ColumnValues] = {}
    context: dict[str, Any] = {}
    if context_rows is None:
        rows = max(column.rows for column in columns.values())
        for name, column in columns.items():
            if column.rows == 1 and (rows > 1 or scopes[name] == "context"):
                context[name] = column.only
            else:
                candidates[name] = column.values
        job.given = candidates, context
        return served.encode(candidates, context)
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


def _bounded(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise TooLarge("inputs", rows, f"at most {max_rows} rows")


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.datatype == "BYTES":
        raise InputError(tensor.where, "BYTES", "ids or numbers, in an encoded request")
    return numbers_of(tensor)


def _columns(schema: FeatureSchema, tensors: Mapping[str, Tensor], max_rows: int, packed: bool) -> dict[str, RawColumn]:
    """By feature, in the request's order. `packed`: those of one value a row as they lie in the body, not looked at yet."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        feature, _, suffix = name.partition(":")
        if feature not in schema.columns or suffix not in ("", "lengths", "missing") or (not suffix and ":" in name):
            raise InputError("inputs", name, "a feature of the model, or one of its :lengths or :missing")
        parts.setdefault(feature, {})[suffix] = tensor
    out: dict[str, RawColumn] = {}
    if packed:
        for feature, part in parts.items():
            if "" in part and (column := _packed(schema.feature(feature), part, max_rows)) is not None:
                out[feature] = column
    listed = {
        feature: part[""]
        for feature, part in parts.items()
        if feature not in out and "" in part and part[""].datatype == "BYTES"
    }
    texts = dict(zip(listed, texts_of(list(listed.values())), strict=True))
    for feature, part in parts.items():
        if feature in out:
            continue
        if "" not in part:
            raise InputError(f"inputs.{feature}", None, f"its values, as there is {next(iter(part.values())).name}")
        tensor = part[""]
        # Before rows are made: a shape of rows without values claims any number of them at no cost.
        _bounded(part.get("lengths", tensor).shape[0], max_rows)
        values: list[Any] | npt.NDArray[Any]
        if tensor.datatype == "BYTES":
            values = texts[feature]
        elif isinstance(tensor.data, list):
            values = tensor.data  # the encoder reads JSON's values, null among them, as strictly as those of /v1/score
        else:
            values = numbers_of(tensor).reshape(-1)
        out[feature] = _column(schema.feature(feature), tensor, values, part.get("lengths"), part.get("missing"))
    return out


def _packed(f: Categorical | Numeric, part: Mapping[str, Tensor], max_rows: int) -> RawColumn | None:
    """None for what is no such column, or may be none."""
    tensor, missing = part[""], part.get("missing")
    form = Form.TEXTS if tensor.datatype == "BYTES" else ARRAYS.get(DTYPES[tensor.datatype])
    rows = tensor.shape[0]
    if form is None or f.max_values > 1 or "lengths" in part or tensor.shape[1:] not in ((), (1,)) or not 0 < rows <= max_rows:
        return None
    if missing is not None and (missing.datatype != "BOOL" or missing.shape not in ((rows,), (rows, 1))):
        return None
    mask = None if missing is None else missing.data
    if isinstance(tensor.data, list) or isinstance(mask, list):
        return None
    return RawColumn(PackedColumn(form, rows, tensor.data, mask), rows)


def _column(
    f: Categorical | Numeric, tensor: Tensor, flat: list[Any] | npt.NDArray[Any], lengths: Tensor | None, missing: Tensor | None
) -> RawColumn:
    shape, rows = tensor.shape, tensor.shape[0]
    if f.max_values > 1:
        if missing is not None:
            raise InputError(missing.where, Words("a mask"), "none: a list without values is missing")
        if lengths is not None:
            return _bags(tensor, flat, lengths)
        if len(shape) != 2:
            raise InputError(tensor.where, list(shape), f"shape [n, values], or {f.name}:lengths beside it")
        width = shape[1]
        if isinstance(flat, list):
            return RawColumn([flat[i * width : (i + 1) * width] for i in range(rows)], rows)
        return RawColumn(flat.reshape(shape), rows)
    if lengths is not None:
        raise InputError(lengths.where, Words("lengths"), f"none: {f.name} has one value a row")
    if len(shape) == 2 and shape[1] != 1:
        raise InputError(tensor.where, list(shape), "shape [n] or [n, 1]")
    if missing is None:
        return RawColumn(flat, rows)
    mask = _mask(missing, rows)
    if isinstance(flat, list):
        return RawColumn([None if gone else value for value, gone in zip(flat, mask.tolist(), strict=True)], rows)
    return RawColumn(pa.array(flat, mask=mask), rows)


def _bags(tensor: Tensor, flat: list[Any] | npt.NDArray[Any], lengths: Tensor) -> RawColumn:
    if len(tensor.shape) != 1 or len(lengths.shape) != 1 or lengths.datatype not in ("INT32", "INT64"):
        got = Words(f"{tensor.shape} beside {lengths.datatype} {lengths.shape}")
        raise InputError(tensor.where, got, f"shape [values] beside INT32 or INT64 {lengths.name} [n]")
    counts = numbers_of(lengths).astype(np.int64)
    if counts.size and int(counts.min()) < 0:
        i = int(np.argmin(counts))
        raise InputError(f"{lengths.where}[{i}]", int(counts[i]), "0 or more")
    if counts.size and int(counts.max()) > len(flat):  # before they are added up, which must not overflow
        i = int(np.argmax(counts))
        raise InputError(f"{lengths.where}[{i}]", int(counts[i]), f"at most the {len(flat)} values")
    ends = np.concatenate([[0], np.cumsum(counts)])
    if int(ends[-1]) != len(flat):
        raise InputError(lengths.where, int(ends[-1]), f"a sum of {len(flat)}, the values of {tensor.name}")
    if isinstance(flat, list):
        return RawColumn([flat[start:end] for start, end in pairwise(ends.tolist())], len(counts))
    return RawColumn(pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat)), len(counts))


def _mask(missing: Tensor, rows: int) -> npt.NDArray[np.bool_]:
    if missing.datatype != "BOOL" or missing.shape not in ((rows,), (rows, 1)):
        raise InputError(missing.where, Words(f"{missing.datatype} {list(missing.shape)}"), f"BOOL [{rows}]")
    if isinstance(missing.data, list):
        return np.asarray(numbers_of(missing).reshape(-1), np.bool_)
    # A byte that is neither 0 nor 1 would be a bool that equals neither of them.
    mask: npt.NDArray[np.bool_] = np.frombuffer(missing.data, np.uint8) != 0
    return mask
