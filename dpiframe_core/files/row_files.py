"""Files of rows (CSV, TSV, Parquet, JSON lines) read in order and in chunks, so that memory stays bounded whatever their size.

Owns formats and types; knows no schema and no model. A bad cell is named by file, row (1 is the first row of data) and column.
"""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpiframe_core.errors import InputError
from dpiframe_core.files.json_lines import JsonLines
from dpiframe_core.files.text_columns import cell, converted, csv_bytes, parser, text

FORMATS = (".csv", ".tsv", ".parquet", ".jsonl")
_TEXT_BLOCK = 2 << 20  # bytes of text that are parsed at once; Arrow reads up to 32 of them ahead
_PARQUET_BUFFER = 1 << 20  # bytes of a column that are read ahead, in place of the whole column of a row group


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file to read.

    Attributes:
        types: of the columns that must have one (string, int64, float64, or a list of one); the others are text in CSV and
            what they are in JSON. A Parquet file's columns come as they are, whatever this says.
        separators: by name, what joins the values of a column of lists in CSV.
        columns: those to read; None: all.
    """

    path: Path
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    separators: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.path.suffix.lower() not in FORMATS:
            raise InputError("input", str(self.path), f"a file whose name ends in {', '.join(FORMATS)}")
        if not self.path.is_file():
            raise InputError("input", str(self.path), "a file that exists")

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix.lower() == ".parquet"

    def place(self, column: str, row: int) -> str:
        """How errors name a cell; `row` from 1."""
        return cell(self.path, row, column)

    @property
    def json_lines(self) -> JsonLines | None:
        """The file as JSON lines, if it is one."""
        return JsonLines(self.path, self.types, self.columns) if self.path.suffix.lower() == ".jsonl" else None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive rows. first_row: number of the first one, from 1; done: the part of the file that has been read, 0 to 1."""

    table: pa.Table
    first_row: int
    done: float


def column_names(file: RowFile) -> list[str]:
    """The file's columns; those of a JSON file are its first row's.

    Raises:
        InputError: the file is empty or damaged, or has two columns of one name.
    """
    if file.is_parquet:
        with _parquet(file) as parquet:
            names: list[str] = parquet.schema_arrow.names
    elif (lines := file.json_lines) is not None:
        names = lines.names()
    else:
        names = _header(file)[0]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise InputError(f"{file.path}, columns", twice, "distinct names")
    return names


def row_groups(file: RowFile) -> list[int]:
    """Rows of each row group of a Parquet file, which can be read apart from the others."""
    with _parquet(file) as parquet:
        return [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]


def iter_chunks(file: RowFile, chunk_rows: int, groups: Sequence[int] | None = None, first_row: int = 1) -> Iterator[Chunk]:
    """The rows in order, `chunk_rows` at a time, the last chunk with what is left.

    Args:
        groups: row groups of a Parquet file to read; None: all. first_row: the number of the first row that is read.

    Raises:
        InputError: the file is damaged or cut short, a line breaks the format, a cell is not of its column's type, or there
            are no rows.
    """
    if file.is_parquet:
        batches = _parquet_batches(file, chunk_rows, groups)
    elif (lines := file.json_lines) is not None:
        batches = lines.batches(chunk_rows)
    else:
        batches = _csv_batches(file)
    row, waiting, count, done = first_row, list[pa.Table](), 0, 0.0
    for table, done in batches:
        waiting.append(table)
        count += table.num_rows
        while count >= chunk_rows:
            joined = pa.concat_tables(waiting)
            yield Chunk(joined.slice(0, chunk_rows), row, done)
            waiting, count, row = [joined.slice(chunk_rows)], count - chunk_rows, row + chunk_rows
    if count:
        yield Chunk(pa.concat_tables(waiting), row, done)
    elif row == first_row:
        raise InputError(f"{file.path}, rows", 0, "at least one")


def _parquet(file: RowFile) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.path, buffer_size=_PARQUET_BUFFER, pre_buffer=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(str(file.path), str(error), "a readable Parquet file") from error


def _parquet_batches(file: RowFile, rows: int, groups: Sequence[int] | None) -> Iterator[tuple[pa.Table, float]]:
    with _parquet(file) as parquet:
        wanted = None if file.columns is None else [n for n in parquet.schema_arrow.names if n in file.columns]
        total, read = max(1, parquet.metadata.num_rows), 0
        try:
            for batch in parquet.iter_batches(rows, groups, wanted):
                read += batch.num_rows
                yield pa.Table.from_batches([batch]), read / total
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{file.path}, row {read + 1} or later", str(error), "an intact Parquet file") from error


def _header(file: RowFile) -> tuple[list[str], str]:
    """Names and delimiter by the ending and the first line."""
    delimiter = "\t" if file.path.suffix.lower() == ".tsv" else ","
    with file.path.open("rb") as lines:
        line = lines.readline(1 << 20)
    try:
        first = [line.decode("utf-8-sig").rstrip("\r\n")]
        cells = next(csv.reader(first, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE))
    except (UnicodeDecodeError, csv.Error) as error:  # the latter of CR line ends, which make one line of the file
        raise InputError(f"{file.path}, line 1", line, "names of columns: UTF-8 text, lines that end in LF") from error
    if not line.strip():
        raise InputError(f"{file.path}, line 1", "nothing", "the names of the columns")
    return cells, delimiter


def _csv_batches(file: RowFile) -> Iterator[tuple[pa.Table, float]]:
    names, delimiter = _header(file)
    bad_rows: list[pa.csv.InvalidRow] = []
    row, size = 1, max(1, file.path.stat().st_size)
    wanted = [n for n in names if file.columns is None or n in file.columns]
    # Not a file of Python's: Arrow reads ahead in a thread, and one that is in Python at exit hangs or ends the process.
    with pa.OSFile(os.fsencode(file.path)) as source:
        try:
            batches = csv_bytes(
                source, names, delimiter, bad_rows, skip_rows=1, block_bytes=_TEXT_BLOCK, wanted=wanted,
                newlines_in_values=delimiter == ",", ignore_empty_lines=len(names) > 1,  # of one column, a missing value
            )  # fmt: skip
            for batch in batches:
                yield _parsed(file, batch, row), min(1.0, source.tell() / size)
                row += batch.num_rows
        except pa.ArrowInvalid as error:
            if bad_rows:
                bad = bad_rows[0]
                raise InputError(
                    f"{file.path}, line {bad.number}, columns", bad.actual_columns, f"{bad.expected_columns}, as line 1 has"
                ) from error
            if not row - 1 and "Empty CSV file" in str(error):
                return  # a header alone: told as any file without rows
            raise InputError(f"{file.path}, row {row} or later", str(error), f"rows of {len(names)} columns") from error


def _parsed(file: RowFile, batch: pa.RecordBatch, first_row: int) -> pa.Table:
    arrays = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        convert, expected = parser(file.types.get(name, pa.string()), file.separators.get(name))

        def place(row: int, name: str = name) -> str:
            return file.place(name, first_row + row)

        arrays[name] = converted(converted(column, text, place, "UTF-8 text"), convert, place, expected)
    return pa.table(arrays)
