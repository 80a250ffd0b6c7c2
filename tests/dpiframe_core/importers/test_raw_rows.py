"""Raw rows to compare on are read by the rules of `dpiframe score`: the same types, splitters, missing values and words."""

import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table
from dpiframe_core.importers.raw_rows import read_rows


def schema_of(splitter="^"):
    ids = {"values": "int", "encoder": Identity(), "table": "t"}
    features = (
        Categorical(name="item", **ids),
        Categorical(name="seen", max_values=3, missing_id=-1, splitter=splitter, **ids),
        Numeric(name="age"),
    )
    return FeatureSchema(features=features, tables=(Table(name="t", rows=300, dim=4),))


LINES = [["item", "seen", "age", "label", "note"], ["260.0", "1^2", "0.5", "1", "x"], ["", "", "", "0", "y"]]


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_text_becomes_the_features_types(tmp_path, ending, separator):
    path = tmp_path / f"rows.{ending}"
    path.write_text("".join(separator.join(line) + "\n" for line in LINES))
    columns, labels = read_rows(path, schema_of(), "label")
    assert columns == {"item": [260, None], "seen": [[1, 2], None], "age": [0.5, None]}
    assert labels.tolist() == [1, 0]
    assert read_rows(path, schema_of(), "click")[1] is None


def test_json_lines_hold_lists(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"item": 1, "seen": [1, 2], "age": 3}\n')
    assert read_rows(path, schema_of(None), None)[0] == {"item": [1], "seen": [[1, 2]], "age": [3.0]}


def test_missing_values_of_a_single_column_are_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("age\n1\n\n3\n")
    schema = FeatureSchema(features=(Numeric(name="age"),))
    assert read_rows(path, schema, None)[0] == {"age": [1.0, None, 3.0]}


@pytest.mark.parametrize(
    ("splitter", "content", "message"),
    [
        ("^", "item,seen,age\nx,1,2\n", r"rows\.csv, row 1, column item: got 'x', expected a 64-bit integer or nothing"),
        ("^", "item,age\n1,2\n", r"rows\.csv: got '1 columns missing', expected one for each of seen"),
        ("^", "item,seen,age\n", r"rows\.csv, rows: got 0, expected at least one"),
        (None, "item,seen,age\n1,1,2\n", r"rows\.csv: seen: got 'text', expected lists, of Parquet or JSON lines, as the sch"),
    ],
)
def test_what_cannot_be_read_is_told_as_for_any_file_of_rows(tmp_path, splitter, content, message):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_rows(path, schema_of(splitter), None)
