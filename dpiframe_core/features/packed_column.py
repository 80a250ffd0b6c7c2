"""A column of a request as it lies in the client's bytes: what reads several columns at once takes it so, and most values never
become Python's objects. Twin of cells.h in kernels/columns.
"""

import json
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np


class Form(IntEnum):
    """How values are written: each text after its length (uint32), an array of JSON, numbers side by side, little-endian, or an
    array of Arrow.
    """

    TEXTS = 1
    JSON = 2
    FLOAT32 = 3
    FLOAT64 = 4
    INT32 = 5
    INT64 = 6
    ARROW = 7


ARRAYS: dict[np.dtype[Any], Form] = {
    np.dtype("<f4"): Form.FLOAT32,
    np.dtype("<f8"): Form.FLOAT64,
    np.dtype("<i4"): Form.INT32,
    np.dtype("<i8"): Form.INT64,
}
_DTYPES: dict[Form, np.dtype[Any]] = {form: dtype for dtype, form in ARRAYS.items()}


@dataclass(slots=True, eq=False)
class PackedColumn:
    """Values of one feature, one a row. `missing`: a byte a row, not 0 where there is none.

    Its fields never change; it is not frozen, as that would cost half a microsecond at each of a request's columns.
    """

    form: Form
    rows: int
    data: bytes | memoryview
    missing: bytes | memoryview | None = None

    def __len__(self) -> int:
        return self.rows

    @property
    def parts(self) -> "PackedParts":
        """For C."""
        return self.form, self.rows, self.data, self.missing

    def values(self) -> list[Any]:
        """As Python has them.

        Raises:
            ValueError: the bytes are not what `form` says.
        """
        if self.form is Form.JSON:
            return list(json.loads(bytes(self.data)))
        if self.form is Form.TEXTS:
            values: list[Any] = _texts(bytes(self.data), self.rows)
        else:
            values = np.frombuffer(self.data, _DTYPES[self.form]).tolist()
        if self.missing is None:
            return values
        return [None if gone else value for value, gone in zip(values, bytes(self.missing), strict=True)]


PackedParts: TypeAlias = tuple[Form, int, bytes | memoryview, bytes | memoryview | None]


@dataclass(slots=True, eq=False)
class ColumnsInPlace(Mapping[str, Any]):
    """Columns of one request where they lie, all of `rows` values. `parts`: of each by name, for C. What Python reads is made
    of them when it is asked for: to make forty `PackedColumn`s was a tenth of a small request's CPU.
    """

    parts: dict[str, Any]
    rows: int

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def keys(self) -> KeysView[str]:
        return self.parts.keys()


class JsonColumns(ColumnsInPlace):
    """Columns of one body of JSON. `parts`: form, rows, the body, and where the array is in it."""

    __slots__ = ()

    def __getitem__(self, name: str) -> PackedColumn:
        _, rows, body, (start, end) = self.parts[name]
        return PackedColumn(Form.JSON, rows, memoryview(body)[start:end])


class PackedColumns(ColumnsInPlace):
    """Columns of tensors. `parts`: as `PackedColumn.parts`."""

    __slots__ = ()

    def __getitem__(self, name: str) -> PackedColumn:
        return PackedColumn(*self.parts[name])


def _texts(data: bytes, count: int) -> list[str]:
    texts, at = [], 0
    for _ in range(count):
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        texts.append(data[start:at].decode())
    if at != len(data):
        raise ValueError(f"texts: got {len(data)} bytes, expected {at}")
    return texts
