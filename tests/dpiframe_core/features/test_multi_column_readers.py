"""The fast way through the encoders gives the same bits as the careful one, and leaves to it whatever is not plain."""

from enum import Enum
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.packed_column import ARRAYS
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Log, MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable
from kernels.runtime import c_build

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="without C every value goes the careful way")

KNOWN = {"a": 2, "b": 3, "ö": 4}
TRANSFORMS = [
    (),
    (Log(), Standardize(mean=1.5, std=0.7)),
    (Log(offset=3, minimum=-2), Standardize(mean=-1, std=3)),
    (MinMax(minimum=-1, maximum=5, clip=True),),
    (MinMax(minimum=0, maximum=2),),
]


def schema() -> FeatureSchema:
    features = []
    for scope in ("context", "candidate"):
        s = scope[:2]
        features += [Numeric(name=f"n{s}{i}", scope=scope, transforms=t, missing_value=i / 4) for i, t in enumerate(TRANSFORMS)]
        for i in range(2):
            features.append(
                Categorical(name=f"v{s}{i}", scope=scope, encoder=Vocabulary(file="v"), table="t", missing_id=0, oov_id=1)
            )
            features.append(
                Categorical(
                    name=f"h{s}{i}", scope=scope, encoder=Hash(buckets=5 + i, seed=i, first_id=2), table="t", missing_id=0
                )
            )
            features.append(
                Categorical(
                    name=f"i{s}{i}", scope=scope, values="int", table=f"t{i or ''}", missing_id=[None, 3][i],
                    oov_id=[None, 4][i], encoder=Identity(out_of_range=["error", "oov"][i]),
                )
            )  # fmt: skip
    return FeatureSchema(features=tuple(features), tables=(Table(name="t", rows=20, dim=4), Table(name="t1", rows=7, dim=4)))


def encoders() -> tuple[Encoder, Encoder]:
    """(with the fast way, without it)."""
    fast, careful = (Encoder(schema(), {"v": VocabularyTable.of(KNOWN)}) for _ in range(2))
    assert fast._multi_column
    return fast, value_by_value(careful)


def value_by_value(encoder: Encoder) -> Encoder:
    encoder._multi_column, encoder._alone = [], list(encoder._fields.values())
    return encoder


def outcome(encoder, request_):
    """The bytes of the block, or the error."""
    try:
        return encoder.encode(*request_).buffer.tobytes()
    except InputError as error:
        return str(error)


TEXT = st.one_of(st.none(), st.sampled_from([*KNOWN, "c", ""]), st.text(max_size=3))
NUMBER = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.floats(allow_nan=True, allow_infinity=True), st.booleans(), st.just("x")
)
ID = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.integers(-1, 21), st.booleans(), st.just("x"))
PLAIN_ID = st.integers(0, 6)
PLAIN_NUMBER = st.one_of(st.none(), st.integers(-100, 100), st.floats(-1e6, 1e6))


@st.composite
def requests(draw, text, number, ready):
    n = draw(st.integers(1, 4))
    candidates, context = {}, {}
    for f in schema().features:
        values = number if isinstance(f, Numeric) else ready if isinstance(f.encoder, Identity) else text
        if f.scope == "context":
            context[f.name] = draw(values)
        else:
            candidates[f.name] = draw(st.lists(values, min_size=n, max_size=n))
    make = draw(st.sampled_from([list, np.array, partial(np.array, dtype=object)]))
    return {name: make(values) for name, values in candidates.items()}, context


@given(requests(TEXT.filter(lambda t: t is None or t.isprintable()), PLAIN_NUMBER, PLAIN_ID))
def test_plain_requests_encode_to_the_same_bits(request_):
    fast, careful = encoders()
    np.testing.assert_array_equal(fast.encode(*request_).buffer, careful.encode(*request_).buffer)


