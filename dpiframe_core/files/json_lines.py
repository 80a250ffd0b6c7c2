"""Files of JSON lines: an object a row, whose keys are the columns. Owns their types; knows no schema and no model."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpiframe_core.errors import InputError
from dpiframe_core.files.text_columns import cell

_TYPES: dict[pa.DataType, tuple[set[type], str]] = {
    pa.string(): ({str, type(None)}, "text or null"),
    pa.int64(): ({int, type(None)}, "an integer or null"),
    pa.float64(): ({int, float, type(None)}, "a number or null"),
}


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file to read; `types` and `columns` as a `RowFile` has them."""

    path: Path
    types: Mapping[str, pa.DataType]
    columns: tuple[str, ...] | None

    def names(self) -> list[str]:
        """The first row's keys."""
        with self.path.open("rb") as lines:
            return list(self._object(next((line for line in lines if not line.isspace()), b""), 1))

    def batches(self, rows: int) -> Iterator[tuple[pa.Table, float]]:
        """`rows` rows at a time, and the part of the file that has been read, 0 to 1."""
        known = self.names()
        names = [n for n in known if self.columns is None or n in self.columns]
        schema: pa.Schema | None = None
        size, first_row, read = max(1, self.path.stat().st_size), 1, 0
        with self.path.open("rb") as source:
            lines = (line for line in source if not line.isspace())
            while batch := list(islice(lines, rows)):
                objects = [self._object(line, first_row + i) for i, line in enumerate(batch)]
                for i, found in enumerate(objects):
                    if new := found.keys() - known:
                        raise InputError(f"{self.path}, row {first_row + i}", min(new), "the keys of row 1, or some of them")
                arrays = [self._typed(name, [o.get(name) for o in objects], first_row, schema) for name in names]
                table = pa.table(arrays, names=names)
                schema = schema or table.schema
                read += sum(map(len, batch))
                yield table, read / size
                first_row += len(batch)

    def _object(self, line: bytes, row: int) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):  # UTF-8 and JSON errors are of the former, deep nesting of the latter
            found = json.loads(line)
            if isinstance(found, dict):
                return found
        raise InputError(f"{self.path}, row {row}", line.decode(errors="replace").rstrip("\n"), "a JSON object on one line")

    def _typed(self, name: str, values: list[Any], first_row: int, schema: pa.Schema | None) -> pa.Array:
        """A column of JSON values in its type; one that has none gets that of the first rows (text, if those have no value)."""
        kind, single = self.types.get(name), None
        if kind is None:
            kind = None if schema is None else schema.field(name).type
        else:
            single = kind.value_type if pa.types.is_list(kind) else kind
            accepted, expected = _TYPES[single]
            if single != kind:
                expected = f"a list, each value {expected}"
                good = (v is None or (type(v) is list and accepted.issuperset(map(type, v))) for v in values)
            else:
                good = (type(v) in accepted for v in values)
            for row, is_good in enumerate(good):
                if not is_good:
                    raise InputError(cell(self.path, first_row + row, name), values[row], expected)
        try:
            if single == pa.float64() == kind:  # Arrow would refuse integers above 2^53
                values = [None if v is None else float(v) for v in values]
            array = pa.array(values, kind)
            return array.cast(pa.string()) if pa.types.is_null(array.type) else array
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            bad = next((i for i, v in enumerate(values) if not _fits(v, kind)), 0)
            expected = f"what fits in {kind}" if kind else "values of one type"
            raise InputError(cell(self.path, first_row + bad, name), values[bad], f"{expected} ({error})") from error


def _fits(value: object, kind: pa.DataType | None) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return False
    return True
