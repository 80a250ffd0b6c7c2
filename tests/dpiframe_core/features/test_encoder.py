"""`Encoder` against a slow reading of `schema`'s documentation, value by value, and the text of every refusal."""

import bisect
import contextlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.errors import BundleError, InputError
from dpiframe_core.features.encoder import Encoder
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

TEXTS = {"a": 2, "b": 3, "naïve": 4, "": 5, "same": 2}
NUMBERS = {0: 3, 7: 2, -(2**63): 4, 2**63 - 1: 5}


def categorical(name: str = "C", **fields: Any) -> Categorical:
    return Categorical(**{"name": name, "encoder": Vocabulary(), "table": name, "missing_id": 0, "oov_id": 1} | fields)


def encoder(*features: Categorical | Numeric, rows: int = 10, vocabularies: Mapping[str, Any] | None = None) -> Encoder:
    """Each table read has `rows` rows, but for a number's own table, of one; vocabularies fit the kind of values."""
    tables = {}
    for f in features:
        for name in (f.table, f.first_order_table):
            if name is not None:
                one_row = isinstance(f, Numeric) and f.buckets is None
                tables[name] = Table(name=name, rows=1 if one_row else rows, dim=1)
    known = {
        f.encoder.file or f.name: VocabularyTable.of(TEXTS if f.values == "string" else NUMBERS)
        for f in features
        if isinstance(f, Categorical) and isinstance(f.encoder, Vocabulary)
    }
    return Encoder(FeatureSchema(features=features, tables=tuple(tables.values())), known | dict(vocabularies or {}))


def ids(feature: Categorical | Numeric, column: Any, rows: int = 10) -> list[list[int]]:
    return encoder(feature, rows=rows).encode({feature.name: column}).wide_ids("candidate_ids").tolist()


def numbers(column: Any, **fields: Any) -> np.ndarray:
    return encoder(Numeric(**{"name": "I", "missing_value": 0.0} | fields)).encode({"I": column}).candidate_dense[:, 0]


def refusal(feature: Categorical | Numeric, column: Any, **context: Any) -> str:
    with pytest.raises(InputError) as caught:
        encoder(feature).encode({feature.name: column}, context)
    assert caught.value.status == 422
    return str(caught.value)


# Ids ------------------------------------------------------------------------------------------------------------------


def slow_id(f: Categorical, value: Any) -> int:
    if value is None:
        return f.missing_id
    if isinstance(f.encoder, Vocabulary):
        known = TEXTS if f.values == "string" else NUMBERS
        return known.get(value, f.oov_id)
    if isinstance(f.encoder, Identity):
        return value if 0 <= value < 10 else f.oov_id
    return f.encoder.first_id + murmur3(str(value).encode(), f.encoder.seed) % f.encoder.buckets


def murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32, from its published description."""
    h, mask = seed, 2**32 - 1

    def mixed(k: int) -> int:
        k = k * 0xCC9E2D51 & mask
        return ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask

    blocks = len(data) // 4 * 4
    for i in range(0, blocks, 4):
        h ^= mixed(int.from_bytes(data[i : i + 4], "little"))
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= mixed(int.from_bytes(data[blocks:], "little"))
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


text = st.one_of(st.none(), st.sampled_from(list(TEXTS)), st.text(st.characters(codec="utf-8"), max_size=9))
integer = st.one_of(st.none(), st.sampled_from([*NUMBERS, *range(-2, 12)]), st.integers(-(2**63), 2**63 - 1))
ENCODERS = {
    "text vocabulary": (Vocabulary(), "string"),
    "integer vocabulary": (Vocabulary(), "int"),
    "text hash": (Hash(buckets=7, first_id=3, seed=2**32 - 1), "string"),
    "integer hash": (Hash(buckets=8, first_id=2), "int"),
    "identity": (Identity(out_of_range="oov"), "int"),
}


@pytest.mark.parametrize("kind", ENCODERS)
@given(data=st.data())
def test_each_encoder_gives_the_documented_id(kind: str, data: st.DataObject) -> None:
    how, values = ENCODERS[kind]
    column = data.draw(st.lists(text if values == "string" else integer, min_size=1, max_size=20))
    f = categorical(encoder=how, values=values, missing_id=9, oov_id=8)
    block = encoder(f).encode({"C": column})
    assert block.wide_ids("candidate_ids")[:, 0].tolist() == [slow_id(f, v) for v in column]
    known: Any = TEXTS if values == "string" else NUMBERS if isinstance(how, Vocabulary) else range(10)
    assert block.oov_count == (0 if isinstance(how, Hash) else sum(v is not None and v not in known for v in column))


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("rule", ["keep_first", "keep_last"])
@given(data=st.data())
def test_bags_are_cut_by_the_rule_and_padded_with_minus_one(kind: str, rule: Any, data: st.DataObject) -> None:
    how, values = ENCODERS[kind]
    value = text if values == "string" else integer
    column = data.draw(st.lists(st.none() | st.lists(value, max_size=6), min_size=1, max_size=8))
    f = categorical(encoder=how, values=values, max_values=3, too_many=rule, missing_id=data.draw(st.sampled_from([-1, 0])))
    expected = []
    for bag in column:
        kept = (bag or [None])[:3] if rule == "keep_first" else (bag or [None])[-3:]
        expected.append([slow_id(f, v) for v in kept] + [-1] * (3 - len(kept)))
    assert ids(f, column) == expected
    arrow = pa.array(column, pa.list_(pa.string() if values == "string" else pa.int64()))
    assert ids(f, arrow) == expected
    assert ids(f, pa.chunked_array([arrow[:1], arrow[1:]])) == expected
    assert ids(f, tuple(() if b is None else tuple(b) for b in column)) == expected


# Test vectors published with MurmurHash3 implementations (x86, 32 bits): bytes as text, seed, hash.
PUBLISHED = [
    ("", 0, 0x00000000), ("", 1, 0x514E28B7), ("", 0xFFFFFFFF, 0x81F16F39), ("test", 0, 0xBA6BD213),
    ("Hello, world!", 0, 0xC0363E43), ("Hello, world!", 0x9747B28C, 0x24884CBA), ("a", 0x9747B28C, 0x7FA09EA6),
    ("aa", 0x9747B28C, 0x5D211726), ("aaa", 0x9747B28C, 0x283E0130), ("aaaa", 0x9747B28C, 0x5A97808A),
    ("abc", 0x9747B28C, 0xC84A62DD), ("ππππππππ", 0x9747B28C, 0xD58063C1),
    ("The quick brown fox jumps over the lazy dog", 0x9747B28C, 0x2FA826CD),
]  # fmt: skip


@pytest.mark.parametrize(("value", "seed", "expected"), PUBLISHED)
def test_hash_is_murmur3_x86_32(value: str, seed: int, expected: int) -> None:
    f = categorical(encoder=Hash(buckets=2**32, seed=seed, first_id=0))
    assert ids(f, [value], rows=2**32) == [[expected]]
    assert murmur3(value.encode(), seed) == expected


def test_integers_are_hashed_as_decimal_text() -> None:
    hashed = Hash(buckets=1000, first_id=2)
    as_text = ids(categorical(encoder=hashed), ["-12", "0", "9223372036854775807"], rows=1002)
    assert ids(categorical(encoder=hashed, values="int"), [-12, 0, 2**63 - 1], rows=1002) == as_text


def test_ids_beyond_int32_survive() -> None:
    f = categorical(encoder=Identity(), values="int")
    assert ids(f, [2**31, 2**40 - 1, None], rows=2**40) == [[2**31], [2**40 - 1], [0]]


def test_a_bucket_starts_at_its_boundary() -> None:
    f = Numeric(name="I", transforms=(Log(), Bucketize(boundaries=(0.0, 1.0, 2.0), first_id=4)), missing_id=3, table="I")
    assert ids(f, [0, math.e - 1, 1, math.e**2, None, -5]) == [[5], [6], [5], [7], [3], [5]]


@given(st.lists(st.none() | st.floats(-100, 100), min_size=1), st.lists(st.floats(-100, 100), min_size=1, unique=True))
def test_buckets_count_the_boundaries_at_or_below(column: list[float | None], boundaries: list[float]) -> None:
    f = Numeric(name="I", transforms=(Bucketize(boundaries=tuple(sorted(boundaries)), first_id=1),), table="I", missing_id=0)
    expected = [0 if x is None else 1 + bisect.bisect_right(sorted(boundaries), x) for x in column]
    assert ids(f, column, rows=200) == [[i] for i in expected]


def test_the_smaller_of_two_tables_bounds_identity_ids() -> None:
    f = categorical(encoder=Identity(out_of_range="oov"), values="int", first_order_table="W")
    schema = FeatureSchema(features=(f,), tables=(Table(name="C", rows=9, dim=4), Table(name="W", rows=5, dim=1)))
    assert Encoder(schema, {}).encode({"C": [4, 5, 8]}).wide_ids("candidate_ids").tolist() == [[4], [1], [1]]


def test_two_features_share_a_vocabulary_by_naming_its_file() -> None:
    features = (
        categorical("A", encoder=Vocabulary(file="words")),
        categorical("B", encoder=Vocabulary(file="words"), oov_id=9),
    )
    block = encoder(*features).encode({"A": ["a", "?"], "B": ["?", "b"]})
    assert block.wide_ids("candidate_ids").tolist() == [[2, 9], [1, 3]]
    assert block.oov_count == 2


def test_an_empty_vocabulary_knows_nothing() -> None:
    empty = VocabularyTable(pa.table({"value": pa.array([], pa.int64()), "id": pa.array([], pa.int64())}))
    block = encoder(categorical(values="int"), vocabularies={"C": empty}).encode({"C": [0, -2, None]})
    assert block.wide_ids("candidate_ids").tolist() == [[1], [1], [0]]


# Numbers --------------------------------------------------------------------------------------------------------------

finite = st.floats(-1e6, 1e6)


@given(st.lists(st.none() | finite | st.integers(-(10**6), 10**6), min_size=1), finite, st.floats(1e-3, 1e3), st.booleans())
def test_transforms_are_the_documented_formulas_in_float64(column: list[Any], mean: float, std: float, clip: bool) -> None:
    chain = (
        Log(offset=2.0, minimum=-1.0),
        Standardize(mean=mean, std=std),
        MinMax(minimum=-std, maximum=std, clip=clip),
    )
    got = numbers(column, transforms=chain, missing_value=-7.5)
    expected = []
    for x in column:
        y = math.inf if x is None else ((math.log(max(x, -1.0) + 2.0) - mean) / std + std) / (2 * std)
        expected.append(-7.5 if x is None else min(max(y, 0.0), 1.0) if clip else y)
    # The formulas run in float64: what is left is one rounding to float32, and float64's own (log may differ by one ulp).
    np.testing.assert_allclose(got, expected, rtol=2.0**-24 * 1.001, atol=1e-9)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_a_number_without_transforms_keeps_its_bits(column: list[float]) -> None:
    expected = np.array(column, np.float32).view(np.int32)
    for form in (column, np.array(column), np.array(column, np.float32), pa.array(column), pa.array(column, pa.float32())):
        np.testing.assert_array_equal(numbers(form).view(np.int32), expected)


# Forms of columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", ">i4", "int64", "uint64", "O"])
def test_integer_arrays_of_any_width_are_integers(dtype: str) -> None:
    column = np.array([7, 0, 12], dtype)
    assert ids(categorical(values="int"), column) == [[2], [3], [1]]
    assert ids(categorical(values="int", max_values=3), column.reshape(1, 3)) == [[2, 3, 1]]
    assert numbers(column).tolist() == [7, 0, 12]


@pytest.mark.parametrize("dtype", ["float16", ">f4", "float32", "float64", "longdouble", "O"])
def test_float_arrays_of_any_width_are_numbers(dtype: str) -> None:
    assert numbers(np.array([0.5, -2.0], dtype)).tolist() == [0.5, -2.0]


@pytest.mark.parametrize(
    "column",
    [
        np.array(["a", "?"]),
        np.array(["a", "?"], "O"),
        np.array(["a", "?"], np.dtypes.StringDType()),
        pa.array(["a", "?"]),
        pa.array(["a", "?"], pa.large_string()),
        pa.array(["a", "?"], pa.string_view()),
        pa.array(["a", "?"]).dictionary_encode(),
        pa.chunked_array([["a"], ["?"]]),
        pa.chunked_array([pa.array(["a"]).dictionary_encode(), pa.array(["?"]).dictionary_encode()]),
        ("a", "?"),
        [np.str_("a"), "?"],
    ],
)
def test_text_comes_in_many_forms(column: Any) -> None:
    assert ids(categorical(), column) == [[2], [1]]


@pytest.mark.parametrize(
    "column",
    [
        [None, 7],
        np.array([None, 7], "O"),
        np.ma.masked_array([5, 7], [True, False]),
        pa.array([None, 7]),
        pa.array([3, None, 7], pa.uint16())[1:],
        pa.array([None, 7]).dictionary_encode(),
        [None, np.int8(7)],
    ],
)
def test_null_is_missing_in_every_form(column: Any) -> None:
    assert ids(categorical(values="int", missing_id=6), column) == [[6], [2]]
    assert numbers(column, missing_value=0.25).tolist() == [0.25, 7]


def test_a_column_of_nulls_alone_is_missing() -> None:
    for column in ([None, None], pa.nulls(2), pa.array([None, None], pa.string())):
        assert ids(categorical(missing_id=6), column) == [[6], [6]]
    assert numbers(pa.nulls(2), missing_value=3.0).tolist() == [3, 3]


@pytest.mark.parametrize(
    "bags",
    [
        [np.array([7, 0]), None, []],
        np.array([[7, 0], None, []], "O"),
        pa.array([[7, 0], None, []]),
        pa.array([[7, 0], None, []], pa.large_list(pa.int32())),
        [pa.array([7, 0]), None, ()],
    ],
)
def test_bags_come_in_many_forms(bags: Any) -> None:
    assert ids(categorical(values="int", max_values=2, missing_id=-1), bags) == [[2, 3], [-1, -1], [-1, -1]]


def test_a_fixed_size_list_may_hold_null_rows() -> None:
    column = pa.array([[7, 0], None, [0, None]], pa.list_(pa.int64(), 2))
    assert ids(categorical(values="int", max_values=2), column) == [[2, 3], [0, -1], [3, 0]]


def test_bags_that_are_all_empty_are_missing() -> None:
    for column in ([[], []], np.zeros((2, 0)), pa.array([[], []], pa.list_(pa.float64()))):
        assert ids(categorical(max_values=2), column) == [[0, -1], [0, -1]]


def test_the_callers_arrays_are_left_alone() -> None:
    column, bags, number = np.array([3, -1, 4]), np.array([[1, -1], [11, 2], [3, 3]]), np.array([1.0, 2.0, 3.0])
    before = column.copy(), bags.copy(), number.copy()
    for array in (column, bags, number):
        array.flags.writeable = False
    identity = Identity(out_of_range="oov")
    encode = encoder(
        categorical("A", encoder=identity, values="int"),
        categorical("B", encoder=identity, values="int", max_values=2),
        Numeric(name="I", transforms=(Log(),), missing_value=0.0),
    ).encode
    encode({"A": column, "B": bags, "I": number})
    for array, copy in zip((column, bags, number), before, strict=True):
        np.testing.assert_array_equal(array, copy)


# Requests -------------------------------------------------------------------------------------------------------------

USER = categorical("user", scope="context", encoder=Hash(buckets=8, first_id=2))
AGE = Numeric(name="age", scope="context", missing_value=0.0)
ITEM = categorical("item")
PRICE = Numeric(name="price", missing_value=0.0)
TAGS = categorical("tags", scope="context", max_values=2)
REQUEST = encoder(USER, AGE, ITEM, PRICE, TAGS)


def test_context_is_kept_once_per_request() -> None:
    block = REQUEST.encode({"item": ["a", "?", None], "price": [1, 2, 3]}, {"user": "u", "age": 30, "tags": ["b", "?"]})
    assert (block.rows, block.contexts, block.oov_count) == (3, 1, 2)
    assert block.request_of_row.tolist() == [0, 0, 0]
    assert block.wide_ids("context_ids")[:, 1:].tolist() == [[3, 1]]
    assert block.context_dense.tolist() == [[30]]
    assert block.wide_ids("candidate_ids").tolist() == [[2], [1], [0]]
    assert block.candidate_dense.tolist() == [[1], [2], [3]]


def test_a_candidate_feature_given_as_context_is_the_same_for_every_row() -> None:
    block = REQUEST.encode({"price": [1, 2]}, {"user": "u", "age": 30, "tags": None, "item": "?"})
    assert block.wide_ids("candidate_ids").tolist() == [[1], [1]]
    assert (block.contexts, block.oov_count) == (1, 2)


def test_a_context_number_that_overflows_is_named() -> None:
    with pytest.raises(InputError) as caught:
        REQUEST.encode({"item": ["a"], "price": [1]}, {"user": "u", "age": 1e39, "tags": None})
    assert str(caught.value) == f"context.age: got 1e+39, expected {FLOAT32}"


def test_a_context_feature_given_as_column_makes_every_row_its_own_context() -> None:
    block = REQUEST.encode({"item": ["a", "b"], "price": [1, 2], "age": [30, 40]}, {"user": "u", "tags": ["a"]})
    assert block.request_of_row.tolist() == [0, 1]
    assert block.context_dense.tolist() == [[30], [40]]
    assert block.wide_ids("context_ids")[:, 0].tolist() == [2 + murmur3(b"u", 0) % 8] * 2
    assert block.wide_ids("context_ids")[:, 1:].tolist() == [[2, -1], [2, -1]]


def test_numpy_scalars_are_values_of_the_context() -> None:
    block = REQUEST.encode(
        {"item": ["a"], "price": [1]}, {"user": np.str_("u"), "age": np.float32(2.5), "tags": np.array(["a", "b"])}
    )
    assert block.context_dense.tolist() == [[2.5]]
    assert block.wide_ids("context_ids")[0, 1:].tolist() == [2, 3]


@given(st.integers(1, 20), st.data())
def test_a_row_encodes_alike_alone_and_among_others(n: int, data: st.DataObject) -> None:
    columns = {"item": data.draw(st.lists(text, min_size=n, max_size=n)), "price": list(range(n))}
    context = {"user": data.draw(text), "age": None, "tags": [None]}
    whole = REQUEST.encode(columns, context)
    for i in range(n):
        alone = REQUEST.encode({name: column[i : i + 1] for name, column in columns.items()}, context)
        assert alone.buffer[64:].tobytes() == whole.part(i, i + 1).buffer[64:].tobytes()


# Refusals -------------------------------------------------------------------------------------------------------------

I64 = categorical(values="int")
BAG = categorical(max_values=2)
NUMBER = Numeric(name="I", missing_value=0.0)
SURROGATE = "\ud800"
HASHED = categorical(encoder=Hash(buckets=2, first_id=2))
IDENTITY = categorical(encoder=Identity(), values="int")
ARRAYS = "a NumPy array or an Arrow array, one entry per candidate"
FLOAT32 = "a number that stays finite in float32 after its transforms"


@pytest.mark.parametrize(
    ("feature", "column", "message"),
    [
        (categorical(), ["a", 7], "candidates.C[1]: got 7, expected text or null"),
        (categorical(), [b"a"], "candidates.C[0]: got b'a', expected text or null"),
        (categorical(), ["a", ["a"]], "candidates.C[1]: got ['a'], expected text or null"),
        (categorical(), ["a", None, math.nan], "candidates.C[2]: got nan, expected text or null"),
        (categorical(), np.array([3, 4]), "candidates.C[0]: got 3, expected text or null"),
        (categorical(), pa.array([3, 4]), "candidates.C[0]: got 3, expected text or null"),
        (categorical(), np.array([["a"]]), "candidates.C: got (1, 1), expected one dimension"),
        (I64, [7, True], "candidates.C[1]: got True, expected an integer of 64 bits or null"),
        (I64, [7, 1.0], "candidates.C[1]: got 1.0, expected an integer of 64 bits or null"),
        (I64, [None, "7"], "candidates.C[1]: got '7', expected an integer of 64 bits or null"),
        (I64, [7, None, 10**30], f"candidates.C[2]: got {10**30}, expected an integer of 64 bits or null"),
        (I64, [-(2**63) - 1], "candidates.C[0]: got -9223372036854775809, expected an integer of 64 bits or null"),
        (I64, [10**999], f"candidates.C[0]: got 1{'0' * 116}..., expected an integer of 64 bits or null"),
        (I64, [1, np.uint64(2**63)], f"candidates.C[1]: got np.uint64({2**63}), expected an integer of 64 bits or null"),
        (I64, [10**9999], "candidates.C[0]: got a int too long to show, expected an integer of 64 bits or null"),
        (I64, np.array([1, 2**63], np.uint64), f"candidates.C[1]: got {2**63}, expected an integer of 64 bits or null"),
        (I64, np.array([1.0]), "candidates.C[0]: got 1.0, expected an integer of 64 bits or null"),
        (I64, np.array([True]), "candidates.C[0]: got True, expected an integer of 64 bits or null"),
        (I64, pa.array([None, True]), "candidates.C[1]: got True, expected an integer of 64 bits or null"),
        (I64, pa.array([0.5, None]), "candidates.C[0]: got 0.5, expected an integer of 64 bits or null"),
        (I64, np.array(["2020-01-01"], "M8[ns]"), "candidates.C: got 'datetime64[ns]', expected text or numbers"),
        (I64, pa.array([1], pa.timestamp("ns")), "candidates.C: got 'timestamp[ns]', expected text or numbers"),
        (I64, [], "candidates.C: got 0, expected at least 1 value"),
        (I64, np.array([], int), "candidates.C: got 0, expected at least 1 value"),
        (I64, 7, f"candidates.C: got 7, expected a list, {ARRAYS}"),
        (I64, None, f"candidates.C: got null, expected a list, {ARRAYS}"),
        (I64, "77", f"candidates.C: got '77', expected a list, {ARRAYS}"),
        (I64, {"7": 7}, f"candidates.C: got {{'7': 7}}, expected a list, {ARRAYS}"),
        (I64, np.array(7), f"candidates.C: got array(7), expected a list, {ARRAYS}"),
        (IDENTITY, [9, None, 10], "candidates.C[2]: got 10, expected an id from 0 to 9"),
        (IDENTITY, [9, -1], "candidates.C[1]: got -1, expected an id from 0 to 9"),
        (HASHED, ["a", None, SURROGATE], r"candidates.C[2]: got '\ud800', expected text that UTF-8 can hold"),
        (BAG, [["a"], "a"], "candidates.C[1]: got 'a', expected a list of values or null"),
        (BAG, [["a"], None, 7], "candidates.C[2]: got 7, expected a list of values or null"),
        (BAG, [["a"], {"a": 1}], "candidates.C[1]: got {'a': 1}, expected a list of values or null"),
        (BAG, [np.array("a")], "candidates.C[0]: got 'a', expected a list of values or null"),
        (BAG, [["a"], [], ["b", ["a"]]], "candidates.C[2][1]: got ['a'], expected text or null"),
        (BAG, [["a", "b"], None, [7]], "candidates.C[2][0]: got 7, expected text or null"),
        (BAG, [["a"], ["a", "b", "c"]], "candidates.C[1]: got 3, expected at most 2 values"),
        (BAG, pa.array([["a"], ["a", "b", "c"]]), "candidates.C[1]: got 3, expected at most 2 values"),
        (BAG, ["a", "b"], "candidates.C[0]: got 'a', expected a list of values or null"),
        (BAG, np.array(["a", "b"]), "candidates.C[0]: got 'a', expected a list of values or null"),
        (BAG, np.array([1, 2]), "candidates.C: got (2,), expected two dimensions, or a list of values or null per entry"),
        (BAG, np.zeros((1, 1, 1)), "candidates.C: got (1, 1, 1), expected one dimension"),
        (NUMBER, [1, math.nan, math.nan], "candidates.I[1]: got nan, expected a finite number or null"),
        (NUMBER, [None, math.nan], "candidates.I[1]: got nan, expected a finite number or null"),
        (NUMBER, [None, -math.inf], "candidates.I[1]: got -inf, expected a finite number or null"),
        (NUMBER, np.array([0, math.inf]), "candidates.I[1]: got inf, expected a finite number or null"),
        (NUMBER, pa.array([None, math.nan]), "candidates.I[1]: got nan, expected a finite number or null"),
        (NUMBER, [0.5, "1"], "candidates.I[1]: got '1', expected a finite number or null"),
        (NUMBER, np.array(["1"]), "candidates.I[0]: got '1', expected a finite number or null"),
        (NUMBER, [0.5, False], "candidates.I[1]: got False, expected a finite number or null"),
        (NUMBER, [0.5, [1]], "candidates.I[1]: got [1], expected a finite number or null"),
        (NUMBER, [1j], "candidates.I[0]: got 1j, expected a finite number or null"),
        (NUMBER, [None, 10**400], f"candidates.I[1]: got 1{'0' * 116}..., expected a finite number or null"),
        (NUMBER, [1, None, 1e39], f"candidates.I[2]: got 1e+39, expected {FLOAT32}"),
        (NUMBER, np.zeros((2, 1)), "candidates.I: got (2, 1), expected one dimension"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_by_its_place(feature: Categorical | Numeric, column: Any, message: str) -> None:
    assert refusal(feature, column) == message


def test_a_number_may_overflow_in_between_only_if_the_result_is_finite() -> None:
    assert numbers([1e300], transforms=(Log(),)).tolist() == [np.float32(math.log(1e300))]
    steep = Numeric(
        name="I",
        transforms=(Standardize(mean=0, std=1e-300), Bucketize(boundaries=(0.0,), first_id=1)),
        table="I",
        missing_id=0,
    )
    assert refusal(steep, [1.0, 1e300]) == f"candidates.I[1]: got 1e+300, expected {FLOAT32}"


GOOD: dict[str, Any] = {"user": "u", "age": 1, "tags": ["a"]}
COLUMNS: dict[str, Any] = {"item": ["a", "b"], "price": [1, 2]}


@pytest.mark.parametrize(
    ("candidates", "context", "message"),
    [
        (COLUMNS, GOOD | {"user": 7}, "context.user: got 7, expected text or null"),
        (COLUMNS, GOOD | {"user": ["u"]}, "context.user: got ['u'], expected text or null"),
        (COLUMNS, GOOD | {"user": SURROGATE}, r"context.user: got '\ud800', expected text that UTF-8 can hold"),
        (COLUMNS, GOOD | {"age": "old"}, "context.age: got 'old', expected a finite number or null"),
        (COLUMNS, GOOD | {"tags": "a"}, "context.tags: got 'a', expected a list of values or null"),
        (COLUMNS, GOOD | {"tags": ["a", 7]}, "context.tags[1]: got 7, expected text or null"),
        (COLUMNS, GOOD | {"tags": ["a", "b", "c"]}, "context.tags: got 3, expected at most 2 values"),
        (COLUMNS, GOOD | {"size": 1}, "context: got 'size', expected a feature of the model"),
        (COLUMNS | {7: [1, 2]}, GOOD, "candidates: got 7, expected a feature of the model"),
        (COLUMNS | {"age": [1, 2]}, GOOD, "context.age: got 1, expected nothing, as candidates has a column of it"),
        (COLUMNS, {"user": "u", "tags": []},
         "context.age: got nothing, expected the feature: of every candidate in candidates, or once in context"),
        ({"price": [1]}, GOOD,
         "candidates.item: got nothing, expected the feature: of every candidate in candidates, or once in context"),
        ({}, GOOD | {"item": "a", "price": 1}, "candidates: got {}, expected at least one column"),
        ({"item": ["a"], "price": [1, 2]}, GOOD, "candidates.price: got 2, expected 1 values, as many as candidates.item"),
        ([["a"]], GOOD, "candidates: got [['a']], expected a mapping from feature names to values"),
        (COLUMNS, [1], "context: got [1], expected a mapping from feature names to values"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_by_path(candidates: Any, context: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        REQUEST.encode(candidates, context)
    assert str(caught.value) == message


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(SURROGATE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(json_like, json_like, st.dictionaries(st.sampled_from(list(GOOD)), json_like))
def test_whatever_json_holds_is_encoded_or_refused(item: Any, price: Any, context: dict[str, Any]) -> None:
    with contextlib.suppress(InputError):
        assert REQUEST.encode({"item": item, "price": price}, GOOD | context).rows == len(item)


@pytest.mark.parametrize(
    ("vocabularies", "message"),
    [
        ({}, "vocab/C.parquet: got nothing, expected the vocabulary of feature C"),
        ({"C": VocabularyTable.of({7: 2})}, "vocab/C.parquet: got int values, expected string for feature C"),
        (
            {"C": VocabularyTable.of({"a": 2, "b": 10})},
            "vocab/C.parquet: got id 10 for 'b', expected ids below 10 for feature C",
        ),
    ],
)
def test_an_encoder_refuses_a_vocabulary_that_does_not_fit(vocabularies: dict[str, VocabularyTable], message: str) -> None:
    with pytest.raises(BundleError) as caught:
        Encoder(FeatureSchema(features=(categorical(),), tables=(Table(name="C", rows=10, dim=1),)), vocabularies)
    assert str(caught.value) == message


def joined(**fields: Any) -> Categorical:
    options = {"max_values": 3, "missing_id": -1, "too_many": "keep_last", "splitter": "^", "padding_value": ""}
    return categorical(**(options | fields))


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["a^b", "a"], [[2, 3, -1], [2, -1, -1]]),
        (["", None], [[-1, -1, -1], [-1, -1, -1]]),
        (["a^^b"], [[2, -1, 3]]),  # what is empty keeps its place, as it counts among the values kept
        (["a^b^a^b"], [[3, 2, 3]]),
        (["a^zzz"], [[2, 1, -1]]),
        ([["a", ""], []], [[2, -1, -1], [-1, -1, -1]]),
        (["a^b", ["a", None]], [[2, 3, -1], [2, -1, -1]]),
    ],
)
def test_joined_text_is_a_list_and_its_padding_is_null(column: Any, expected: list[list[int]]) -> None:
    assert ids(joined(), column) == expected


def test_empty_joined_text_is_an_empty_list_whatever_the_padding_is() -> None:
    assert ids(joined(padding_value=None), ["", "a^zzz", "a"]) == [[-1, -1, -1], [2, 1, -1], [2, -1, -1]]
    assert ids(joined(padding_value="-", missing_id=0), ["", "a^-"]) == [[0, -1, -1], [2, 0, -1]]


def test_joined_integers_are_read_as_integers_and_other_text_is_refused_by_its_place() -> None:
    feature = joined(values="int", encoder=Identity(), splitter="|", padding_value=0)
    assert ids(feature, ["7|0|3", "", 5 * [4], None]) == [[7, -1, 3], [-1, -1, -1], [4, 4, 4], [-1, -1, -1]]
    with pytest.raises(InputError, match=r"candidates\.C\[1\]\[1\]: got 'x', expected an integer"):
        ids(feature, ["7", "1|x"])


def test_first_text_is_kept_where_the_feature_says_so() -> None:
    assert ids(joined(too_many="keep_first"), ["a^b^b^a"]) == [[2, 3, 3]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"splitter": "^"}, r"features\.C\.splitter: got '\^', expected none for a feature of one value"),
        ({"padding_value": ""}, r"features\.C\.padding_value: got '', expected none for a feature of one value"),
        ({"padding_value": 0, "max_values": 2}, r"features\.C\.padding_value: got 0, expected one of the kind string"),
        ({"first_order_table": "C", "first_order_pooling": "sum"}, r"features\.C\.first_order_pooling: got one for the table"),
    ],
)
def test_what_a_list_may_have_is_refused_elsewhere(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        categorical(**fields)