@pytest.mark.bulk
@given(requests(st.one_of(TEXT, st.integers(), st.just("\ud800")), NUMBER, ID))
def test_faulty_requests_get_the_same_error(request_):
    fast, careful = (outcome(encoder, request_) for encoder in encoders())
    assert fast == careful


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", ">f4", "u1", object])
@pytest.mark.parametrize("step", [1, 2])
def test_arrays_of_numpy_go_the_fast_way_where_c_reads_them_and_encode_alike(dtype, step):
    numbers, texts = np.array([3, 1, 2, 1], dtype)[::step], np.array(["a", "b", "c", ""])[::step]
    ids = numbers if np.dtype(dtype).kind in "iu" else numbers.astype(np.int64)
    kinds = {"n": numbers, "v": texts, "h": texts.astype(object), "i": ids}
    candidates = {f.name: kinds[f.name[0]] for f in schema().features if f.scope == "candidate"}
    context = {f.name: {"n": 1.5, "v": "a", "h": "b", "i": 2}[f.name[0]] for f in schema().features if f.scope == "context"}
    fast, careful = encoders()
    wanted = careful.encode(candidates, context).buffer
    assert np.array_equal(fast.encode(candidates, context).buffer, wanted)
    assert np.array_equal(fast.encode({n: v.tolist() for n, v in candidates.items()}, context).buffer, wanted)
    of_c = []
    for reader in fast._multi_column:
        if reader.scope == "candidate":
            out = np.empty((40, len(numbers)), np.float32 if reader.section == "candidate_dense" else np.int64)
            columns = reader.columns(candidates, context, False)
            of_c.append(columns is not None and reader.read(columns, out))
    assert all(of_c) == (np.dtype(dtype) in ARRAYS or (dtype is object and step == 1))


def test_an_array_that_repeats_one_value_and_objects_that_are_not_there_are_read_as_numpy_reads_them():
    fast, careful = encoders()
    ready = {f.name: [1, 1, 1] for f in schema().features if f.scope == "candidate" and f.name[0] == "i"}
    rest = {f.name: ["a", None, "c"] for f in schema().features if f.scope == "candidate" and f.name[0] in "vh"}
    rest |= {f.name: [None, 1.5, 2] for f in schema().features if f.scope == "candidate" and f.name[0] == "n"}
    context = {f.name: {"n": 1.5, "v": "a", "h": "b", "i": 2}[f.name[0]] for f in schema().features if f.scope == "context"}
    texts = np.zeros(3, object)
    texts[:] = ["a", None, "c"]
    arrays = {name: np.broadcast_to(np.array(1), 3) for name in ready} | {name: texts for name in rest if name[0] != "n"}
    arrays |= {name: np.array(values, object) for name, values in rest.items() if name[0] == "n"}
    wanted = careful.encode(ready | rest, context).buffer
    assert np.array_equal(fast.encode(arrays, context).buffer, wanted)


class Letter(str, Enum):  # noqa: UP042 (a StrEnum says of itself what it is)
    A, OTHER = "a", "zzz"


class Own(str):
    def __str__(self):
        return self


@pytest.mark.parametrize("texts", [[*Letter], [Own("a"), Own("zzz")]])
def test_text_of_a_class_of_its_own_is_its_characters(texts):
    plain = {"n": [1, 2], "v": ["a", "zzz"], "h": ["a", "zzz"], "i": [2, 3]}
    context = {f.name: {"n": 1.5, "v": "a", "h": "b", "i": 2}[f.name[0]] for f in schema().features if f.scope == "context"}
    blocks = [
        encoder.encode({f.name: kinds[f.name[0]] for f in schema().features if f.scope == "candidate"}, context).buffer
        for kinds in (plain, plain | {"v": texts, "h": texts})
        for encoder in encoders()
    ]
    assert all(np.array_equal(block, blocks[0]) for block in blocks)


@pytest.mark.parametrize("moved", ["context", "candidates"])
def test_a_feature_on_the_other_side_of_the_request_is_still_read(moved):
    def values(f, number, text, ready):
        return number if isinstance(f, Numeric) else ready if isinstance(f.encoder, Identity) else text

    candidates = {f.name: values(f, [1.0, 2.0], ["a", None], [5, 0]) for f in schema().features if f.scope == "candidate"}
    context = {f.name: values(f, 3.0, "b", 2) for f in schema().features if f.scope == "context"}
    if moved == "context":
        context["vca0"] = candidates.pop("vca0")[0]
    else:
        candidates["vco0"] = [context.pop("vco0"), "zzz"]
    fast, careful = encoders()
    np.testing.assert_array_equal(fast.encode(candidates, context).buffer, careful.encode(candidates, context).buffer)


