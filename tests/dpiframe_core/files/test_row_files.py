"""Files of rows: every format gives the same rows, in chunks, and what is wrong is named by file, row and column."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.files import row_files
from dpiframe_core.files.row_files import RowFile, column_names, iter_chunks, row_groups
from dpiframe_core.files.text_columns import csv_bytes

TYPES = {
    "city": pa.string(),
    "age": pa.int64(),
    "price": pa.float64(),
    "tags": pa.list_(pa.string()),
    "ids": pa.list_(pa.int64()),
}
SEPARATORS = {"tags": "|", "ids": "^"}
ROWS: list[dict[str, Any]] = [
    {"city": "Zürich, CH", "age": 3, "price": 0.5, "tags": ["a", "b"], "ids": [1, 2, 3], "note": "x"},
    {"city": None, "age": None, "price": None, "tags": None, "ids": None, "note": None},
    {"city": "two\nlines", "age": -(2**63), "price": -1e30, "tags": ["only"], "ids": [7], "note": "with \t tab"},
    {"city": 'say "hi"', "age": 2**63 - 1, "price": 7.0, "tags": ["", "b"], "ids": [0], "note": "z"},
]


def cell(name: str, value: Any) -> str:
    return "" if value is None else SEPARATORS[name].join(map(str, value)) if isinstance(value, list) else str(value)


def quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n') else text


def write(path: Path, rows: list[dict[str, Any]] = ROWS, **parquet: Any) -> Path:
    """The rows as the ending says, written without the code under test."""
    names = list(rows[0])
    match path.suffix:
        case ".csv":
            lines = [",".join(names), *(",".join(quoted(cell(n, r[n])) for n in names) for r in rows)]
        case ".tsv":
            lines = ["\t".join(names), *("\t".join(cell(n, r[n]) for n in names) for r in rows)]
        case ".jsonl":
            lines = [json.dumps(r) for r in rows]
        case _:
            pq.write_table(table_of(rows), path, **parquet)
            return path
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table({n: pa.array([r[n] for r in rows], TYPES.get(n, pa.string())) for n in rows[0]})


def read(path: Path, chunk_rows: int = 100, **options: Any) -> pa.Table:
    file = RowFile(path, **({"types": TYPES, "separators": SEPARATORS} | options))
    return pa.concat_tables([chunk.table for chunk in iter_chunks(file, chunk_rows)]).combine_chunks()


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet", ".jsonl"])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_every_format_gives_the_same_rows_in_the_same_types(tmp_path: Path, ending: str, chunk_rows: int) -> None:
    rows = ROWS if ending != ".tsv" else [{k: v for k, v in r.items() if k not in ("city", "note")} for r in ROWS]
    path = write(tmp_path / f"rows{ending}", rows)
    assert column_names(RowFile(path)) == list(rows[0])
    assert read(path, chunk_rows).equals(table_of(rows))


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_chunks_are_numbered_and_full_but_for_the_last(tmp_path: Path, ending: str) -> None:
    rows = [{"age": i, "price": i / 2} for i in range(25)]
    path = write(tmp_path / f"rows{ending}", rows, **({"row_group_size": 7} if ending == ".parquet" else {}))
    chunks = list(iter_chunks(RowFile(path, TYPES), 10))
    assert [(c.first_row, c.table.num_rows) for c in chunks] == [(1, 10), (11, 10), (21, 5)]
    assert [c.table["age"][0].as_py() for c in chunks] == [0, 10, 20]
    assert 0 < chunks[0].done <= chunks[1].done <= chunks[2].done == 1


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_only_the_wanted_columns_are_read(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"rows{ending}")
    assert read(path, columns=("note", "age")).equals(table_of([{"age": r["age"], "note": r["note"]} for r in ROWS]))


def test_row_groups_are_read_apart_from_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", [{"age": i} for i in range(10)], row_group_size=4)
    assert row_groups(RowFile(path)) == [4, 4, 2]
    (chunk,) = iter_chunks(RowFile(path), 100, (1, 2), 5)
    assert (chunk.first_row, chunk.table["age"].to_pylist()) == (5, [4, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_an_empty_line_of_a_file_of_one_column_is_a_missing_value(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    path.write_text("age\n1\n\n3\n\n")
    assert read(path)["age"].to_pylist() == [1, None, 3, None]


def test_json_rows_may_leave_keys_out_and_lie_between_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"age": 1, "note": null}\n\n{"note": null}\n{"age": null, "note": null}\n')
    assert read(path).to_pydict() == {"age": [1, None, None], "note": [None] * 3}
    assert read(path).schema.field("note").type == pa.string()


def test_json_numbers_beyond_any_integer_type_are_floats_where_floats_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"price": 100000000000000000000000}\n{"price": 9007199254740993}\n')
    assert read(path)["price"].to_pylist() == [1e23, 9007199254740992.0]


BAD = [
    ("a.csv", "age,note\n1,x\nten,y\n", "a.csv, row 2, column age: got 'ten', expected a 64-bit integer or nothing"),
    ("a.csv", "age,note\n1,x\n0x1f,y\n", "a.csv, row 2, column age: got '0x1f', expected a 64-bit integer or nothing"),
    ("a.csv", "price\n1\n2\n1,5\n", "a.csv, line 4, columns: got 2, expected 1, as line 1 has"),
    ("a.csv", "price\n1e3\n-\n", "a.csv, row 2, column price: got '-', expected a number or nothing"),
    (
        "a.csv",
        "ids,age\n1^2,1\n3^x,2\n",
        r"row 2, column ids: got '3\^x', expected a 64-bit integer or nothing, or several",
    ),
    ("a.csv", "age,age\n1,2\n", r"a.csv, columns: got \['age'\], expected distinct names"),
    ("a.csv", "", "a.csv, line 1: got 'nothing', expected the names of the columns"),
    ("a.csv", "age\n", "a.csv, rows: got 0, expected at least one"),
    ("a.csv", b"city\nok\n\xff\n", "a.csv, row 2, column city: got .*, expected UTF-8 text"),
    ("a.tsv", "age\tnote\n1\tx\n1\n", "a.tsv, line 3, columns: got 1, expected 2, as line 1 has"),
    ("a.jsonl", '{"age": 1}\n{"age": "1"}\n', "a.jsonl, row 2, column age: got '1', expected an integer or null"),
    ("a.jsonl", '{"age": 1}\n{"age": true}\n', "a.jsonl, row 2, column age: got True, expected an integer or null"),
    ("a.jsonl", '{"age": 1}\n{"age": 1.5}\n', "a.jsonl, row 2, column age: got 1.5, expected an integer or null"),
    (
        "a.jsonl",
        '{"age": 1}\n{"age": 18446744073709551616}\n',
        "row 2, column age: got 18446744073709551616, expected what",
    ),
    ("a.jsonl", '{"tags": ["a"]}\n{"tags": "a"}\n', "row 2, column tags: got 'a', expected a list, each value text or null"),
    ("a.jsonl", '{"tags": ["a"]}\n{"tags": [1]}\n', r"row 2, column tags: got \[1\], expected a list, each value text or null"),
    ("a.jsonl", '{"age": 1}\n[1]\n', r"a.jsonl, row 2: got '\[1\]', expected a JSON object on one line"),
    ("a.jsonl", '{"age": 1}\n{"age": \n', "a.jsonl, row 2: got .*, expected a JSON object on one line"),
    ("a.jsonl", '{"age": 1}\n{"aeg": 1}\n', "a.jsonl, row 2: got 'aeg', expected the keys of row 1, or some of them"),
    ("a.jsonl", "", "a.jsonl, row 1: got '', expected a JSON object"),
    ("a.jsonl", '{"note": 1}\n{"note": "x"}\n', "a.jsonl, row 1, column note: got 1, expected values of one type"),
    ("a.csv", "age,note\r1,x\r2,y\r", "a.csv, line 1: got .*, expected names of columns: UTF-8 text, lines that end in LF"),
    ("a.jsonl", '{"age": 1}\n' + "[" * 100_000 + "\n", "a.jsonl, row 2: got .*, expected a JSON object on one line"),
    ("a.parquet", b"PAR1 not really", "a.parquet: got .*, expected a readable Parquet file"),
    ("a.txt", "age\n1\n", "input: got '.*a.txt', expected a file whose name ends in .csv, .tsv, .parquet, .jsonl"),
]


def read_checked(path: Path) -> None:
    column_names(RowFile(path, TYPES, SEPARATORS))
    read(path)


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)])
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        read_checked(path)


def test_a_type_that_changes_in_a_later_chunk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"note": n}) + "\n" for n in [1, 2, 3, "x"]))
    with pytest.raises(InputError, match=r"a.jsonl, row 4, column note: got 'x', expected what fits in int64"):
        read(path, 2)


def test_a_parquet_file_that_is_damaged_inside_is_told_where(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"age": i, "city": str(i)} for i in range(1000)], row_group_size=100)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2 - 500
    data[middle : middle + 900] = bytes(900)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a.parquet, row \d+ or later: got .*, expected an intact Parquet file"):
        read(path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input: got '.*no.csv', expected a file that exists"):
        RowFile(tmp_path / "no.csv")


@pytest.mark.bulk
@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_arrows_memory_does_not_grow_with_the_file(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that Arrow holds at a time, for a file and for one four times as long. One row group, the worst there is."""
    monkeypatch.setattr(row_files, "_TEXT_BLOCK", 1 << 16)  # so that the shorter file has more than Arrow reads ahead
    peaks = []
    for rows in (100_000, 400_000) if ending == ".jsonl" else (400_000, 1_600_000):
        table = pa.table({"age": pa.array(range(rows)), "price": pa.array(range(rows), pa.float64())})
        path = tmp_path / f"rows{ending}"
        if ending == ".parquet":
            pq.write_table(table, path, row_group_size=rows, use_dictionary=False)
        elif ending == ".csv":
            pa.csv.write_csv(table, path)
        else:
            path.write_text("".join(f'{{"age": {i}, "price": {i}.5}}\n' for i in range(rows)))
        del table
        before, peak, seen = pa.total_allocated_bytes(), 0, 0
        for chunk in iter_chunks(RowFile(path, TYPES), 4096):
            seen += chunk.table.num_rows
            peak = max(peak, pa.total_allocated_bytes() - before)
        assert seen == rows
        peaks.append(peak)
    assert peaks[1] <= peaks[0] + (1 << 20) < 16 * 400_000


def test_arrow_reads_a_csv_by_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # It reads ahead in a thread. By a file of Python's that thread was in Python at exit, and one process in twenty hung.
    read = []

    def noted(source: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(source)
        return csv_bytes(source, *args, **kwargs)

    monkeypatch.setattr(row_files, "csv_bytes", noted)
    list(iter_chunks(RowFile(write(tmp_path / "rows.csv")), 10))
    assert [type(source) for source in read] == [pa.OSFile]
