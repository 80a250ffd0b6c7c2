"""Columns of Arrow that C reads where they lie get the ids, numbers and errors of those that are read value by value."""

import json
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.errors import InputError
from dpiframe_core.features.arrow_columns import ArrowColumns, arrow_parts, columns_of_batch
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.packed_column import Form
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Log
from dpiframe_core.features.vocabulary import VocabularyTable
from kernels.runtime import c_build
from tests.dpiframe_core.features.test_multi_column_readers import outcome, value_by_value

FUNCTIONS = c_build.request_extension()
pytestmark = pytest.mark.skipif(FUNCTIONS is None, reason="there is no C compiler, or no headers of Python")

WORDS = Vocabulary(file="v")
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS = [*INTEGERS, pa.float32(), pa.float64()]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
ODD = [
    pa.bool_(),
    pa.float16(),
    pa.null(),
    pa.timestamp("ns"),
    pa.binary(),
    pa.list_(pa.int64(), 1),
    pa.uuid(),
]
LISTS = [make(kind) for make in (pa.list_, pa.large_list) for kind in (*NUMBERS, *TEXTS, pa.bool_())]
EVERY = [*NUMBERS, *TEXTS, *ODD, *LISTS, pa.list_(pa.list_(pa.int64())), pa.json_()]


def _schema() -> FeatureSchema:
    ready: dict[str, Any] = {"values": "int", "encoder": Identity(), "table": "t"}
    features = (
        Categorical(name="user", scope="context", encoder=WORDS, table="t", missing_id=0, oov_id=1),
        Categorical(name="word", encoder=WORDS, table="t", missing_id=0, oov_id=1),
        Categorical(name="known", encoder=WORDS, table="t"),
        Categorical(name="hash", encoder=Hash(buckets=7, seed=3, first_id=2), table="t", missing_id=0),
        Categorical(name="ready", **ready),
        Categorical(name="gaps", missing_id=0, **ready),
        Categorical(name="bag", max_values=3, missing_id=0, **ready),
        Categorical(name="last", max_values=2, padding_value=5, missing_id=0, align="last", **ready),
        Numeric(name="price", transforms=(Log(offset=9, minimum=-8),)),
        Numeric(name="wide", missing_value=2),
    )
    scoped = [f if f.name == "user" else f.model_copy(update={"scope": "candidate"}) for f in features]
    return FeatureSchema(features=tuple(scoped), tables=(Table(name="t", rows=20, dim=4),))


SCHEMA = _schema()
VOCABULARIES = {"v": VocabularyTable.of({"a": 2, "ö": 3, "long text of a value": 4})}
FAST, CAREFUL = Encoder(SCHEMA, VOCABULARIES), value_by_value(Encoder(SCHEMA, VOCABULARIES))
USUAL = {
    "word": TEXTS, "known": TEXTS, "hash": TEXTS, "ready": INTEGERS, "gaps": [*INTEGERS, pa.float64()], "bag": LISTS[:8],
    "last": LISTS[:8], "price": NUMBERS, "wide": NUMBERS,
}  # fmt: skip


