"""Columns of text read strictly into text, integers, numbers and lists of them, with the first bad cell found by name.

Knows no file format and no schema.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dpiframe_core.errors import InputError

Convert: TypeAlias = Callable[[pa.Array], pa.Array]


def cell(file: Path, row: int, column: str) -> str:
    """How errors name a cell of a file; `row` from 1."""
    return f"{file}, row {row}, column {column}"


def converted(column: pa.Array, convert: Convert, place: Callable[[int], str], expected: str) -> pa.Array:
    """`convert(column)`; `place` names a row (from 0) for the error.

    Raises:
        InputError: a cell that `convert` refuses; the first one is named.
    """
    try:
        return convert(column)
    except pa.ArrowInvalid as error:
        row, got = _first_bad(column, convert)
        raise InputError(place(row), got, expected) from error


def csv_bytes(
    source: Any,
    names: Sequence[str],
    delimiter: str,
    bad_rows: list[pa.csv.InvalidRow],
    *,
    skip_rows: int,
    block_bytes: int,
    wanted: Sequence[str] | None = None,
    **parse: bool,
) -> Iterator[pa.RecordBatch]:
    """Batches of columns of bytes, null where empty. Rows of another number of columns go to `bad_rows` before Arrow's error.

    Bytes first, types after (`converted`): Arrow's own conversion errors do not say which row is at fault.
    """

    def note(row: pa.csv.InvalidRow) -> str:
        bad_rows.append(row)
        return "error"

    yield from pa.csv.open_csv(
        source,
        # One thread: Arrow numbers the lines of bad rows only then.
        pa.csv.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names, skip_rows=skip_rows),
        pa.csv.ParseOptions(delimiter=delimiter, quote_char=delimiter == "," and '"', invalid_row_handler=note, **parse),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()), null_values=[""], strings_can_be_null=True, include_columns=wanted
        ),
    )


def text(column: pa.BinaryArray) -> pa.StringArray:
    """Bytes that must be UTF-8."""
    return column.cast(pa.string())


def integers(column: pa.StringArray) -> pa.Int64Array:
    """Decimal integers of 64 bits, also the way pandas writes a column with gaps, `260.0`."""
    try:
        found = column.cast(pa.int64())
    except pa.ArrowInvalid:
        found = pc.replace_substring_regex(column, r"^(-?[0-9]+)\.0*$", r"\1").cast(pa.int64())
    # Arrow takes `0x1f` for an integer; a click log's numbers are decimal.
    if pc.any(pc.match_substring(column, "x", ignore_case=True)).as_py():
        raise pa.ArrowInvalid("hexadecimal")
    return found


def numbers(column: pa.StringArray) -> pa.DoubleArray:
    """float64; infinities and NaN are let through, for whoever reads them to judge."""
    return column.cast(pa.float64())


_OF_TYPE: dict[pa.DataType, tuple[Convert, str]] = {
    pa.string(): (lambda column: column, "text"),
    pa.int64(): (integers, "a 64-bit integer or nothing"),
    pa.float64(): (numbers, "a number or nothing"),
}


def parser(kind: pa.DataType, separator: str | None) -> tuple[Convert, str]:
    """How text becomes `kind` (string, int64, float64, or a list of one, its values joined by `separator`), and the rule."""
    if separator is None:
        return _OF_TYPE[kind]
    convert, expected = _OF_TYPE[kind.value_type]
    return partial(_split, convert=convert, separator=separator), f"{expected}, or several joined by {separator!r}"


def _split(column: pa.StringArray, convert: Convert, separator: str) -> pa.ListArray:
    parts = pc.split_pattern(column, separator)
    return pa.ListArray.from_arrays(parts.offsets, convert(parts.values), mask=parts.is_null())


def _first_bad(column: pa.Array, convert: Convert) -> tuple[int, object]:
    """Row and value of the first cell that `convert` refuses, found by asking it again, cell by cell."""
    for row in range(len(column)):
        try:
            convert(column.slice(row, 1))
        except pa.ArrowInvalid:
            return row, column[row].as_py()
    raise AssertionError("a column was refused, but none of its cells")
