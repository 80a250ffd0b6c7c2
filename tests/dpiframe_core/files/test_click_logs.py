"""Click-log readers: what is read is what the file says, and what breaks the format is named by file, line and column."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.files.click_logs import CRITEO, iter_batches, read_table

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the click-log samples are not beside this checkout")

# label, I1..I13, C1..C26; row 1 has a missing and a negative integer, a missing value at the end
ROWS = [
    ["0", "1", "-3", "0", "", "1382", "4", "15", "2", "181", "1", "2", "", "2", *(f"{i:08x}" for i in range(25)), "a458ea53"],
    ["1", "", "-1", "44", "1", "102", "8", "2", "2", "4", "1", "1", "", "4", *(f"{i:08x}" for i in range(25)), ""],
    ["0", "9223372036854775807", "-2", "", "", "", "", "", "", "", "", "", "", "", *([""] * 25), "3f1c88a2"],
]


def write(path, rows=ROWS, sep="\t", end="\n"):
    path.write_bytes("".join(sep.join(row) + end for row in rows).encode())
    return path


def changed(line, column, value):
    rows = [list(row) for row in ROWS]
    rows[line - 1][CRITEO.columns.index(column)] = value
    return rows


def expected_values(row, columns=CRITEO.columns):
    """A row as Python objects, by the format's description alone: the first 14 columns are integers, empty is missing."""
    return [None if v == "" else int(v) if c == "label" or c.startswith("I") else v for v, c in zip(row, columns, strict=True)]


def as_rows(table):
    return [list(row.values()) for row in table.to_pylist()]


def test_a_criteo_file_is_read_cell_by_cell_with_nulls_and_negative_integers(tmp_path):
    table = read_table(write(tmp_path / "train.txt"))
    assert table.column_names == ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    assert set(table.schema.types[:14]) == {pa.int64()}
    assert set(table.schema.types[14:]) == {pa.string()}
    assert as_rows(table) == [expected_values(row) for row in ROWS]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_compression_line_ends_and_a_missing_last_line_end_change_nothing(tmp_path, end, packed):
    path = write(tmp_path / "any_name", end=end)
    data = path.read_bytes().removesuffix(end.encode())
    path.write_bytes(gzip.compress(data) if packed else data)
    assert as_rows(read_table(path)) == [expected_values(row) for row in ROWS]


def test_a_file_of_several_gzip_members_is_read_whole(tmp_path):
    data = write(tmp_path / "train.txt").read_bytes()
    path = tmp_path / "train.gz"
    path.write_bytes(gzip.compress(data) + gzip.compress(data))
    assert read_table(path).num_rows == 2 * len(ROWS)


def test_a_test_file_without_labels_gives_a_table_without_labels(tmp_path):
    table = read_table(write(tmp_path / "test.txt", [row[1:] for row in ROWS]))
    assert as_rows(table) == [expected_values(row)[1:] for row in ROWS]


def test_the_headered_comma_separated_form_may_write_integers_as_pandas_does(tmp_path):
    rows = [list(CRITEO.columns), *changed(2, "I3", "260.0")]
    rows[1][CRITEO.columns.index("I3")] = "-1.0"
    table = read_table(write(tmp_path / "sample.csv", rows, ","))
    assert table["I3"].to_pylist() == [-1, 260, None]
    assert table["I1"].to_pylist() == [1, None, 2**63 - 1]


