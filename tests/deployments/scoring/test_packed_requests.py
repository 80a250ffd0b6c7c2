"""Columns that are read where they lie in the body get the ids and the errors of those that are read value by value."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.client.columns import raw_tensors
from deployments.config import Limits
from deployments.protocol import input as reader
from deployments.protocol.request import parse
from deployments.scoring.job import Job
from deployments.scoring.request_form import RequestForm, ScoreInput
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.packed_column import JsonColumns, PackedColumn, PackedColumns
from dpiframe_core.features.preencoded import PreencodedReader
from dpiframe_core.features.raw_columns import as_list
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric, Table, Vocabulary
from dpiframe_core.features.transforms import Bucketize, Log
from dpiframe_core.features.vocabulary import VocabularyTable
from kernels.runtime import c_build

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")


BUCKETS = (Bucketize(boundaries=(0.0, 2.5), first_id=3),)
WORDS = Vocabulary(file="v")


def _schema() -> FeatureSchema:
    common: dict[str, Any] = {"table": "t", "missing_id": 0}
    features = (
        Categorical(name="user", scope="context", encoder=Vocabulary(file="v"), oov_id=1, **common),
        Numeric(name="age", scope="context", missing_value=0.5),
        Categorical(name="item", scope="candidate", encoder=Vocabulary(file="v"), oov_id=1, **common),
        Categorical(name="site", scope="candidate", encoder=Hash(buckets=7, seed=3, first_id=2), **common),
        Categorical(name="strict", scope="candidate", encoder=Vocabulary(file="v"), table="t"),
        Categorical(name="place", scope="candidate", values="int", encoder=Identity(out_of_range="oov"), oov_id=1, **common),
        Categorical(name="known", scope="candidate", values="int", encoder=Vocabulary(file="i"), oov_id=1, **common),
        Numeric(name="price", scope="candidate", transforms=(Log(offset=9, minimum=-8),)),
        Numeric(name="wide", scope="candidate", missing_value=2),
        Numeric(name="step", scope="candidate", table="t", missing_id=0, transforms=BUCKETS),
        Categorical(name="tags", scope="candidate", max_values=2, pooling="sum", encoder=WORDS, oov_id=1, **common),
    )  # fmt: skip
    return FeatureSchema(features=features, tables=(Table(name="t", rows=20, dim=4),))


SCHEMA = _schema()
PLAIN = SCHEMA.model_copy(update={"features": SCHEMA.features[:-1]})  # no lists: all candidates are read where they lie
VOCABULARIES = {"v": VocabularyTable.of({"a": 2, "ö": 3, "long text of a value": 4}), "i": VocabularyTable.of({5: 2})}
LIMITS = Limits(max_rows_per_request=4, max_row_dicts=4)
ENCODER, FORM = Encoder(SCHEMA, VOCABULARIES), RequestForm("m", SCHEMA, LIMITS)
OF = {True: (ENCODER, FORM), False: (Encoder(PLAIN, VOCABULARIES), RequestForm("m", PLAIN, LIMITS))}  # whether it has lists
TEXT = st.sampled_from(["a", "ö", "long text of a value", "", "b", None, "\x7f", "日本"])
NUMBER = st.none() | st.integers(-9, 9) | st.floats(-1e9, 1e9) | st.sampled_from([0.1, 1e-7, 2**53 + 1, 1e22, -0.0])
KINDS = {
    "item": TEXT, "site": TEXT, "strict": st.sampled_from(["a", "ö"]), "place": st.none() | st.integers(0, 30),
    "known": st.none() | st.integers(4, 6), "price": st.integers(0, 9) | st.floats(0, 9), "wide": NUMBER, "step": NUMBER,
    "tags": st.lists(st.sampled_from(["a", "b"]), max_size=2),
}  # fmt: skip
ODD = st.sampled_from(
    ["\ud800", "x" * 300, 'quote"d', "back\\slash", True, 2**70, -1, 1e300, float("nan"), float("inf"), [], {}, None]
)


@st.composite
def requests(draw: st.DrawFn, odd: bool) -> dict[str, Any]:
    n = draw(st.integers(1, 4))
    columns = {name: draw(st.lists(kind, min_size=n, max_size=n)) for name, kind in KINDS.items()}
    context: dict[str, Any] = {"user": draw(TEXT), "age": draw(st.none() | st.integers(0, 99))}
    if draw(st.booleans()):  # a feature on the other side
        context["item"] = columns.pop("item")[0]
    if draw(st.booleans()):
        columns["user"] = [context.pop("user")] * n
    for _ in range(draw(st.integers(1, 2)) if odd else 0):
        name = draw(st.sampled_from(sorted(columns)))
        at = draw(st.integers(0, n))
        columns[name] = [
            *columns[name][:at],
            *draw(st.lists(ODD, min_size=1, max_size=2)),
            *columns[name][at + draw(st.integers(0, 2)) :],
        ]
    return {"context": context, "candidates": columns}


def outcome(call: Any) -> object:
    try:
        return call().buffer.tobytes()
    except InputError as error:
        return type(error), str(error)


def both_outcomes(body: bytes, lists: bool) -> tuple[object, object]:
    encoder, form = OF[lists]

    def careful(read: Any) -> Any:
        parsed: ScoreInput = read(body)
        candidates = {name: as_list(values) for name, values in parsed.candidates.items()}
        return replace(parsed, candidates=candidates).encoded(encoder.encode)

    return outcome(lambda: form.parse(body).encoded(encoder.encode)), outcome(lambda: careful(form._unpacked))


@given(requests(odd=False), st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_a_sound_body_is_read_where_it_lies(request: dict[str, Any], ascii_only: bool, indent: int | None, lists: bool) -> None:
    if not lists:
        del request["candidates"]["tags"]
    body = json.dumps(request, ensure_ascii=ascii_only, indent=indent).encode()
    got, wanted = both_outcomes(body, lists)
    assert isinstance(got, bytes)
    assert got == wanted
    candidates = OF[lists][1].parse(body).candidates
    packed = {name for name, values in candidates.items() if isinstance(values, PackedColumn)}
    if b"\\u" not in body:
        assert packed == request["candidates"].keys() - {"tags"}
        assert isinstance(candidates, JsonColumns) != lists
    assert candidates.keys() == set(candidates) == request["candidates"].keys()
    assert len(candidates) == len(request["candidates"])
    for name, values in candidates.items():
        assert floats(as_list(values)) == floats(request["candidates"][name])


def floats(values: list[Any]) -> list[Any]:
    return [float(v) if type(v) is int else v for v in values]


def listed(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Columns as a list of objects; of a column that ends too soon the last ones lack a value."""
    most = max(map(len, columns.values()))
    return [{name: values[i] for name, values in columns.items() if i < len(values)} for i in range(most)]


