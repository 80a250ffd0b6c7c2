"""Encoded requests: what lands in the block, and every rule of `PreencodedReader`, word for word."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table
from dpiframe_core.features.transforms import Bucketize

SCHEMA = FeatureSchema(
    features=(
        Categorical(name="user", scope="context", values="int", encoder=Identity(), table="wide", missing_id=0),
        Numeric(name="age", scope="context", missing_value=0.0),
        Categorical(name="item", values="int", encoder=Identity(out_of_range="oov"), table="wide", oov_id=5, missing_id=0),
        Categorical(name="tags", encoder=Hash(buckets=90, first_id=2), table="tiny", max_values=3, missing_id=0),
        Numeric(name="price", missing_value=0.0),
        Numeric(name="hour", transforms=(Bucketize(boundaries=(1.0, 2.0), first_id=1),), table="tiny", missing_id=0),
        Numeric(name="bias", missing_value=0.0),
    ),
    tables=(Table(name="wide", rows=70_000, dim=4), Table(name="tiny", rows=100, dim=4)),
)
READER = PreencodedReader(SCHEMA)
HUGE = PreencodedReader(
    FeatureSchema(
        features=(Categorical(name="id", values="int", encoder=Identity(), table="t", max_values=2, missing_id=0),),
        tables=(Table(name="t", rows=2**33, dim=1),),
    )
)

pytestmark = pytest.mark.usefixtures("both_ways")


def sections(rows: int = 3, dtype: Any = np.int32) -> dict[Any, np.ndarray[Any, Any]]:
    return {
        "context_ids": np.array([[69_999]], dtype),
        "context_dense": np.array([[0.5]], np.float32),
        "candidate_ids": np.array([[i, i + 1, -1, -1, 3] for i in range(rows)], dtype),
        "candidate_dense": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),
    }


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_sections_land_in_the_block(dtype: Any, own: bool) -> None:
    given = sections(3, dtype)
    if own:
        given["context_ids"] = np.array([[1], [2], [3]], dtype)
        given["context_dense"] = np.array([[1], [2], [3]], np.float32)
    block = READER.block(given)
    assert (block.rows, block.contexts, block.oov_count) == (3, 3 if own else 1, 0)
    assert block.request_of_row.tolist() == ([0, 1, 2] if own else [0, 0, 0])
    assert np.array_equal(block.wide_ids("context_ids"), given["context_ids"])
    assert np.array_equal(block.wide_ids("candidate_ids"), given["candidate_ids"])
    assert np.array_equal(block.context_dense, given["context_dense"])
    assert np.array_equal(block.candidate_dense, given["candidate_dense"])


def test_features_give_the_same_block_as_sections() -> None:
    given = sections(3)
    ids, dense = given["candidate_ids"], given["candidate_dense"]
    features = {
        "user": np.array([69_999]), "age": np.array([0.5]), "item": ids[:, 0], "tags": ids[:, 1:2], "price": dense[:, 0],
        "hour": ids[:, 4:], "bias": dense[:, 1],
    }  # fmt: skip
    assert np.array_equal(READER.features(features).buffer, READER.block(given).buffer)
    per_row = {**features, "user": np.array([1, 2, 3])}
    block = READER.features(per_row)
    assert block.contexts == 3
    assert block.wide_ids("context_ids")[:, 0].tolist() == [1, 2, 3]
    assert block.context_dense[:, 0].tolist() == [0.5] * 3


def test_the_ids_of_an_encoder_score_like_the_raw_values() -> None:
    encoder = Encoder(SCHEMA, {})
    raw = encoder.encode(
        {"item": [4, 5], "tags": [["a"], ["b", "c"]], "price": [1.0, 2.0], "hour": [0.5, 9.0], "bias": [0.0, 1.0]},
        {"user": 3, "age": 7.0},
    )
    again = READER.block(
        {
            "context_ids": raw.wide_ids("context_ids"), "candidate_ids": raw.wide_ids("candidate_ids"),
            "context_dense": raw.context_dense, "candidate_dense": raw.candidate_dense,
        }
    )  # fmt: skip
    assert np.array_equal(again.buffer, raw.buffer)


def test_an_identity_that_the_schema_lets_out_of_range_reads_its_stand_in_and_is_counted() -> None:
    given = sections(3)
    given["candidate_ids"][:, 0] = [70_000, -7, 69_999]
    block = READER.block(given)
    assert block.wide_ids("candidate_ids")[:, 0].tolist() == [5, 5, 69_999]
    assert block.oov_count == 2


REFUSED: list[tuple[str, Any, str]] = [
    ("context_ids", np.array([[70_000]]), "context_ids[0, 0]: got 70000, expected an id of user from 0 to 69999"),
    ("context_ids", np.array([[-1]]), "context_ids[0, 0]: got -1, expected an id of user from 0 to 69999"),
    ("context_ids", np.array([[-(2**63)]]), "context_ids[0, 0]: got -9223372036854775808, expected an id of user"),
    ("context_ids", np.array([[2**32]]), "context_ids[0, 0]: got 4294967296, expected an id of user"),
    ("context_ids", np.array([[1.0]]), "context_ids: got 'float64', expected int32 or int64"),
    ("context_ids", np.array([[1]], np.int16), "context_ids: got 'int16', expected int32 or int64"),
    ("context_ids", np.array([1]), "context_ids: got [1], expected shape [1 or n, 1]"),
    ("context_ids", np.array([[1, 2]]), "context_ids: got [1, 2], expected shape [1 or n, 1]"),
    ("context_ids", np.array([[1], [2]]), "context_dense: got 1, expected one row for all candidates, or 3"),
    ("context_ids", None, "context_ids: got null, expected shape [1 or n, 1]"),
    ("candidate_dense", np.zeros((3, 2)), "candidate_dense: got 'float64', expected float32"),
    ("candidate_dense", np.zeros((2, 2), np.float32), "candidate_dense: got 2, expected 3 rows"),
    ("candidate_dense", np.array([[0, 1], [2, np.nan], [3, 4]], np.float32),
     "candidate_dense[1, 1]: got nan, expected a finite number for bias"),
    ("candidate_dense", np.array([[0, 1], [2, 3], [-np.inf, 4]], np.float32),
     "candidate_dense[2, 0]: got -inf, expected a finite number for price"),
    ("candidate_ids", np.full((3, 5), 100), "candidate_ids[0, 1]: got 100, expected an id of tags from -1 to 99"),
    ("candidate_ids", np.array([[0, 0, 0, 0, -1]] * 3), "candidate_ids[0, 4]: got -1, expected an id of hour from 0 to 99"),
    ("candidate_ids", np.array([[0, -2, 0, 0, 0]] * 3), "candidate_ids[0, 1]: got -2, expected an id of tags from -1 to 99"),
    ("candidate_ids", np.zeros((0, 5), np.int32), "candidate_ids: got 0, expected 3 rows"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "values", "message"), REFUSED)
def test_a_section_that_breaks_a_rule_is_named(section: str, values: Any, message: str) -> None:
    given = sections(3)
    del given[section]  # type: ignore[arg-type]
    if values is not None:
        given[section] = values  # type: ignore[index]
    with pytest.raises(InputError) as caught:
        READER.block(given)
    assert str(caught.value).startswith(message)


def test_a_request_without_rows_is_refused() -> None:
    given = sections(3) | {"candidate_ids": np.zeros((0, 5), np.int32), "candidate_dense": np.zeros((0, 2), np.float32)}
    with pytest.raises(InputError, match=r"^candidate_ids: got 0, expected at least one row$"):
        READER.block(given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"colour": np.array([1])}, "inputs: got 'colour', expected a feature of the model"),
        ({"item": None}, "inputs.item: got null, expected the feature, as ids or numbers"),
        ({"item": np.zeros((3, 2), int)}, "inputs.item: got [3, 2], expected [3 or 1]"),
        ({"item": np.zeros(2, int)}, "inputs.item: got [2], expected [3 or 1]"),
        ({"item": np.zeros(0, int)}, "inputs.item: got [0], expected [3 or 1]"),
        ({"item": np.zeros((3, 0), int)}, "inputs.item: got [3, 0], expected [3 or 1]"),
        ({"tags": np.zeros((3, 4), int)}, "inputs.tags: got [3, 4], expected [3 or 1, 1 to 3]"),
        ({"tags": np.zeros((3, 1, 1), int)}, "inputs.tags: got [3, 1, 1], expected [3 or 1, 1 to 3]"),
        ({"item": np.zeros(3)}, "inputs.item: got 'float64', expected ids of int32 or int64"),
        ({"price": np.zeros(3, np.bool_)}, "inputs.price: got 'bool', expected float32"),
        ({"price": np.array([1, 1e300, 2])}, "candidate_dense[1, 0]: got inf, expected a finite number for price"),
        ({"user": np.array([70_000])}, "context_ids[0, 0]: got 70000, expected an id of user from 0 to 69999"),
    ],
)
def test_a_feature_that_breaks_a_rule_is_named(changed: dict[str, Any], message: str) -> None:
    features: dict[str, Any] = {
        "user": np.array([1]), "age": np.array([0.5]), "item": np.arange(3), "tags": np.zeros((3, 2), int),
        "price": np.zeros(3), "hour": np.zeros(3, int), "bias": np.zeros(3, np.float32),
    }  # fmt: skip
    features |= changed
    with pytest.raises(InputError) as caught:
        READER.features({name: values for name, values in features.items() if values is not None})
    assert str(caught.value) == message


@given(hnp.arrays(st.sampled_from([np.int32, np.int64]), (5, 1), elements={"min_value": -5, "max_value": 70_010}))
def test_exactly_the_rows_of_the_table_are_accepted(ids: np.ndarray[Any, Any]) -> None:
    given_sections = sections(5) | {"context_ids": ids, "context_dense": np.zeros((5, 1), np.float32)}
    if ((ids >= 0) & (ids < 70_000)).all():
        assert np.array_equal(READER.block(given_sections).wide_ids("context_ids"), ids)
    else:
        with pytest.raises(InputError, match=r"^context_ids\["):
            READER.block(given_sections)


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)] * 2), min_size=1, max_size=4))
def test_ids_beyond_32_bits_are_compared_as_they_are(ids: list[tuple[int, int]]) -> None:
    array = np.array(ids, np.int64)
    good = all(-1 <= one < 2**33 for pair in ids for one in pair)
    if good:
        assert HUGE.block({"candidate_ids": array}).wide_ids("candidate_ids").tolist() == array.tolist()
    else:
        with pytest.raises(InputError, match="expected an id of id from -1 to 8589934591"):
            HUGE.block({"candidate_ids": array})


@pytest.mark.parametrize("bad", [-2, -(2**31)])
def test_a_negative_id_of_32_bits_is_no_row_of_a_huge_table(bad: int) -> None:
    for ids in ([[0, bad]], [[bad, 0]]):
        with pytest.raises(InputError, match="expected an id of id from -1"):
            HUGE.block({"candidate_ids": np.array(ids, np.int32)})
    top = np.array([[2**31 - 1, -1]], np.int32)
    assert HUGE.block({"candidate_ids": top}).wide_ids("candidate_ids").tolist() == top.tolist()


def test_finite_numbers_whose_sum_is_not_are_accepted() -> None:
    given = sections(3)
    given["candidate_dense"][:] = 3e38
    assert (READER.block(given).candidate_dense == np.float32(3e38)).all()
