"""Reads click logs in the format of Criteo (Kaggle) into pyarrow tables, block by block, with nulls kept as nulls.

Values stay raw (text and integers): turning them into ids is `Encoder`'s work. It knows no schema and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dpiframe_core.errors import InputError
from dpiframe_core.files.text_columns import converted, csv_bytes, integers, text

_GZIP = b"\x1f\x8b"
_FIRST_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ClickLogFormat:
    """A published file format.

    Attributes:
        columns: names in file order, `label` among them; a test file lacks the label, and so does the table read from it.
        integers: the columns whose values are integers (int64, null where the file has nothing); the others are text.
    """

    name: str
    label: str
    columns: tuple[str, ...]
    integers: frozenset[str]

    @property
    def unlabelled(self) -> tuple[str, ...]:
        return tuple(c for c in self.columns if c != self.label)

    def schema(self, columns: tuple[str, ...]) -> pa.Schema:
        return pa.schema([(c, pa.int64() if c in self.integers else pa.string()) for c in columns])


CRITEO = ClickLogFormat(
    name="Criteo",
    label="label",
    columns=("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
    integers=frozenset(("label", *(f"I{i}" for i in range(1, 14)))),
)


def read_table(path: str | Path) -> pa.Table:
    """The whole file as one table; see `iter_batches`."""
    return pa.concat_tables(iter_batches(path))


def iter_batches(path: str | Path, *, block_bytes: int = 8 << 20) -> Iterator[pa.Table]:
    """The file's rows in order, one table for each `block_bytes` of (unpacked) text, so that memory stays bounded.

    Read as they come: tab- or comma-separated (by the first line), plain or gzip (by the first bytes), with or without
    the label column and a first line of names. Integers may be written the way pandas writes a column with gaps, `260.0`.

    Raises:
        InputError: the file is missing, empty, cut short or not text, or a line breaks the format; names file, line, column.
    """
    path = Path(path)
    dialect = _sniff(path)
    bad_rows: list[pa.csv.InvalidRow] = []
    first_line = line = 2 if dialect.header else 1
    try:
        batches = csv_bytes(
            _open(path), dialect.columns, dialect.delimiter, bad_rows, skip_rows=first_line - 1, block_bytes=block_bytes,
            ignore_empty_lines=False,  # else the line numbers of later errors would be off
        )  # fmt: skip
        for raw in batches:
            yield _typed(raw, path, line)
            line += raw.num_rows
        if line == first_line:
            raise InputError(f"{path}, line {line}", "the end of the file", "at least one row")
    except pa.ArrowInvalid as error:
        if bad_rows:
            bad = bad_rows[0]
            rule = f"{bad.expected_columns}, as {CRITEO.name} has"
            raise InputError(f"{path}, line {bad.number}, columns", bad.actual_columns, rule) from error
        raise InputError(f"{path}, line {line} or later", str(error), f"lines of {CRITEO.name}") from error
    except OSError as error:
        raise InputError(f"{path}, line {line} or later", str(error), "an intact file") from error


@dataclass(frozen=True, slots=True)
class _Dialect:
    delimiter: str
    header: bool
    columns: tuple[str, ...]


def _open(path: Path) -> pa.NativeFile:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return pa.input_stream(str(path), compression="gzip" if packed else None)


def _sniff(path: Path) -> _Dialect:
    """Delimiter, header and columns, by the first line."""
    if not path.is_file():
        raise InputError(str(path), "no such file", f"a click log in {CRITEO.name}'s format")
    try:
        with _open(path) as stream:
            first = stream.read(_FIRST_LINE_BYTES).split(b"\n", 1)[0]
    except OSError as error:
        raise InputError(f"{path}, line 1", str(error), "an intact file") from error
    if not first.strip():
        raise InputError(f"{path}, line 1", "an empty line", f"a click log in {CRITEO.name}'s format")
    line = first.decode("utf-8-sig", "replace").rstrip("\r")
    delimiter = "\t" if "\t" in line else ","
    cells = tuple(cell.strip('"') for cell in line.split(delimiter))
    for columns in (CRITEO.columns, CRITEO.unlabelled):
        if cells == columns:
            return _Dialect(delimiter, True, columns)
    for columns in (CRITEO.columns, CRITEO.unlabelled):
        if len(cells) == len(columns):
            return _Dialect(delimiter, False, columns)
    counts = f"{len(CRITEO.columns)}, as {CRITEO.name} has (a test file: {len(CRITEO.unlabelled)})"
    raise InputError(f"{path}, line 1, columns", len(cells), counts)


def _typed(raw: pa.RecordBatch, path: Path, line: int) -> pa.Table:
    """Bytes -> text and integers. `line` is the file's line that holds row 0."""

    def place(name: str, row: int) -> str:
        return f"{path}, line {line + row}, column {name}"

    arrays = []
    for name, column in zip(raw.schema.names, raw.columns, strict=True):
        array = converted(column, text, partial(place, name), "UTF-8 text")
        if name in CRITEO.integers:
            array = converted(array, integers, partial(place, name), "a 64-bit integer or nothing")
        arrays.append(array)
    table = pa.table(arrays, schema=CRITEO.schema(tuple(raw.schema.names)))
    _refuse_empty_lines(table, path, line)
    if CRITEO.label in table.column_names:
        label = table[CRITEO.label]
        good = pc.is_in(label, value_set=pa.array([0, 1], pa.int64()))
        if (row := pc.index(good, False).as_py()) >= 0:
            raise InputError(f"{path}, line {line + row}, column {CRITEO.label}", label[row].as_py(), "0 or 1")
    return table


def _refuse_empty_lines(table: pa.Table, path: Path, line: int) -> None:
    """Arrow turns an empty line into a row of nulls, which would be scored or trained on like any other."""
    if min(column.null_count for column in table.columns) == 0:
        return
    empty = reduce(pc.and_, (pc.is_null(column) for column in table.columns))
    if (row := pc.index(empty, True).as_py()) >= 0:
        raise InputError(f"{path}, line {line + row}", "an empty line", f"{table.num_columns} columns")