@pytest.mark.parametrize("ids", [[4, 6], [6, 7], [0, -1], [1, True], [1, None], [2, 2**70], [1, "1"], [2.0, 1]])
def test_ready_ids_in_a_table_are_taken_as_they_are_and_all_else_goes_the_careful_way(ids):
    def encoder(features):
        made = [Categorical(name=n, scope="candidate", values="int", encoder=Identity(), table=n) for n in features]
        return Encoder(FeatureSchema(features=tuple(made), tables=tuple(Table(name=n, rows=7, dim=2) for n in features)), {})

    (reader,) = encoder(["a", "b"])._multi_column
    plain = all(type(v) is int and 0 <= v < 7 for v in ids)
    found = np.zeros((2, 2), np.int64)
    assert reader.read([[3, 5], ids], found) == plain
    if plain:
        np.testing.assert_array_equal(found, [[3, 5], ids])


def lists_encoder(fast=True, **more):
    fields = {"values": "int", "max_values": 3, "pooling": "sum", "table": "t", "encoder": Identity()} | more
    features = [Categorical(name=scope, scope=scope, **fields) for scope in ("context", "candidate")]
    encoder = Encoder(FeatureSchema(features=tuple(features), tables=(Table(name="t", rows=7, dim=2),)), {})
    return encoder if fast else value_by_value(encoder)


LISTS = [
    {},
    {"missing_id": -1, "padding_value": 0},
    {"missing_id": 5, "padding_value": 2**63},
    {"padding_value": 0},
    {"missing_id": 2, "align": "last", "too_many": "keep_last"},
    {"encoder": Identity(out_of_range="oov"), "oov_id": 6},
]
LIST = st.one_of(
    st.lists(st.one_of(st.integers(0, 6), ID), max_size=4), st.lists(st.integers(0, 6), min_size=1, max_size=3), ID
)


@pytest.mark.parametrize("more", LISTS)
@given(st.lists(LIST, min_size=1, max_size=4), LIST)
def test_lists_of_ready_ids_encode_to_the_same_bits_or_get_the_same_error(more, bags, bag):
    outcomes = []
    for fast in (True, False):
        try:
            outcomes.append(lists_encoder(fast, **more).encode({"candidate": bags}, {"context": bag}).buffer.tobytes())
        except InputError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("bag", "ids"), [([5], [5, -1, -1]), ([1, 0, 6], [1, -3, 6]), ([], None), ([1, 2, 3, 4], None), ([7], None), ([True], None),
                     ([-1], None), (None, None), ((1,), None), ([2**64], None)],
)  # fmt: skip
def test_c_takes_plain_lists_and_leaves_all_else(bag, ids):
    _, reader = lists_encoder(missing_id=-1, padding_value=0)._multi_column
    found = np.zeros((3, 2), np.int64)
    assert reader.read([[[4], bag]], found) == (ids is not None)
    if ids is not None:
        np.testing.assert_array_equal(found.T, [[4, -1, -1], ids])


def test_c_writes_into_arrays_of_the_right_size_alone():
    functions = c_build.request_extension()
    with pytest.raises(ValueError, match="out: got 16 bytes, expected 24 a bag"):
        functions.column_bags([[1]], (3, 7, -1, -3, False), np.empty(2, np.int64))
    both = np.arange(2)
    with pytest.raises(ValueError, match="out: got 8 bytes, expected a row of 1 values for each column"):
        functions.column_integers([[1], [2]], both + 7, np.empty(1, np.int64), both)
    with pytest.raises(ValueError, match="out: got 16 bytes, expected a row of 1 values for each column"):
        functions.column_integers([[1], [2]], both + 7, np.empty(2, np.int64), both + 1)
    with pytest.raises(ValueError, match="bounds: got 8 bytes, expected 16"):
        functions.column_integers([[1], [2]], both[:1], np.empty(2, np.int64), both)