@given(requests(odd=False), st.booleans(), st.sampled_from([None, 1]), st.randoms())
def test_a_list_of_objects_is_read_where_it_lies(
    request: dict[str, Any], ascii_only: bool, indent: int | None, chance: Any
) -> None:
    columns = request["candidates"]
    del columns["tags"]
    rows = [dict(chance.sample(sorted(row.items()), len(row))) for row in listed(columns)]  # names in any order
    body = json.dumps(request | {"candidates": rows}, ensure_ascii=ascii_only, indent=indent).encode()
    got, wanted = both_outcomes(body, lists=False)
    assert isinstance(got, bytes)
    assert got == wanted == outcome(lambda: OF[False][0].encode(columns, request["context"]))
    candidates = FORM.parse(body).candidates
    assert isinstance(candidates, JsonColumns) or b"\\u" in body
    assert {name: floats(as_list(values)) for name, values in candidates.items()} == {n: floats(v) for n, v in columns.items()}


@given(requests(odd=True), st.booleans(), st.booleans(), st.booleans())
def test_a_faulty_body_gets_the_same_answer(request: dict[str, Any], ascii_only: bool, lists: bool, rows: bool) -> None:
    if not lists:
        del request["candidates"]["tags"]
    if rows:
        request["candidates"] = listed(request["candidates"])
    text = json.dumps(request, ensure_ascii=ascii_only)
    got, wanted = both_outcomes(text.encode("utf-8", "surrogatepass"), lists)
    assert got == wanted


PIECES = [
    b"", b",", b"]", b"}", b"{", b"[", b'"', b"\\", b"0", b"-", b".", b"e", b"n", b" ", b"\xff", b"\x00", b'"candidates":',
    b'"item":[],',
]  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(st.integers(0, 2000), st.sampled_from(PIECES)),
    min_size=1, max_size=3,
)  # fmt: skip
SOUND = json.dumps(
    {
        "options": {"priority": 1}, "context": {"user": "a", "age": 3},
        "candidates": {
            "item": ["a", "b"], "site": ["x", None], "strict": ["a", "a"], "place": [1, 2], "known": [5, 6], "price": [1, 2.5],
            "wide": [1e3, -0.5], "step": [0, 3], "tags": [["a"], []],
        },
    }
).encode()  # fmt: skip


SOUND_ROWS = json.dumps(json.loads(SOUND) | {"candidates": listed(json.loads(SOUND)["candidates"])}).encode()


@given(MUTATIONS, st.booleans(), st.sampled_from([SOUND, SOUND_ROWS]))
@example([(40, b'"candidates":')], True, SOUND)
def test_a_damaged_body_gets_the_same_answer(mutations: list[tuple[int, bytes]], lists: bool, body: bytes) -> None:
    body = body if lists else re.sub(rb', "tags": (\["a"\]|\[\["a"\], \[\]\]|\[\])', b"", body)
    assert (b"tags" in body) == lists
    for at, new in mutations:
        at %= len(body)
        body = body[:at] + new + body[at + (at + len(new)) % 2 :]
    got, wanted = both_outcomes(body, lists)
    assert got == wanted