def test_blocks_hold_the_rows_once_and_in_order(tmp_path):
    rows = [[str(i % 2), str(i), *ROWS[0][2:]] for i in range(500)]
    path = write(tmp_path / "train.txt", rows)
    batches = list(iter_batches(path, block_bytes=4096))
    assert len(batches) > 10
    assert [v for b in batches for v in b["I1"].to_pylist()] == list(range(500))
    assert {b.schema for b in batches} == {read_table(path).schema}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(2, "I3", "4x"), "line 2, column I3: got '4x', expected a 64-bit integer or nothing"),
        (changed(3, "I13", "1.5"), "line 3, column I13: got '1.5', expected a 64-bit integer or nothing"),
        (changed(1, "I2", "0x1f"), "line 1, column I2: got '0x1f', expected a 64-bit integer or nothing"),
        (changed(1, "I2", "9223372036854775808"), "column I2: got '9223372036854775808', expected a 64-bit integer or nothing"),
        (changed(1, "I2", "nan"), "line 1, column I2: got 'nan', expected a 64-bit integer or nothing"),
        (changed(2, "label", "2"), "line 2, column label: got 2, expected 0 or 1"),
        (changed(2, "label", ""), "line 2, column label: got null, expected 0 or 1"),
        ([*ROWS, ROWS[0][:-1]], "line 4, columns: got 39, expected 40, as Criteo has"),
        ([*ROWS, [*ROWS[0], "x"]], "line 4, columns: got 41, expected 40, as Criteo has"),
        ([ROWS[0][:7]], "line 1, columns: got 7, expected 40, as Criteo has (a test file: 39)"),
        ([*ROWS, [""], ROWS[0]], "line 4: got 'an empty line', expected 40 columns"),
        ([[""]], "line 1: got 'an empty line', expected a click log in Criteo's format"),
        ([row[1:] for row in ROWS] + [[""]], "line 4: got 'an empty line', expected 39 columns"),
    ],
)
def test_a_line_that_breaks_the_format_is_named(tmp_path, rows, message):
    path = write(tmp_path / "train.txt", rows)
    with pytest.raises(InputError) as error:
        read_table(path)
    assert str(error.value).startswith(f"{path}, ")
    assert message in str(error.value)


@pytest.mark.parametrize("fault", ["cell", "columns"])
def test_line_numbers_count_from_the_top_of_the_file_in_any_block(tmp_path, fault):
    rows = [list(CRITEO.columns), *(ROWS * 100)]
    rows[250] = [*rows[250][:5], "?", *rows[250][6:]] if fault == "cell" else rows[250][:-2]
    path = write(tmp_path / "sample.csv", rows, ",")
    with pytest.raises(InputError, match=r"sample.csv, line 251, column(s: got 38| I5: got '\?'), expected"):
        list(iter_batches(path, block_bytes=2048))


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = write(tmp_path / "train.txt")
    path.write_bytes(path.read_bytes().replace(b"3f1c88a2", b"3f1c\xff8a2"))
    with pytest.raises(InputError, match=r"line 3, column C26: got b'3f1c\\xff8a2', expected UTF-8 text"):
        read_table(path)


@pytest.mark.parametrize("left", [5, 12, 400])
def test_a_gzip_file_cut_short_is_refused(tmp_path, left):
    rng = np.random.default_rng(0)
    rows = [["0", *map(str, rng.integers(0, 10**6, 13)), *(f"{v:08x}" for v in rng.integers(0, 2**32, 26))] for _ in range(50)]
    whole = gzip.compress(write(tmp_path / "train.txt", rows).read_bytes())
    path = tmp_path / "train.gz"
    for cut in (left, len(whole) - left):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"train.gz, line 1.*: got '.*[Tt]runcated.*', expected an intact file"):
            read_table(path)


def test_other_files_are_refused_by_what_they_are(tmp_path):
    with pytest.raises(InputError, match=r"none.txt: got 'no such file', expected a click log in Criteo's format"):
        read_table(tmp_path / "none.txt")
    path = tmp_path / "train.csv"
    path.write_text(",".join(CRITEO.columns) + "\n")
    with pytest.raises(InputError, match=r"train.csv, line 2: got 'the end of the file', expected at least one row"):
        read_table(path)


@needs_samples
def test_the_real_criteo_sample_is_read_as_python_reads_it():
    path = SAMPLES / "criteo_sample.csv"
    header, *lines = (line.split(",") for line in path.read_text().splitlines())
    expected = [
        [None if v == "" else v if c.startswith("C") else int(float(v)) for c, v in zip(header, line, strict=True)]
        for line in lines
    ]
    table = read_table(path)
    assert as_rows(table) == expected
    assert len(expected) == 200
    assert min(v for v in table["I2"].to_pylist() if v is not None) < 0
