"""Raw columns (Python lists, NumPy, Arrow) read strictly into flat typed arrays beside a mask of what is missing.

Owns types, nesting and the path of the first bad value. Knows no schema and no encoder.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dpiframe_core.errors import InputError
from dpiframe_core.features.packed_column import PackedColumn

ColumnValues: TypeAlias = Sequence[object] | npt.NDArray[Any] | pa.Array | pa.ChunkedArray | PackedColumn
Mask: TypeAlias = npt.NDArray[np.bool_] | None  # None: nothing is missing
Int64s: TypeAlias = npt.NDArray[np.int64]
Float64s: TypeAlias = npt.NDArray[np.float64]

_TEXT = "text or null"
_INTEGER = "an integer of 64 bits or null"
_NUMBER = "a finite number or null"
_COLUMN = "a list, a NumPy array or an Arrow array, one entry per candidate"
_BAG = "a list of values or null"
_INT64_MAX = 2**63 - 1
_INTEGER_TEXT = re.compile(r"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where values came from, so that an error can name one of them: `candidates.C1[3]`, `context.tags[0]`.

    Attributes:
        root: the feature's path.
        indexed: whether `root` holds a column (else one value for the whole request).
        ends: int64[n], where each bag ends among the flat values; None for single values.
    """

    root: str
    indexed: bool
    ends: Int64s | None = None

    def row(self, i: int) -> str:
        return f"{self.root}[{i}]" if self.indexed else self.root

    def value(self, i: int) -> str:
        if self.ends is None:
            return self.row(i)
        row = int(np.searchsorted(self.ends, i, side="right"))
        return f"{self.row(row)}[{i - (int(self.ends[row - 1]) if row else 0)}]"


def column_length(values: ColumnValues, place: Place) -> int:
    if not isinstance(values, _COLUMNS) or (isinstance(values, np.ndarray) and values.ndim == 0):
        raise InputError(place.root, values, _COLUMN)
    return len(values)


def read_texts(values: ColumnValues, place: Place) -> tuple[list[str | None], bool]:
    """Text as it is, None where a value is missing, and whether one is. May be the caller's list: not to be written to."""
    plain, missing = _plain(values, place)
    if isinstance(plain, np.ndarray):
        _refuse_array(plain, np.ones_like(plain, np.bool_) if missing is None else ~missing, place, _TEXT)
        return [None] * len(plain), len(plain) > 0  # nothing but nulls, of a column of numbers
    return plain, _has_null(plain, (str,), place, _TEXT)


def read_integers(values: ColumnValues, place: Place) -> tuple[Int64s, Mask]:
    """int64[n]; 0 stands where a value is missing. May share the caller's memory: not to be written to.

    Whole numbers of an Arrow column of floats are integers: so pandas holds those that have gaps. From 2^53 on (float32: 2^24)
    a float stands for several integers, and is none.
    """
    plain, missing = _plain(values, place)
    if isinstance(plain, np.ndarray):
        if plain.dtype.kind == "f":
            exact = (np.abs(plain) < 2.0 ** (np.finfo(plain.dtype).nmant + 1)) & (np.trunc(plain) == plain)
            _refuse_array(plain, ~exact | (not isinstance(values, _ARROW)), place, _INTEGER)
        if plain.dtype == np.uint64 and plain.size and plain.max() > _INT64_MAX:
            i = int(np.argmax(plain > _INT64_MAX))
            raise InputError(place.value(i), plain[i].item(), _INTEGER)
        return plain.astype(np.int64, copy=False), missing
    if _has_null(plain, (int, np.integer), place, _INTEGER):
        missing = null_mask(plain)
        plain = [0 if v is None else v for v in plain]
    try:
        return np.fromiter(plain, np.int64, len(plain)), missing
    except OverflowError:
        i = next(i for i, v in enumerate(plain) if not -_INT64_MAX - 1 <= v <= _INT64_MAX)
        raise InputError(place.value(i), plain[i], _INTEGER) from None


def read_numbers(values: ColumnValues, place: Place) -> tuple[Float64s, Mask]:
    """float64[n], all finite; 0 stands where a value is missing. May share the caller's memory: not to be written to."""
    plain, missing = _plain(values, place)
    if isinstance(plain, np.ndarray):
        numbers = plain.astype(np.float64, copy=False)
    else:
        null = _has_null(plain, (int, float, np.integer, np.floating), place, _NUMBER)
        try:
            numbers = np.array(plain, np.float64)  # null becomes NaN, told apart from a real one by `missing`
        except OverflowError:
            i = next(i for i, v in enumerate(plain) if v is not None and abs(v) > sys.float_info.max)
            raise InputError(place.value(i), plain[i], _NUMBER) from None
        if null:
            missing = null_mask(plain)
            numbers[missing] = 0.0
    finite = np.isfinite(numbers)
    if not finite.all():
        i = int(np.argmin(finite))
        raise InputError(place.value(i), plain[i] if isinstance(plain, list) else plain[i].item(), _NUMBER)
    return numbers, missing


