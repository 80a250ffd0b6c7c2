"""Null, empty and unknown values: what the schema says, or a refusal by the value's place; how the schema's calls refuse."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.schema import (
    Bucketize,
    Categorical,
    FeatureSchema,
    Hash,
    Identity,
    Log,
    Numeric,
    Table,
    Vocabulary,
)  # fmt: skip
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.files.table_rows import TableEncoder
from kernels.runtime import c_build

NULL = "got null, expected a value, as the schema gives no missing_id for null"
EMPTY = "expected at least one value, as the schema gives no missing_id for an empty list"
UNKNOWN = "expected a value of the vocabulary, as the schema gives no oov_id for others"
NUMBER = "got null, expected a number, as the schema does not say what null means"
TEXTS = VocabularyTable.of({"a": 3, "b": 7})
ENCODERS: dict[str, dict[str, Any]] = {
    "text": {"encoder": Vocabulary()},
    "integers": {"encoder": Vocabulary(), "values": "int"},
    "hash": {"encoder": Hash(buckets=10)},
    "integer hash": {"encoder": Hash(buckets=10), "values": "int"},
    "identity": {"encoder": Identity(), "values": "int"},
}


@pytest.fixture(params=["c", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways through the readers: all columns in C, and one after the other."""
    if request.param == "numpy":
        monkeypatch.setattr(c_build, "request_extension", lambda: None)


def encoder(*features: Categorical | Numeric) -> Encoder:
    tables = [Table(name=f.table, rows=10, dim=2) for f in features if f.table is not None]
    known = {
        f.name: TEXTS if f.values == "string" else VocabularyTable.of({5: 3, 6: 7})
        for f in features
        if isinstance(f, Categorical) and isinstance(f.encoder, Vocabulary)
    }
    return Encoder(FeatureSchema(features=features, tables=tuple(tables)), known)


def category(name: str = "user", **fields: Any) -> Categorical:
    return Categorical(**{"name": name, "table": name} | fields)


def refusal(made: Encoder, candidates: dict[str, Any], context: dict[str, Any] | None = None) -> str:
    with pytest.raises(InputError) as caught:
        made.encode(candidates, context or {})
    assert caught.value.status == 422
    return str(caught.value)


def value(kind: str) -> Any:
    return "a" if ENCODERS[kind].get("values", "string") == "string" else 5


@pytest.mark.parametrize("kind", ENCODERS)
def test_null_is_refused_by_its_place_unless_the_schema_says_what_it_means(kind: str) -> None:
    known, made = value(kind), encoder(category(**ENCODERS[kind]))
    for column in ([known, None], (known, None), pa.array([known, None]), pa.chunked_array([[known], [None]])):
        assert refusal(made, {"user": column}) == f"candidates.user[1]: {NULL}"
    assert made.encode({"user": [known, known]}).rows == 2
    told = encoder(category(**ENCODERS[kind], missing_id=9))
    assert told.encode({"user": [known, None]}).wide_ids("candidate_ids")[1].tolist() == [9]


@pytest.mark.parametrize("kind", ENCODERS)
def test_null_in_the_context_is_refused_too(kind: str) -> None:
    made = encoder(category(**ENCODERS[kind], scope="context"), Numeric(name="price"))
    assert refusal(made, {"price": [1.0]}, {"user": None}) == f"context.user: {NULL}"


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_null_or_empty_list_is_refused_and_a_null_within_one(kind: str) -> None:
    known, made = value(kind), encoder(category(**ENCODERS[kind], max_values=3))
    assert refusal(made, {"user": [[known], []]}) == f"candidates.user[1]: got [], {EMPTY}"
    assert refusal(made, {"user": [[known], None]}) == f"candidates.user[1]: got null, {EMPTY}"
    assert refusal(made, {"user": [[known], [known, None]]}) == f"candidates.user[1][1]: {NULL}"
    assert refusal(made, {"user": pa.array([[known], None])}) == f"candidates.user[1]: got null, {EMPTY}"
    told = encoder(category(**ENCODERS[kind], max_values=3, missing_id=-1))
    assert told.encode({"user": [[known], []]}).wide_ids("candidate_ids")[1].tolist() == [-1, -1, -1]


def test_text_that_the_schema_calls_padding_is_null_and_named_as_it_came() -> None:
    made = encoder(category(encoder=Vocabulary(), max_values=3, splitter="^", padding_value="-"))
    assert refusal(made, {"user": ["a^b", "a^-"]}) == (
        "candidates.user[1][1]: got '-', expected a value, as the schema gives no missing_id for null"
    )


@pytest.mark.parametrize("kind", ["text", "integers"])
def test_an_unknown_value_is_refused_unless_the_schema_says_what_it_reads(kind: str) -> None:
    known, made = value(kind), encoder(category(**ENCODERS[kind]))
    unknown = known * 7
    for column in ([known, unknown], pa.array([known, unknown])):
        assert refusal(made, {"user": column}) == f"candidates.user[1]: got {unknown!r}, {UNKNOWN}"
    told = encoder(category(**ENCODERS[kind], oov_id=9))
    assert told.encode({"user": [known, unknown]}).wide_ids("candidate_ids").tolist() == [[3], [9]]