def value_of(kind: Any, wild: bool) -> st.SearchStrategy[Any]:
    """One that an array of this type can hold; `wild`: of all such, not just those that most features take."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return st.lists(value_of(kind.value_type, wild), min_size=0 if wild else 1, max_size=4 if wild else 2)
    if pa.types.is_fixed_size_list(kind):
        return st.lists(st.integers(0, 9), min_size=1, max_size=1)
    if pa.types.is_integer(kind):
        bits = np.iinfo(kind.to_pandas_dtype())
        return st.integers(int(bits.min), int(bits.max)) | st.integers(0, 21) if wild else st.integers(0, 9)
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width) if wild else st.sampled_from([0.0, 1.0, 2.5, 9.0])
    if kind in TEXTS:
        return st.sampled_from(["a", "ö", *(["long text of a value", "", "b", "日本", "x" * 300] if wild else ())])
    if pa.types.is_boolean(kind):
        return st.booleans()
    if kind == pa.timestamp("ns"):
        return st.integers(0, 9)
    if pa.types.is_binary(kind) or kind == pa.uuid():
        return st.binary(min_size=16, max_size=16)
    return st.just("a") if kind == pa.json_() else st.none()


@st.composite
def arrays(draw, kind, n, wild):
    """Of n values: a slice, of a dictionary, in chunks; with nulls in each place that they may stand in."""
    before, behind = draw(st.integers(0, 9)), draw(st.integers(0, 2))
    values = value_of(kind, wild)
    if draw(st.booleans()):
        values = values | st.none()
    if kind in (*TEXTS, *NUMBERS) and draw(st.integers(0, 3)) == 0:
        entries = draw(st.lists(values, min_size=1, max_size=4))
        index = draw(st.sampled_from(INTEGERS))
        at = st.integers(0, len(entries) - 1) | st.none() if wild else st.integers(0, len(entries) - 1)
        places = draw(st.lists(at, min_size=before + n + behind, max_size=before + n + behind))
        made = pa.DictionaryArray.from_arrays(pa.array(places, index), pa.array(entries, kind))
    else:
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        rows = draw(st.lists(values, min_size=before + n + behind, max_size=before + n + behind))
        made = pa.array(rows, storage)
        made = made.cast(kind) if storage is not kind else made
    made = made.slice(before, n)
    cut = draw(st.integers(0, n))
    return pa.chunked_array([made.slice(0, cut), made.slice(cut)]) if draw(st.integers(0, 4)) == 0 else made


@st.composite
def requests(draw, wild):
    n = draw(st.sampled_from([0, 1, 2, 3, 9, 33]) if wild else st.sampled_from([1, 2, 9, 33]))
    columns = {
        name: draw(arrays(draw(st.sampled_from(kinds)), n, wild and draw(st.booleans()))) for name, kinds in USUAL.items()
    }
    for _ in range(draw(st.integers(0, 2)) if wild else 0):
        name = draw(st.sampled_from(list(columns)))
        columns[name] = draw(arrays(draw(st.sampled_from(EVERY)), draw(st.sampled_from([n, n, n, n + 1])), True))
    return columns, {"user": "a"}


@given(requests(wild=False))
def test_usual_columns_encode_to_the_same_bits(request_):
    assert outcome(FAST, request_) == outcome(CAREFUL, request_)


@pytest.mark.bulk
@given(requests(wild=True))
def test_columns_of_any_type_and_a_batch_of_them_encode_to_the_same_bits_or_get_the_same_error(request_):
    columns, context = request_
    careful = outcome(CAREFUL, request_)
    assert outcome(FAST, request_) == careful
    arrays_ = [v.combine_chunks() if isinstance(v, pa.ChunkedArray) else v for v in columns.values()]
    if len(set(map(len, arrays_))) > 1 or any(isinstance(a.type, pa.BaseExtensionType) for a in arrays_):
        return
    in_place = columns_of_batch(pa.RecordBatch.from_arrays(arrays_, names=list(columns)), list(columns))
    assert isinstance(in_place, ArrowColumns)
    there = {name: (array.type, array.to_string()) for name, array in in_place.items()}  # as text NaN is NaN
    assert there == {name: (array.type, array.to_string()) for name, array in zip(columns, arrays_, strict=True)}
    assert outcome(FAST, (in_place, context)) == careful


@pytest.mark.parametrize(("name", "kinds"), USUAL.items())
def test_c_takes_every_usual_type_without_nulls_and_text_and_numbers_with_them(name, kinds):
    (reader,) = (r for r in Encoder(SCHEMA, VOCABULARIES)._multi_column if name in r.names and r.scope == "candidate")
    usual = {"word": "a", "known": "a", "hash": "a", "ready": 1, "gaps": 1, "bag": [1], "last": [1], "price": 1, "wide": 1}
    for kind in kinds:
        columns = {other: pa.array([usual[other]] * 3, USUAL[other][0]) for other in reader.names}
        columns[name] = pa.array([usual[name]] * 3, kind)
        found = np.zeros((SCHEMA.columns["wide" if name in ("price", "wide") else "last"].start + 2, 3))
        whole = found.astype(np.float32) if name in ("price", "wide") else found.astype(np.int64)
        parts = reader.columns(columns, {}, False)
        assert {p[0] for p in parts} == {Form.ARROW}
        assert reader.read(parts, whole) == (kind != pa.float64() or name != "gaps")


@pytest.mark.parametrize("first", [0, 2])
def test_views_of_text_of_any_length_in_any_of_their_buffers_are_read_as_text(first):
    """Up to 12 bytes of a text lie in its view. Here a null has a view, too, of what is nowhere."""
    words = [
        "",
        "a",
        "eleven byte",
        "twelve bytes",
        "thirteen byte",
        "long text of a value",
        "y" * 300,
        None,
        "long text of a value",
    ]
    buffers = ["thirteen byte", "a text that nobody has, long text of a value", "y" * 300]
    table = VocabularyTable.of({word: 2 + i for i, word in enumerate(words[:7])})
    encoder = Encoder(SCHEMA, {"v": table})
    views = bytearray()
    for word in words:
        data = (word or "").encode()
        in_buffer = next((i for i, text in enumerate(buffers) if len(data) > 12 and word in text), 0)
        at = buffers[in_buffer].find(word or "")
        views += (
            struct.pack("<i12s", len(data), data)
            if len(data) <= 12
            else struct.pack("<i4sii", len(data), data[:4], in_buffer, at)
        )
    views[7 * 16 : 8 * 16] = struct.pack("<i4sii", 1 << 30, b"none", 9, 1 << 30)
    valid = np.packbits([word is not None for word in words], bitorder="little").tobytes()
    made = [valid, bytes(views), *(text.encode() for text in buffers)]
    column = pa.Array.from_buffers(pa.string_view(), len(words), list(map(pa.py_buffer, made)))[first:]
    every, known = list(range(len(column))), [None if word is None else i for i, word in enumerate(words[first:])]
    others = {
        name: pa.array([v] * len(column))
        for name, v in (("bag", [1]), ("last", [1]), ("ready", 1), ("gaps", 1), ("price", 1), ("wide", 1))
    }
    for texts in (column, *(pa.DictionaryArray.from_arrays(pa.array(at, pa.int16()), column) for at in (every, known))):
        columns = {**others, "word": texts, "hash": texts, "known": pa.array(["a"] * len(column))}
        assert arrow_parts(texts) is not None
        as_lists = columns | {"word": words[first:], "hash": words[first:]}
        for way in (encoder, value_by_value(Encoder(SCHEMA, {"v": table}))):
            block = way.encode(columns, {"user": "a"})
            assert block.buffer.tobytes() == way.encode(as_lists, {"user": "a"}).buffer.tobytes()
            assert block.column(SCHEMA.columns["word"])[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 8, 0, 7][first:]


def test_a_column_that_arrow_finds_unsound_is_not_read_by_c():
    data, offsets = pa.py_buffer(b"abc"), pa.py_buffer(np.array([0, 90, 3], np.int32))
    assert arrow_parts(pa.Array.from_buffers(pa.string(), 2, [None, offsets, data])) is None
    within = pa.py_buffer(np.array([0, 3], np.int32))
    assert arrow_parts(pa.Array.from_buffers(pa.string(), 1, [None, within, pa.py_buffer(b"\xff\xfe\xfd")])) is None
    assert arrow_parts(pa.Array.from_buffers(pa.string(), 1, [None, within, data])) is not None
    for view in ("<i4s8x", 3, b"\xff\xfe\xfd"), ("<i4sii", 13, b"abca", 0, 1):  # no UTF-8; beyond its buffer
        buffers = [None, pa.py_buffer(struct.pack(*view)), pa.py_buffer(b"abcabcabcabca")]
        assert arrow_parts(pa.Array.from_buffers(pa.string_view(), 1, buffers)) is None
    index = pa.Array.from_buffers(pa.int8(), 1, [None, pa.py_buffer(b"\x05")])
    unsound = pa.DictionaryArray.from_arrays(index, pa.array(["a"]), safe=False)
    assert arrow_parts(unsound) is None


def test_types_of_somebodys_own_are_not_read_as_what_they_are_stored_as():
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8()))
    for column in (flags, pa.ListArray.from_arrays([0, 1], flags)):
        assert arrow_parts(column) is None
        assert arrow_parts(pa.chunked_array([column])) is None


def test_parts_that_do_not_fit_are_refused():
    batch = pa.record_batch({"a": [1, 2], "b": ["x", "y"]})
    (_, _, array, a), _ = FUNCTIONS.arrow_columns(*batch.__arrow_c_array__())
    at, out = np.zeros(1, np.int64), np.zeros(3, np.int64)
    for column in (a + (9 << 16), -1, a + (2 << 16)):
        with pytest.raises(ValueError, match=r"^columns: got Arrow's column -?\d+, expected one of 2 values"):
            FUNCTIONS.column_integers([(Form.ARROW, 2, array, column)], at + 9, out, at)
    with pytest.raises(ValueError, match="expected one of 3 values"):
        FUNCTIONS.column_integers([(Form.ARROW, 3, array, a)], at + 9, out, at)
    with pytest.raises(ValueError, match=r"^array: expected that of a whole batch"):
        FUNCTIONS.arrow_columns(batch.schema.__arrow_c_schema__(), pa.array([1]).__arrow_c_array__()[1])
    with pytest.raises(ValueError, match="PyCapsule"):
        FUNCTIONS.arrow_columns(array, array)
    with pytest.raises(TypeError, match="bags: expected a list or a column of Arrow"):
        FUNCTIONS.column_bags(7, (3, 7, -1, -3, False), out)


def test_a_feature_of_text_takes_a_column_of_numbers_if_all_are_null():
    columns = {
        name: pa.array([v], kinds[0])
        for (name, kinds), v in zip(USUAL.items(), ["a"] * 3 + [1, 1, [1], [1], 1, 1], strict=True)
    }
    nulls = columns | {"word": pa.nulls(1, pa.int64()), "hash": pa.nulls(1, pa.float32())}
    as_json = json.loads(json.dumps({name: v.to_pylist() for name, v in nulls.items()}))
    assert outcome(FAST, (nulls, {"user": "a"})) == outcome(FAST, (as_json, {"user": "a"}))
    wrong = columns | {"word": pa.array([0])}
    with pytest.raises(InputError, match=r"^candidates\.word\[0\]: got 0, expected text or null$"):
        FAST.encode(wrong, {"user": "a"})
