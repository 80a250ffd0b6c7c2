"""What the client makes of a caller's columns: the tensors that go over the wire. Needs NumPy only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Column: TypeAlias = npt.NDArray[Any] | Sequence[object]

_DATATYPES = {
    "?": "BOOL", "b": "INT8", "h": "INT16", "i": "INT32", "l": "INT64", "q": "INT64", "B": "UINT8", "H": "UINT16",
    "I": "UINT32", "L": "UINT64", "Q": "UINT64", "e": "FP16", "f": "FP32", "d": "FP64",
}  # fmt: skip
_LENGTH = Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class WireTensor:
    """One input. `data`: little-endian values, or texts each after its length."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


def encoded_texts(texts: Iterable[bytes]) -> bytes:
    """The bytes of a BYTES tensor: each text after its length, a little-endian uint32."""
    return b"".join(chain.from_iterable((_LENGTH.pack(len(text)), text) for text in texts))


def raw_tensors(candidates: Mapping[str, Column], context: Mapping[str, object] | None) -> tuple[list[WireTensor], int | None]:
    """The tensors of raw values: candidates in columns, the context as columns of one row; and how many candidates there are,
    if there are columns.

    Raises:
        ValueError: a column cannot be sent as it is.
    """
    columns, rows = _listed(_mapping("candidates", candidates))
    beside = {name: [_plain(value)] for name, value in _mapping("context", {} if context is None else context).items()}
    tensors = [tensor for side in (columns, beside) for name, values in side.items() for tensor in _column(name, values)]
    return tensors, rows or None


def _mapping(where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: got {type(given).__name__}, expected a mapping from features to their values")
    return given


def _listed(candidates: Mapping[str, Column], where: str = "") -> tuple[dict[str, Column], int]:
    """The columns, of equal lengths, and how many candidates they have: one at least, if there are columns."""
    columns: dict[str, Column] = {}
    rows = 0
    for name, given in candidates.items():
        values: Any = given
        if isinstance(values, Iterable) and not isinstance(values, Sequence | np.ndarray):
            values = list(values)
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray) or getattr(values, "ndim", 1) == 0:
            raise ValueError(f"{where}{name}: got {type(values).__name__}, expected a list or an array, a value a candidate")
        if columns and len(values) != rows:
            raise ValueError(f"{where}{name}: got {len(values)} values, expected {rows}, as of {next(iter(columns))}")
        columns[name], rows = values, len(values)
    if columns and not rows:
        raise ValueError(f"{where}candidates: got none, expected at least one")
    return columns, rows


def array_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> list[WireTensor]:
    """The tensors of arrays of numbers, in one or two dimensions."""
    return [_array(name, np.asarray(values)) for name, values in tensors.items()]


def _column(name: str, values: Column) -> list[WireTensor]:
    """A column, and beside it the lengths of its lists or the mask of what is missing, if it has such."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return [_array(name, values)]
    listed: list[Any] = list(values.tolist()) if isinstance(values, np.ndarray) else list(values)
    beside: list[WireTensor] = []
    if any(isinstance(value, list | tuple | np.ndarray) for value in listed):
        bags = [() if value is None else value for value in listed]
        if odd := [bag for bag in bags if not isinstance(bag, list | tuple | np.ndarray)]:  # a text is letters to `len`
            raise ValueError(f"{name}: got {odd[0]!r} beside lists, expected lists alone")
        beside.append(_array(f"{name}:lengths", np.array([len(bag) for bag in bags], np.int64)))
        listed = list(chain.from_iterable(bags))
        if None in listed:
            raise ValueError(f"{name}: got None inside a list, expected values")
    elif None in listed:
        beside.append(_array(f"{name}:missing", np.array([value is None for value in listed])))
    present = [value for value in listed if value is not None]
    if all(isinstance(value, str | bytes) for value in present):
        texts = (b"" if value is None else value.encode() if isinstance(value, str) else value for value in listed)
        try:
            return [WireTensor(name, "BYTES", (len(listed),), encoded_texts(texts)), *beside]
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: got {error.object[:50]!r}, expected text that UTF-8 can say") from None
    numbers = np.array([0 if value is None else value for value in listed])
    if numbers.dtype.kind not in "iuf" or numbers.ndim != 1 or any(isinstance(value, bool) for value in present):
        raise ValueError(
            f"{name}: got values of {sorted({type(v).__name__ for v in present})}, expected all text or all numbers"
        )
    return [_array(name, numbers), *beside]


def _array(name: str, values: npt.NDArray[Any]) -> WireTensor:
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    datatype = _DATATYPES.get(little.dtype.char)
    if datatype is None or values.ndim not in (1, 2):
        raise ValueError(f"{name}: got {values.dtype}{list(values.shape)}, expected numbers in one or two dimensions")
    return WireTensor(name, datatype, little.shape, little.reshape(-1).view(np.uint8).data)


def joined_tensors(requests: Sequence[tuple[Mapping[str, Column], Mapping[str, object]]]) -> tuple[list[WireTensor], list[int]]:
    """The tensors of several requests, and how many candidates each has. All have the same columns and the same context.

    Raises:
        ValueError: they have not, or a column cannot be sent as it is.
    """
    if not requests:
        raise ValueError("requests: got none, expected at least one")
    for i, (of_rows, shared) in enumerate(requests):
        _mapping(f"requests[{i}] candidates", of_rows)
        _mapping(f"requests[{i}] context", shared)
    columns, contexts = ([side.keys() for side in sides] for sides in zip(*requests, strict=True))
    for i, (own, beside) in enumerate(zip(columns, contexts, strict=True)):
        if own != columns[0] or beside != contexts[0]:
            raise ValueError(f"requests[{i}]: got other features than requests[0] on a side, expected the same")
    listed = [_listed(own, f"requests[{i}].") for i, (own, _) in enumerate(requests)]
    rows = [count for _, count in listed]
    tensors = [_column(name, _joined([own[name] for own, _ in listed])) for name in columns[0]]
    tensors += [_column(name, [_plain(context[name]) for _, context in requests]) for name in contexts[0]]
    return [*chain.from_iterable(tensors), _array("context_rows", np.array(rows, np.int64))], rows


def _joined(columns: Sequence[Column]) -> Column:
    if all(isinstance(column, np.ndarray) and column.dtype.kind in "biuf" for column in columns):
        return np.concatenate([np.asarray(column) for column in columns])
    return list(chain.from_iterable(column.tolist() if isinstance(column, np.ndarray) else column for column in columns))


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