def test_only_the_feature_that_says_nothing_refuses_among_columns_read_together() -> None:
    told = category("told", encoder=Vocabulary(), missing_id=1, oov_id=2)
    made = encoder(told, category(encoder=Vocabulary()))
    both = {"told": [None, "zzz"], "user": ["a", "b"]}
    assert made.encode(both).wide_ids("candidate_ids").tolist() == [[1, 3], [2, 7]]
    assert refusal(made, both | {"user": ["a", None]}) == f"candidates.user[1]: {NULL}"
    assert refusal(made, both | {"user": ["a", "c"]}) == f"candidates.user[1]: got 'c', {UNKNOWN}"


def test_a_null_number_is_refused_unless_the_schema_says_what_it_becomes() -> None:
    made = encoder(Numeric(name="told", missing_value=4.0), Numeric(name="age"), Numeric(name="log", transforms=(Log(),)))
    plain = {"told": [None, 1.0], "age": [2.0, 3.0], "log": [0.0, 0.0]}
    np.testing.assert_array_equal(made.encode(plain).candidate_dense, [[4, 2, 0], [1, 3, 0]])
    assert refusal(made, plain | {"age": [2.0, None]}) == f"candidates.age[1]: {NUMBER}"
    assert refusal(made, plain | {"log": pa.array([None, 2.0])}) == f"candidates.log[0]: {NUMBER}"
    bucketed = encoder(Numeric(name="hour", transforms=(Bucketize(boundaries=(6.0, 9.0), first_id=1),), table="hour"))
    assert refusal(bucketed, {"hour": [7.0, None]}) == f"candidates.hour[1]: {NUMBER}"
    assert bucketed.encode({"hour": [7.0, 1.0]}).wide_ids("candidate_ids").tolist() == [[2], [1]]


def test_an_encoded_list_without_ids_is_refused_by_its_row_where_nothing_stands_for_it() -> None:
    made = TableEncoder(encoder(category(**ENCODERS["identity"], max_values=2)), encoded=True)
    with pytest.raises(InputError) as caught:
        made.encode(pa.table({"user": [[1], []]}), lambda name, row: f"row {row + 1}, column {name}")
    assert str(caught.value) == f"row 2, column user: got [], {EMPTY}"


def test_ids_out_of_range_are_refused_in_encoded_requests_unless_a_row_is_named_for_them() -> None:
    reader = PreencodedReader(encoder(category(**ENCODERS["identity"])).schema)
    with pytest.raises(InputError, match=r"candidate_ids\[1, 0\]: got 10, expected an id of user from 0 to 9"):
        reader.block({"candidate_ids": np.array([[1], [10]])})


def test_buckets_of_a_table_of_as_many_rows_need_no_first_id() -> None:
    hashed = encoder(category(encoder=Hash(buckets=10)))
    ids = hashed.encode({"user": [f"{i}" for i in range(500)]}).wide_ids("candidate_ids")
    assert sorted(set(ids[:, 0].tolist())) == list(range(10))
    nine = Numeric(name="hour", transforms=(Bucketize(boundaries=tuple(range(9))),), table="hour")
    assert encoder(nine).encode({"hour": [-1.0, 0.0, 8.0]}).wide_ids("candidate_ids").tolist() == [[0], [1], [9]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hash(buckets=0), "Hash.buckets: got 0, expected greater than or equal to 1"),
        (lambda: Hash(), "Hash.buckets: got nothing, expected a value"),
        (lambda: Hash(buckets=2, salt=1), "Hash.salt: got 1, expected no such key"),
        (lambda: category(encoder=Identity()), "features.user.values: got 'string', expected 'int' for an identity encoder"),
        (lambda: category(encoder=Identity(out_of_range="oov"), values="int"),
         "features.user.oov_id: got none, expected one, as out_of_range is 'oov'"),
        (lambda: encoder(category(encoder=Hash(buckets=8))),
         "features.user.table: got 10 rows for 8 buckets, expected first_id, the first bucket's id"),
        (lambda: encoder(category(encoder=Hash(buckets=9, first_id=2))),
         "features.user.table: got 10 rows, expected more than the last hash bucket's id, 10"),
        (lambda: encoder(Numeric(name="n", transforms=(Bucketize(boundaries=(1.0,)),), table="n")),
         "features.n.table: got 10 rows for 2 buckets, expected first_id, the first bucket's id"),
        (lambda: Log(offset=-1.0), "Log: got minimum 0.0 + offset -1.0, expected a sum above 0"),
        (lambda: category(name="a b", encoder=Vocabulary()), "Categorical.name: got 'a b', expected text of the pattern"),
    ],
)  # fmt: skip
def test_a_call_with_a_bad_value_is_refused_in_the_words_of_the_commands(make: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
