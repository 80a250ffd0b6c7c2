"""Candidates in every form that a Python caller has them: the same rows as from columns, or a refusal by name."""

import re
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.features.candidate_columns import candidate_columns, encoded_candidates
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table

SCHEMA = FeatureSchema(
    features=(
        Categorical(name="item", values="int", encoder=Identity(), table="t", missing_id=9),
        Categorical(name="site", encoder=Hash(buckets=10), table="t", missing_id=9),
        Categorical(name="tags", encoder=Hash(buckets=10), table="t", max_values=3, missing_id=-1),
        Numeric(name="price", missing_value=-1.0),
    ),
    tables=(Table(name="t", rows=10, dim=2),),
)
COLUMNS: dict[str, list[Any]] = {
    "item": [1, None, 3],
    "site": ["a", "b", None],
    "tags": [["x"], None, ["y", "z"]],
    "price": [0.5, None, 2.0],
}
ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]


def encoded(candidates: Any) -> bytes:
    return Encoder(SCHEMA, {}).encode(candidate_columns(candidates)).buffer.tobytes()


def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {
            "item": pandas.array(COLUMNS["item"], dtype="Int64"), "site": COLUMNS["site"], "tags": COLUMNS["tags"],
            "price": COLUMNS["price"],
        },
        index=[7, 3, 3],
    )  # fmt: skip


def test_every_form_is_the_same_request() -> None:
    wanted = Encoder(SCHEMA, {}).encode(COLUMNS).buffer.tobytes()
    table = pa.table(COLUMNS)
    for form in (COLUMNS, ROWS, tuple(ROWS), table, table.to_batches()[0], pa.concat_tables([table[:1], table[1:]])):
        assert encoded(form) == wanted
    shuffled = [dict(reversed(row.items())) for row in ROWS]
    assert encoded([ROWS[0], *shuffled[1:]]) == wanted


def test_a_frame_of_pandas_is_the_same_request_whatever_its_index_and_its_kind_of_null() -> None:
    made, wanted = frame(), Encoder(SCHEMA, {}).encode(COLUMNS).buffer.tobytes()
    assert encoded(made) == wanted
    assert encoded(made.assign(site=made["site"].astype("category"))) == wanted
    assert encoded(made.assign(price=made["price"].astype(object))) == wanted
    assert encoded(made.assign(site=made["site"].astype(object))) == wanted
    assert encoded(made[["price", "tags", "site", "item"]]) == wanted


def test_a_frame_of_polars_or_whatever_gives_an_arrow_stream_is_the_same_request() -> None:
    wanted = Encoder(SCHEMA, {}).encode(COLUMNS).buffer.tobytes()
    assert encoded(pa.RecordBatchReader.from_batches(pa.table(COLUMNS).schema, pa.table(COLUMNS).to_batches())) == wanted
    polars = pytest.importorskip("polars")
    made = polars.DataFrame(COLUMNS)
    assert encoded(made) == encoded(polars.concat([made[:1], made[1:]], rechunk=False)) == wanted
    for kind in (polars.Categorical, polars.Enum(["a", "b"])):
        assert encoded(made.with_columns(polars.col("site").cast(kind))) == wanted
    with pytest.raises(InputError, match=r"^candidates\.price\[1\]: got nan, expected a finite number or null"):
        encoded(made.with_columns(price=polars.Series([0.5, float("nan"), 2.0])))


def test_dictionaries_that_arrow_does_not_join_are_read_all_the_same() -> None:
    chunks = [pa.array(words).dictionary_encode() for words in (["a", "b"], [None])]
    chunks[1] = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array([None], pa.string()))
    with pytest.raises(pa.ArrowException):
        pa.chunked_array(chunks).combine_chunks()
    wanted = Encoder(SCHEMA, {}).encode(COLUMNS).buffer.tobytes()
    assert encoded(pa.table(COLUMNS | {"site": pa.chunked_array(chunks)})) == wanted


