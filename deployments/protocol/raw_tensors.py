"""Tensors of raw values -> columns by feature: of one value a row as they lie in the body, of lists, with masks.

Owns which shapes and datatypes a column may have; that values fit is for the encoders to check.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deployments.protocol.tensors import DTYPES, Tensor, numbers_of, texts_of
from deployments.scoring.faults import Words
from dpiframe_core.errors import InputError, TooLarge
from dpiframe_core.features.packed_column import ARRAYS, Form, PackedColumn, PackedParts
from dpiframe_core.features.raw_columns import ColumnValues
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric

_MISSING = ":missing"
_FORMS = {name: ARRAYS[dtype] for name, dtype in DTYPES.items() if dtype in ARRAYS} | {"BYTES": Form.TEXTS}


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


def bounded(rows: int, max_rows: int) -> None:
    if rows > max_rows:
        raise TooLarge("inputs", rows, f"at most {max_rows} rows")


def in_place(
    single: Collection[str], tensors: Mapping[str, Tensor], max_rows: int
) -> tuple[dict[str, PackedParts], dict[str, Tensor]]:
    """Columns of one value a row as they lie in the body, by feature, and the tensors that are none, or may be none.

    Args:
        single: features of one value a row.
    """
    parts: dict[str, PackedParts] = {}
    masks: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        _, datatype, shape, data = tensor
        if isinstance(data, list) or not 0 < shape[0] <= max_rows or (len(shape) == 2 and shape[1] != 1):
            left[name] = tensor
        elif name in single and (form := _FORMS.get(datatype)) is not None:
            parts[name] = form, shape[0], data, None
        else:
            (masks if name.endswith(_MISSING) and datatype == "BOOL" else left)[name] = tensor
    for name, mask in masks.items():
        part = parts.get(feature := name[: -len(_MISSING)])
        if part is None or part[1] != mask.shape[0]:
            left[name] = mask
        else:
            parts[feature] = *part[:3], cast(memoryview, mask.data)
    return parts, left


def raw_columns(schema: FeatureSchema, tensors: Mapping[str, Tensor], max_rows: int) -> dict[str, RawColumn]:
    """By feature, in the request's order, of values as Python or NumPy has them."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        feature, _, suffix = name.partition(":")
        if feature not in schema.columns or suffix not in ("", "lengths", "missing") or (not suffix and ":" in name):
            raise InputError("inputs", name, "a feature of the model, or one of its :lengths or :missing")
        parts.setdefault(feature, {})[suffix] = tensor
    out: dict[str, RawColumn] = {}
    listed = {feature: part[""] for feature, part in parts.items() if "" in part and part[""].datatype == "BYTES"}
    texts = dict(zip(listed, texts_of(list(listed.values())), strict=True))
    for feature, part in parts.items():
        if "" not in part:
            raise InputError(f"inputs.{feature}", None, f"its values, as there is {next(iter(part.values())).name}")
        tensor = part[""]
        # Before rows are made: a shape of rows without values claims any number of them at no cost.
        bounded(part.get("lengths", tensor).shape[0], max_rows)
        values: list[Any] | npt.NDArray[Any]
        if tensor.datatype == "BYTES":
            values = texts[feature]
        elif isinstance(tensor.data, list):
            values = tensor.data  # the encoder reads JSON's values, null among them, as strictly as those of /v1/score
        else:
            values = numbers_of(tensor).reshape(-1)
        out[feature] = _column(schema.feature(feature), tensor, values, part.get("lengths"), part.get("missing"))
    return out


def _column(
    f: Categorical | Numeric, tensor: Tensor, flat: list[Any] | npt.NDArray[Any], lengths: Tensor | None, missing: Tensor | None
) -> RawColumn:
    shape, rows = tensor.shape, tensor.shape[0]
    if f.max_values > 1:
        if missing is not None and lengths is None and len(shape) == 1 and _mask(missing, rows).all():
            return RawColumn([None] * rows, rows)  # as a column is sent of which nobody can tell that it has lists
        if missing is not None:
            raise InputError(missing.where, Words("a mask"), "none, unless all is missing: a list without values is")
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