def read_bags(values: ColumnValues, place: Place) -> tuple[ColumnValues, Int64s, Place]:
    """Lists of values -> (flat values, not yet read; int64[n] lengths, 0 for null; the place of the flat values)."""
    flat: ColumnValues
    if isinstance(values, np.ndarray) and not isinstance(values, np.ma.MaskedArray) and values.ndim == 2:
        flat, lengths = values.reshape(-1), np.full(values.shape[0], values.shape[1], np.int64)
    elif isinstance(values, _ARROW) and _is_arrow_list(values.type):
        lengths = pc.list_value_length(values).fill_null(0).to_numpy().astype(np.int64)
        flat = pc.list_flatten(values)
    else:
        rows = values if isinstance(values, list) else _plain(values, place)[0]
        if isinstance(rows, np.ndarray):
            raise InputError(place.root, rows.shape, f"two dimensions, or {_BAG} per entry")
        bags = [() if v is None else v if type(v) is list else _bag(v, place.row(i)) for i, v in enumerate(rows)]
        lengths = np.fromiter(map(len, bags), np.int64, len(bags))
        flat = list(chain.from_iterable(bags))
    return flat, lengths, Place(place.root, place.indexed, np.cumsum(lengths))


def distinct(values: ColumnValues) -> tuple[pa.Array, npt.NDArray[np.int32]] | None:
    """The different values of an Arrow column of text or integers, and int32[n] which of them each row has; else None.

    A file's columns repeat few values often, and what costs time is turning values into Python objects.
    """
    values = _joined(values)
    if not isinstance(values, pa.Array):
        return None
    if not pa.types.is_dictionary(values.type):
        if not (pa.types.is_integer(values.type) or pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            return None
        values = values.dictionary_encode(null_encoding="encode")
    if values.indices.null_count:
        return None
    return values.dictionary, values.indices.to_numpy().astype(np.int32, copy=False)


def as_list(values: ColumnValues) -> list[object]:
    """The rows of a column, one object each."""
    if isinstance(values, list):
        return values
    if isinstance(values, tuple):
        return list(values)
    if isinstance(values, PackedColumn):
        return values.values()
    rows: list[object] = values.to_pylist() if isinstance(values, _ARROW) else values.tolist()  # type: ignore[union-attr]
    return rows


def split_text(value: object, splitter: str, kind: Literal["string", "int"]) -> object:
    """Joined text -> a list of text or of integers (text that is none stays, to be refused by its place); else the value.

    The empty text is what an empty list is joined to.
    """
    if not isinstance(value, str):
        return value
    parts = value.split(splitter) if value else []
    return parts if kind == "string" else [int(part) if _INTEGER_TEXT.fullmatch(part) else part for part in parts]


def null_mask(values: list[Any]) -> npt.NDArray[np.bool_]:
    return np.fromiter(map(is_, values, repeat(None)), np.bool_, len(values))


_ARROW = (pa.Array, pa.ChunkedArray)
_COLUMNS = (list, tuple, np.ndarray, *_ARROW, PackedColumn)


def _plain(values: ColumnValues, place: Place) -> tuple[list[Any] | npt.NDArray[Any], Mask]:
    """A list, or a one-dimensional array of ints or floats with its mask. Whatever else holds values becomes a list."""
    if isinstance(values, list):
        return values, None
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise InputError(place.root, values.shape, "one dimension")
        if values.dtype.kind in "mM":  # `tolist` would turn their nanoseconds into plain integers
            raise InputError(place.root, str(values.dtype), "text or numbers")
        if values.dtype.kind in "iuf" and not isinstance(values, np.ma.MaskedArray):
            return values, None
        return values.tolist(), None
    if isinstance(values, _ARROW):
        return _from_arrow(values, place)
    if isinstance(values, tuple):
        return list(values), None
    raise InputError(place.root, values, _COLUMN)


def _from_arrow(values: Any, place: Place) -> tuple[list[Any] | npt.NDArray[Any], Mask]:
    values = _joined(values)
    if pa.types.is_dictionary(values.type):
        if pa.types.is_string_view(values.type.value_type):  # which Arrow does not decode
            texts = values.dictionary.to_pylist()
            return [None if i is None else texts[i] for i in values.indices.to_pylist()], None
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
        if values.null_count == 0:
            return values.to_numpy(zero_copy_only=False), None
        return values.fill_null(0).to_numpy(), values.is_null().to_numpy(zero_copy_only=False)
    listed = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null,
              pa.types.is_boolean, pa.types.is_float16, _is_arrow_list)  # fmt: skip
    if any(is_kind(kind) for is_kind in listed):
        return values.to_pylist(), None
    raise InputError(place.root, str(kind), "text or numbers")


def _joined(values: Any) -> Any:
    """Chunks of Arrow in one array, without their dictionaries if Arrow does not join these; all else as it is."""
    if not isinstance(values, pa.ChunkedArray):
        return values
    try:
        return values.combine_chunks()
    except pa.ArrowException:
        return pa.array(values.to_pylist(), values.type.value_type)


def _is_arrow_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _bag(value: object, where: str) -> Sequence[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray | pa.Array):
        return _bag(value.tolist(), where)
    raise InputError(where, value, _BAG)


def _has_null(values: list[Any], accepted: tuple[type, ...], place: Place, rule: str) -> bool:
    """Whether one is null. Refuses every value of another type; bool is never taken for a number."""
    kinds = set(map(type, values))
    null = type(None) in kinds
    kinds.discard(type(None))
    for kind in kinds:
        if kind is bool or not issubclass(kind, accepted):
            i = next(i for i, v in enumerate(values) if v is not None and (type(v) is bool or not isinstance(v, accepted)))
            raise InputError(place.value(i), values[i], rule)
    return null


def _refuse_array(values: npt.NDArray[Any], bad: npt.NDArray[np.bool_], place: Place, rule: str) -> None:
    if bad.any():
        i = int(np.argmax(bad))
        raise InputError(place.value(i), values[i].item(), rule)