def test_integers_with_gaps_are_floats_in_a_frame_and_are_taken_if_they_are_whole() -> None:
    made, gaps = frame(), [1, None, 3]
    whole = made.assign(item=np.array([1.0, np.nan, 3.0]))
    assert encoded(whole) == Encoder(SCHEMA, {}).encode(COLUMNS | {"item": gaps}).buffer.tobytes()
    for value, shown in ((2.5, "2.5"), (2.0**53, "9007199254740992.0"), (-np.inf, "-inf")):
        with pytest.raises(InputError, match=rf"candidates\.item\[1\]: got {re.escape(shown)}, expected an integer of 64 bits"):
            encoded(made.assign(item=np.array([1.0, value, 3.0])))


def test_a_float32_that_stands_for_several_integers_is_refused() -> None:
    table = pa.table(COLUMNS).set_column(0, "item", pa.array([1.0, 2.0**24, None], pa.float32()))
    with pytest.raises(InputError, match=r"candidates\.item\[1\]: got 16777216\.0, expected an integer of 64 bits or null"):
        encoded(table)


def test_floats_of_numpy_are_no_integers() -> None:
    with pytest.raises(InputError, match=r"candidates\.item\[0\]: got 1\.0, expected an integer of 64 bits or null"):
        Encoder(SCHEMA, {}).encode(COLUMNS | {"item": np.array([1.0, 2.0, 3.0])})


def frame_of(**columns: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "candidates: got [], expected at least one candidate"),
        (lambda: [{"item": 1}, 3], "candidates[1]: got 3, expected a dict of feature values"),
        (lambda: [3], "candidates[0]: got 3, expected a dict of feature values"),
        (lambda: [*ROWS, {k: v for k, v in ROWS[0].items() if k != "site"}],
         "candidates[3].site: got nothing, expected the features of candidates[0] in every candidate"),
        (lambda: [*ROWS, ROWS[0] | {"other": 1}],
         "candidates[3].other: got a value, expected the features of candidates[0] in every candidate"),
        (lambda: "item",
         "candidates: got a str, expected columns by feature, a list of dicts, or an Arrow, pandas or polars table"),
        (lambda: None, "candidates: got a NoneType, expected columns by feature"),
        (lambda: pa.chunked_array([[1]]), "candidates: got "),
        (lambda: pa.table([[1], [2]], names=["item", "item"]), "candidates: got two columns item, expected one for each"),
        (lambda: pa.table(COLUMNS | {"other": [1, 2, 3]}), "candidates: got 'other', expected a feature of the model"),
        (lambda: pa.table(COLUMNS).drop_columns(["tags"]), "candidates.tags: got nothing, expected the feature: of every"),
        (lambda: frame_of(item=[1]).rename(columns={"item": 5}), "candidates: got 5, expected names of features"),
        (lambda: frame_of(item=[1, "a"]), "candidates.item: got "),
        (lambda: frame().assign(price=datetime(2026, 1, 1)), "candidates.price: got 'timestamp["),
    ],
)  # fmt: skip
def test_what_is_no_table_of_the_features_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        encoded(make())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": 10}, "candidates[1].item: got 10, expected an id from 0 to 9"),
        ({"item": "x"}, "candidates[1].item: got 'x', expected an integer of 64 bits or null"),
        ({"tags": ["a", 7]}, "candidates[1].tags[1]: got 7, expected text or null"),
        ({"price": "dear"}, "candidates[1].price: got 'dear', expected a finite number or null"),
    ],
)
def test_what_is_wrong_with_a_value_of_a_row_is_told_by_its_place_in_the_rows(change: Any, message: str) -> None:
    rows = [ROWS[0], ROWS[1] | change, ROWS[2]]
    encode = Encoder(SCHEMA, {}).encode
    with pytest.raises(InputError) as caught:
        encoded_candidates(encode, rows, {})
    assert str(caught.value).startswith(message)
    with pytest.raises(InputError, match=rf"^candidates\.{next(iter(change))}\[1\]"):
        encoded_candidates(encode, {name: [row[name] for row in rows] for name in COLUMNS}, {})


@pytest.mark.parametrize("context", [[("age", 1)], "age", None])
def test_a_context_that_is_no_mapping_is_refused(context: Any) -> None:
    with pytest.raises(
        InputError, match=rf"^context: got a {type(context).__name__}, expected a mapping of features to values$"
    ):
        encoded_candidates(Encoder(SCHEMA, {}).encode, ROWS, context)
