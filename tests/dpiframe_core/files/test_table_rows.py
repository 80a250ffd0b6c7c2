"""Tables of rows become the blocks that the encoder makes of the same values, or hold them already; faults are named."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Bucketize, Log
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.files.table_rows import TableEncoder, column_types, missing_features
from kernels.lookup.batch_header import HeaderWord

SCHEMA = FeatureSchema(
    features=(
        Categorical(name="city", encoder=Vocabulary(), table="city", scope="context", missing_id=0, oov_id=1),
        Categorical(name="site", encoder=Hash(buckets=30, first_id=2), table="site", missing_id=0),
        Categorical(name="user", encoder=Hash(buckets=70, first_id=2), table="user", values="int", missing_id=0),
        Categorical(name="slot", encoder=Identity(), table="slot", values="int", oov_id=0, missing_id=0),
        Categorical(
            name="tags", encoder=Hash(buckets=9, first_id=2), table="tags", max_values=3, missing_id=-1, too_many="keep_first"
        ),
        Categorical(name="seen", encoder=Identity(), table="slot", values="int", max_values=2, missing_id=4, oov_id=0),
        Numeric(name="hour", transforms=(Bucketize(boundaries=(6.0, 12.0, 18.0), first_id=1),), table="hour", missing_id=0),
        Numeric(name="price", transforms=(Log(),), missing_value=-1.0),
    ),
    tables=tuple(Table(name=n, rows=r, dim=2) for n, r in
                 (("city", 6), ("site", 32), ("user", 300), ("slot", 5), ("tags", 11), ("hour", 5))),
)  # fmt: skip
ENCODER = Encoder(SCHEMA, {"city": VocabularyTable.of({"a": 2, "b": 3, "": 4})})
RAW: dict[str, list[Any]] = {
    "city": ["a", None, "b", "?", "a"], "site": ["x", "y", None, "x", "é"], "user": [5, -(2**63), None, 5, 0],
    "slot": [0, 4, None, 2, 1], "tags": [["p", "q"], None, [], ["p", "p", "q", "r"], ["r"]],
    "seen": [[1], [2, 3], None, [], [0]], "hour": [5.9, 6.0, None, 23.0, 12.0], "price": [0.0, 3.5, None, -9.0, 1e9],
}  # fmt: skip


def place(column: str, row: int) -> str:
    return f"f.csv, row {row + 10}, column {column}"


def table_of(columns: dict[str, list[Any]] = RAW, **types: pa.DataType) -> pa.Table:
    kinds = column_types(SCHEMA) | types
    return pa.table({name: pa.array(values, kinds.get(name)) for name, values in columns.items()})


def assert_equal(got: RowBlock, want: RowBlock) -> None:
    assert (got.buffer == want.buffer).all()
    assert got.buffer.size == want.buffer.size


@pytest.mark.parametrize("city", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
@pytest.mark.parametrize("user", [pa.int64(), pa.dictionary(pa.int32(), pa.int64())], ids=str)
def test_a_table_is_encoded_as_lists_of_its_values_are(city: pa.DataType, user: pa.DataType) -> None:
    table = table_of(RAW | {"more": [1] * 5}, city=city, user=user)
    got = TableEncoder(ENCODER).encode(pa.concat_tables([table.slice(0, 2), table.slice(2)]), place)
    assert_equal(got, ENCODER.encode(RAW))
    assert got.oov_count == 1


def test_integers_with_gaps_may_be_floats_as_pandas_writes_them() -> None:
    floats = {"slot": pa.float64(), "seen": pa.list_(pa.float32())}
    assert_equal(TableEncoder(ENCODER).encode(table_of(**floats), place), ENCODER.encode(RAW))


def encoded() -> dict[str, list[Any]]:
    """What the encoder makes of RAW, as columns: bags without their padding."""
    block = ENCODER.encode(RAW)
    columns: dict[str, list[Any]] = {}
    for f in SCHEMA.features:
        values = block.column(SCHEMA.columns[f.name])
        if f.is_id:
            values = np.where(values == np.array(-1).astype(values.dtype), -1, values.astype(np.int64))
        rows = values.tolist()
        columns[f.name] = [[i for i in row if i != -1] for row in rows] if f.max_values > 1 else [row[0] for row in rows]
    return columns


@pytest.mark.parametrize("kind", [pa.int64(), pa.int16(), pa.uint8(), pa.uint64()], ids=str)
def test_encoded_columns_are_taken_as_they_are(kind: pa.DataType) -> None:
    ids = {f.name: pa.list_(kind) if f.max_values > 1 else kind for f in SCHEMA.features if f.is_id}
    columns = encoded()
    columns["seen"][2] = []  # nothing reads as missing does
    got = TableEncoder(ENCODER, encoded=True).encode(table_of(columns, **ids, price=pa.float32()), place)
    want = ENCODER.encode(RAW)
    want.header[HeaderWord.OOV_COUNT] = 0  # out-of-vocabulary values are not told from others any more
    assert_equal(got, want)


def test_padding_within_a_list_is_kept_out_of_the_way() -> None:
    columns = encoded() | {"tags": [[1, -1], [-1, -1, -1], [], [2, 3, 4], [-1, 5]]}
    got = TableEncoder(ENCODER, encoded=True).encode(table_of(columns, tags=pa.list_(pa.int64()), **INT), place)
    ids = got.column(SCHEMA.columns["tags"])
    assert np.where(ids == 255, -1, ids.astype(int)).tolist() == [[1, -1, -1], [-1] * 3, [-1] * 3, [2, 3, 4], [-1, 5, -1]]


INT = {"city": pa.int64(), "site": pa.int64(), "hour": pa.int64()}
FAULTS = [
    ("slot", [0, 9, 1, 1, 1], False, "f.csv, row 11, column slot: got 9, expected an id from 0 to 4"),
    ("seen", [[1], [1], [1, 7], None, []], False, r"f.csv, row 12, column seen\[1\]: got 7, expected an id from 0 to 4"),
    ("seen", [[1], [1, 2, 3], None, None, []], False, "f.csv, row 11, column seen: got 3, expected at most 2 values"),
    ("price", [0.0, 1.0, float("inf"), 0.0, 0.0], False, "row 12, column price: got inf, expected a finite number or null"),
    ("city", [1, 2, 3, 4, 5], False, "f.csv, row 10, column city: got 1, expected text or null"),
    ("slot", [0, 4, 5, 1, 1], True, "f.csv, row 12, column slot: got 5, expected an id from 0 to 4"),
    ("slot", [0, 4, -1, 1, 1], True, "f.csv, row 12, column slot: got -1, expected an id from 0 to 4"),
    ("slot", [0, None, 1, 1, 1], True, "f.csv, row 11, column slot: got null, expected an id from 0 to 4"),
    ("slot", [0.5, 1.0, 1.0, 1.0, 1.0], True, "f.csv, row 10, column slot: got 0.5, expected an integer of 64 bits"),
    ("seen", [[1], [1], [1, 5], [], []], True, r"f.csv, row 12, column seen\[1\]: got 5, expected an id from -1 to 4"),
    ("seen", [[1], [1, 2, 3], [], [], []], True, "f.csv, row 11, column seen: got 3, expected at most 2 ids"),
    ("hour", [1, 2, 3, 4, 5], True, "f.csv, row 14, column hour: got 5, expected an id from 0 to 4"),
    (
        "price",
        [0.0, None, 0.0, 0.0, 0.0],
        True,
        "row 11, column price: got null, expected a number, already transformed",
    ),
]


@pytest.mark.parametrize(("name", "values", "is_encoded", "message"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_a_bad_value_is_named_by_row_and_column(name: str, values: list[Any], is_encoded: bool, message: str) -> None:
    table = table_of(encoded() if is_encoded else RAW, **(INT | {"tags": pa.list_(pa.int64())} if is_encoded else {}))
    table = table.set_column(table.column_names.index(name), name, pa.array(values))
    with pytest.raises(InputError, match=message):
        TableEncoder(ENCODER, is_encoded).encode(table, place)


def test_missing_columns_are_named() -> None:
    assert missing_features(SCHEMA, ["price", "x", "city", "site", "user", "slot", "tags"]) == ["seen", "hour"]
    with pytest.raises(InputError, match="expected columns for the features seen, hour"):
        TableEncoder(ENCODER).encode(table_of().drop(["hour", "seen"]), place)
