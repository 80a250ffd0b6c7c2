"""Raw values of encoded rows: they encode to the same rows again, where an encoder can be turned around."""

from typing import Any

import numpy as np
import pytest

from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.examples import raw_example
from dpiframe_core.features.schema import (
    Bucketize,
    Categorical,
    FeatureSchema,
    Hash,
    Identity,
    Log,
    MinMax,
    Numeric,
    Standardize,
    Table,
    Vocabulary,
)  # fmt: skip
from dpiframe_core.features.vocabulary import VocabularyTable

WORDS = VocabularyTable.of({"a": 2, "b": 3, "c": 9, "same": 2})
SCHEMA = FeatureSchema(
    features=(
        Categorical(name="user", scope="context", values="int", encoder=Identity(), table="t"),
        Categorical(name="item", values="int", encoder=Identity(), table="t"),
        Categorical(name="word", encoder=Vocabulary(), table="t", missing_id=1, oov_id=0),
        Categorical(name="seen", values="int", encoder=Identity(), table="t", max_values=3, missing_id=-1, padding_value=0),
        Numeric(name="price", transforms=(Log(offset=2.0), Standardize(mean=3.0, std=2.0)), missing_value=0.0),
        Numeric(name="rate", transforms=(MinMax(minimum=-5.0, maximum=15.0),)),
        Numeric(name="hour", transforms=(Bucketize(boundaries=(6.0, 12.5, 18.0), first_id=3),), table="t"),
        Numeric(name="age", scope="context"),
    ),
    tables=(Table(name="t", rows=10, dim=2),),
)
COLUMNS: dict[str, list[Any]] = {
    "item": [0, 9, 4], "word": ["c", None, "a"], "seen": [[5, 6], [], [1]], "price": [0.0, 7.25, 1000.0],
    "rate": [-5.0, 1.5, 15.0], "hour": [1.0, 12.5, 99.0],
}  # fmt: skip


def test_values_encode_to_the_rows_that_they_were_made_of() -> None:
    encoder = Encoder(SCHEMA, {"word": WORDS})
    block = encoder.encode(COLUMNS, {"user": 7, "age": 31.5})
    made = raw_example(SCHEMA, block, {"word": WORDS})
    assert made is not None
    assert made["context"] == {"user": 7, "age": 31.5}
    assert made["candidates"]["word"] == ["c", None, "a"]
    assert made["candidates"]["hour"] == [5.0, 12.5, 18.0]
    again = encoder.encode(made["candidates"], made["context"])
    assert again.wide_ids("candidate_ids").tolist() == block.wide_ids("candidate_ids").tolist()
    np.testing.assert_allclose(again.candidate_dense, block.candidate_dense, rtol=1e-5, atol=1e-6)


def test_only_the_first_rows_are_taken_and_the_context_of_the_first() -> None:
    encoder = Encoder(SCHEMA, {"word": WORDS})
    block = encoder.encode({n: v * 4 for n, v in COLUMNS.items()} | {"user": list(range(8)) + [0] * 4, "age": [2.0] * 12})
    made = raw_example(SCHEMA, block, {"word": WORDS})
    assert made is not None
    assert made["context"] == {"user": 0, "age": 2.0}
    assert [len(v) for v in made["candidates"].values()] == [5] * 6


@pytest.mark.parametrize("values", ["string", "int"])
def test_what_no_value_encodes_to_is_another_legal_value(values: Any) -> None:
    known = WORDS if values == "string" else VocabularyTable.of({50: 2})
    features = (
        Categorical(name="hash", values=values, encoder=Hash(buckets=10), table="t"),
        Categorical(name="word", values=values, encoder=Vocabulary(), table="t"),
        Categorical(name="words", values=values, encoder=Vocabulary(file="word"), table="t", max_values=2),
    )
    schema = FeatureSchema(features=features, tables=SCHEMA.tables)
    column = ["a", "a"] if values == "string" else [50, 50]
    encoder = Encoder(schema, {"word": known})
    block = encoder.encode({"hash": column, "word": column, "words": [[v] for v in column]})
    block.set_ids("candidate_ids", np.array([[4, 8, -1, -1], [4, 8, 8, -1]]))
    made = raw_example(schema, block, {"word": known})
    assert made is not None
    assert encoder.encode(made["candidates"]).rows == 2
    assert raw_example(schema, block, {"word": VocabularyTable.of({})}) is None