@pytest.mark.parametrize(
    "number",
    ["0", "-0", "-0.0", "1.5", "0.1", "42", "1234567", "12345678", "1234567.5", "1234567e1",
     "123456789012345", "12345678901234.5", "1234567890123456.7", "999999999999999999",
     "1e5", "1E-5", "2.5e+3", "1e308", "4.9e-324", "0.000000000000001", "9007199254740993.0", "8.41e21", "1." + "3" * 70],
)  # fmt: skip
@pytest.mark.parametrize("sign", ["", "-"])
def test_a_number_is_the_nearest_double(number: str, sign: str) -> None:
    text = sign * (not number.startswith("-")) + number
    out, missing = np.zeros((1, 2)), np.zeros(2, np.bool_)
    functions = c_build.request_extension()
    assert functions is not None
    for both in (f"[{text},7]", f"[7 ,{text}]"):  # in the midst of bytes, and at their end
        found = functions.column_numbers([(2, 2, both.encode(), None)], out, missing, np.zeros(1, np.int64))
        if found == -1:
            assert len(text) > 60  # left to others
        else:
            assert out.tobytes() == np.array(json.loads(both), np.float64).tobytes()


@pytest.mark.parametrize(
    "number",
    ["01", "-", "1.", ".5", "1e", "1e+", "+1", "0x1", "1_0", "NaN", "Infinity", "--1", "1.5.2", "007", "7:", "1234567/"],
)
def test_what_is_no_number_is_not_taken(number: str) -> None:
    body = b'{"candidates":{"price":[%s]}}' % number.encode()
    functions = c_build.request_extension()
    assert functions is not None
    assert functions.json_columns(body, {"price": 1 << 2 | 1 << 3}, 10, 10) is None
    assert functions.json_columns(body.replace(number.encode(), b"1"), {"price": 1 << 2}, 10, 10) is not None


def served(schema: FeatureSchema, encoder: Encoder) -> Any:
    def encode(candidates: Any, context: Any, context_rows: Any = None) -> RowBlock:
        return encoder.encode(candidates, context, RowBlock.allocate, context_rows)

    return SimpleNamespace(encoded=PreencodedReader(schema), scorer=SimpleNamespace(allocate=RowBlock.allocate), encode=encode)


SERVED, SERVED_PLAIN = served(SCHEMA, ENCODER), served(PLAIN, OF[False][0])


def tensors_of(request: dict[str, Any]) -> tuple[bytes, str]:
    wired, _ = raw_tensors(request["candidates"], request["context"])
    inputs = [
        {"name": t.name, "shape": list(t.shape), "datatype": t.datatype, "parameters": {"binary_data_size": len(t.data)}}
        for t in wired
    ]
    envelope = json.dumps({"inputs": inputs}).encode()
    return envelope + b"".join(t.data for t in wired), str(len(envelope))


def both_tensor_outcomes(body: bytes, length: str, lists: bool) -> tuple[object, object, Job]:
    def encoded(job: Job) -> Any:
        return reader.encode(SERVED if lists else SERVED_PLAIN, parse(body, length), 4, job)

    job = Job("1", 0.0)
    got = outcome(lambda: encoded(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "in_place", lambda _, tensors, __: ({}, tensors))
        return got, outcome(lambda: encoded(Job("2", 0.0))), job


@given(requests(odd=False), st.booleans())
def test_tensors_of_raw_values_are_read_where_they_lie(request: dict[str, Any], lists: bool) -> None:
    columns, context = request["candidates"], request["context"]
    columns["wide"] = [v if v is None else float(v) for v in columns["wide"]]
    if not lists:
        del columns["tags"]
    got, wanted, job = both_tensor_outcomes(*tensors_of(request), lists)
    assert isinstance(got, bytes)
    assert got == wanted == outcome(lambda: OF[lists][0].encode(columns, context))
    assert job.given is not None
    candidates, values = job.given
    assert isinstance(candidates, PackedColumns) != lists
    assert candidates.keys() == set(candidates) == SERVED.encoded.scopes.keys() - values.keys() - ({"tags"} - {*columns})
    assert len(candidates) == len({*candidates})
    given_ = {name: [value] for name, value in context.items()} | columns  # one candidate's context may be a column
    assert {name: floats(as_list(c)) for name, c in candidates.items()} == {name: floats(given_[name]) for name in candidates}


@given(
    requests(odd=False), st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3)), min_size=1, max_size=3),
    st.booleans(),
)  # fmt: skip
def test_damaged_tensors_get_the_same_answer(request: dict[str, Any], damage: list[tuple[int, bytes]], lists: bool) -> None:
    if not lists:
        del request["candidates"]["tags"]
    body, length = tensors_of(request)
    data = bytearray(body)
    for at, new in damage:
        at = int(length) + at % max(1, len(data) - int(length) - len(new))
        data[at : at + len(new)] = new
    got, wanted, _ = both_tensor_outcomes(bytes(data[: len(body)]), length, lists)
    assert got == wanted
