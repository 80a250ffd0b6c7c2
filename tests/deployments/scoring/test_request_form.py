import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import Limits
from deployments.scoring.faults import NotJson
from deployments.scoring.request_form import RequestForm, ScoreInput, addressed, openapi_schemas
from dpiframe_core.errors import InputError, TooLarge
from dpiframe_core.features.raw_columns import as_list
from tests.deployments.serving_doubles import SCHEMA, columns

LIMITS = Limits(max_rows_per_request=5, max_row_dicts=3)
FORM = RequestForm("fake", SCHEMA, LIMITS)
ONE_BY_ONE = RequestForm("fake", SCHEMA, LIMITS)
ONE_BY_ONE._from_sound_rows = lambda body: None  # type: ignore[method-assign]


def listed(parsed: ScoreInput) -> dict[str, list[object]]:
    return {name: as_list(values) for name, values in parsed.candidates.items()}


def body(**parts: Any) -> bytes:
    return json.dumps(parts).encode()


def test_columns_arrive_as_they_were_sent() -> None:
    sent = {"item": [1, None], "site": ["a", None], "tags": [["x"], None], "price": [1, 2.5], "bias": [None, -0.5]}
    parsed = FORM.parse(
        body(
            model="fake",
            version="7",
            context={"user": 3},
            candidates=sent,
            options={"deadline_ms": 5, "priority": -2, "top_k": 1},
        )
    )
    assert listed(parsed) == sent
    assert parsed.context == {"user": 3}
    assert (parsed.model, parsed.version) == ("fake", "7")
    assert (parsed.options.deadline_ms, parsed.options.priority, parsed.options.top_k) == (5.0, -2, 1)


def test_row_objects_become_the_same_columns() -> None:
    sent = {name: list(values) for name, values in columns(3).items()}
    rows = [dict(zip(sent, values, strict=True)) for values in zip(*sent.values(), strict=True)]
    assert listed(FORM.parse(body(candidates=rows))) == listed(FORM.parse(body(candidates=sent))) == sent


def test_any_feature_may_come_in_context_or_in_candidates() -> None:
    parsed = FORM.parse(body(context={"tags": ["x"], "price": 1}, candidates={"user": [1, 2], "item": [1, 2]}))
    assert parsed.context == {"tags": ["x"], "price": 1.0}
    assert listed(parsed) == {"user": [1, 2], "item": [1, 2]}


BAD = [
    (b'{"candidates": {"site": ["a", 1]}}', "candidates.site[1]: got 1, expected text or null"),
    (b'{"candidates": {"item": [1, "2"]}}', "candidates.item[1]: got '2', expected an integer or null"),
    (b'{"candidates": {"item": [1, true]}}', "candidates.item[1]: got True, expected an integer or null"),
    (b'{"candidates": {"item": [1.0]}}', "candidates.item[0]: got 1.0, expected an integer or null"),
    (b'{"candidates": {"price": ["1"]}}', "candidates.price[0]: got '1', expected a number or null"),
    (b'{"candidates": {"price": [false]}}', "candidates.price[0]: got False, expected a number or null"),
    (b'{"candidates": {"price": [0, NaN]}}', "candidates.price[1]: got nan, expected a finite number or null"),
    (b'{"candidates": {"price": [-Infinity]}}', "candidates.price[0]: got -inf, expected a finite number or null"),
    (b'{"candidates": {"price": [1e999]}}', "candidates.price[0]: got inf, expected a finite number or null"),
    (b'{"candidates": {"tags": [["x"], "y"]}}', "candidates.tags[1]: got 'y', expected a list"),
    (b'{"candidates": {"tags": [["x"], ["y", 2]]}}', "candidates.tags[1][1]: got 2, expected text or null"),
    (b'{"candidates": {"item": null}}', "candidates.item: got null, expected a list"),
    (b'{"candidates": {"item": 7}}', "candidates.item: got 7, expected a list"),
    (b'{"candidates": {"item": {"0": 7}}}', "candidates.item: got an object of 1 keys, expected a list"),
    (b'{"candidates": {"item": []}}', "candidates.item: got a list of 0 values, expected at least one candidate"),
    (b'{"candidates": {"color": ["red"]}}', "candidates.color: got an unknown key, expected a feature of the model"),
    (b'{"candidates": {}}', "candidates: got {}, expected at least one feature"),
    (b'{"candidates": []}', "candidates: got a list of 0 values, expected at least one candidate"),
    (b'{"candidates": [{}]}', "candidates: got {}, expected at least one feature"),
    (b'{"candidates": [{"item": 1}, 2]}', "candidates[1]: got 2, expected an object"),
    (b'{"candidates": [{"item": 1}, {"item": "x"}]}', "candidates[1].item: got 'x', expected an integer or null"),
    (b'{"candidates": [{"color": 1}]}', "candidates[0].color: got an unknown key, expected a feature of the model"),
    (
        b'{"candidates": [{"item": 1}, {"item": 1, "bias": 1}]}',
        "candidates[1].bias: got a value, expected the features of candidates[0] in every candidate",
    ),
    (
        b'{"candidates": [{"item": 1, "bias": 1}, {"item": 1}]}',
        "candidates[1].bias: got nothing, expected the features of candidates[0] in every candidate",
    ),
    (b'{"candidates": 5}', "candidates: got 5, expected an object of columns or a list of objects"),
    (b'{"candidates": null}', "candidates: got null, expected an object of columns or a list of objects"),
    (b"{}", "candidates: got nothing, expected an object of columns or a list of objects"),
    (b'{"context": [], "candidates": {"item": [1]}}', "context: got a list of 0 values, expected an object"),
    (b'{"context": {"user": [1]}, "candidates": {"item": [1]}}',
     "context.user: got a list of 1 values, expected an integer or null"),
    (b'{"context": {"age": 1}, "candidates": {"item": [1]}}',
     "context.age: got an unknown key, expected a feature of the model"),
    (b'{"candidates": {"item": [1]}, "option": {}}',
     "option: got an unknown key, expected one of model, version, context, candidates, options; perhaps 'options'"),
    (b'{"candidate": {"item": [1]}}',
     "candidates: got nothing, but 'candidate', expected an object of columns or a list of objects"),
    (b'{"items": {"item": [1]}}', "candidates: got nothing, expected an object of columns or a list of objects"),
    (b'{"candidates": {"items": [1]}}',
     "candidates.items: got an unknown key, expected a feature of the model; perhaps 'item'"),
    (b'{"candidates": [{"prize": 1}]}',
     "candidates[0].prize: got an unknown key, expected a feature of the model; perhaps 'price'"),
    (b'{"context": {"usr": 1}, "candidates": {"item": [1]}}',
     "context.usr: got an unknown key, expected a feature of the model; perhaps 'user'"),
    (b'{"candidates": {"item": [1]}, "options": {"topk": 1}}',
     "options.topk: got an unknown key, expected one of deadline_ms, priority, top_k, key; perhaps 'top_k'"),
    (b'{"candidates": {"item": [1]}, "options": {"k": 1}}',
     "options.k: got an unknown key, expected one of deadline_ms, priority, top_k, key"),
    (b'{"candidates": {"item": [1]}, "options": {"top_k": 0}}', "options.top_k: got 0, expected greater than or equal to 1"),
    (b'{"candidates": {"item": [1]}, "options": {"deadline_ms": 0}}', "options.deadline_ms: got 0, expected greater than 0"),
    (b'{"candidates": {"item": [1]}, "options": {"deadline_ms": "5"}}', "options.deadline_ms: got '5', expected a number"),
    (b'{"candidates": {"item": [1]}, "options": {"priority": 11}}',
     "options.priority: got 11, expected less than or equal to 10"),
    (b'{"candidates": {"item": [1]}, "model": 5}', "model: got 5, expected text"),
    (b"null", "body: got null, expected an object"),
    (b"[1]", "body: got a list of 1 values, expected an object"),
    (b'"text"', "body: got 'text', expected an object"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_body_is_refused_with_its_path_and_rule(sent: bytes, message: str) -> None:
    with pytest.raises(InputError) as refused:
        FORM.parse(sent)
    assert str(refused.value) == message
    assert refused.value.status == 422


@pytest.mark.parametrize("form", [FORM, ONE_BY_ONE])
def test_what_an_encoder_refuses_is_told_by_its_place_in_the_body(form: RequestForm) -> None:
    def encode(candidates: object, context: object) -> Any:
        raise InputError("candidates.item[1]", None, "a value")

    for sent, where in (
        (body(candidates=[{"item": 1}, {"item": None}]), "candidates[1].item"),
        (body(candidates={"item": [1, None]}), "candidates.item[1]"),
    ):
        with pytest.raises(InputError) as refused:
            form.parse(sent).encoded(encode)
        assert str(refused.value) == f"{where}: got null, expected a value"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"item=1",
        b'{"candidates": {"item": [1, 2',
        b'{"candidates": {"site": ["\xff"]}}',
        b'{"candidates": {"site": ["\\ud800"]}}',
        b"[" * 100_000,
        b'{"candidates": ' * 50_000,
        b'{"candidates": {"item": [1' + b"0" * 5000 + b"]}}",
        b'{"candidates": {"item": [1]}} x',
        '{"candidates": {"item": [1]}}'.encode("utf-16"),
    ],
    ids=["empty", "form", "cut", "utf8", "surrogate", "deep list", "deep object", "huge integer", "trailing", "utf16"],
)
def test_what_is_not_json_is_told_apart(sent: bytes) -> None:
    with pytest.raises(NotJson, match=r"^body: got invalid JSON \(.+\), expected a JSON object in UTF-8$") as refused:
        FORM.parse(sent)
    assert refused.value.status == 400
    assert len(str(refused.value)) < 200


def test_each_form_has_its_own_bound_on_candidates() -> None:
    FORM.parse(body(candidates={"item": [1] * 5}))
    with pytest.raises(TooLarge, match=r"candidates\.item: got a list of 6 values, expected at most 5"):
        FORM.parse(body(candidates={"item": [1] * 6}))
    FORM.parse(body(candidates=[{"item": 1}] * 3))
    with pytest.raises(TooLarge, match=r"candidates: got a list of 4 values, expected at most 3"):
        FORM.parse(body(candidates=[{"item": 1}] * 4))


@pytest.mark.usefixtures("both_ways")
def test_a_list_of_objects_has_no_more_candidates_than_any_request() -> None:
    form = RequestForm("fake", SCHEMA, Limits(max_rows_per_request=2))
    form.parse(body(candidates=[{"item": 1}] * 2))
    with pytest.raises(TooLarge, match=r"candidates: got a list of 3 values, expected at most 2"):
        form.parse(body(candidates=[{"item": 1}] * 3))


def test_a_message_never_repeats_a_large_value_or_key() -> None:
    long = "x" * 100_000
    for sent in (
        {"candidates": {"item": [long]}},
        {"candidates": {long: [1]}},
        {"candidates": {"item": [[1] * 100_000]}},
        {"candidates": {"item": [1]}, long: 1},
        {"candidates": long},
        long,
    ):
        with pytest.raises(InputError) as refused:
            FORM.parse(json.dumps(sent).encode())
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("sent", [b'{"candidates": {"item": [[%b]]}}', b'{"candidates": {"item": [1]}, "x": [%b]}'])
def test_a_body_of_very_many_lists_sets_off_no_garbage_collections_while_it_is_read(sent: bytes) -> None:
    started = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: started.append(phase))
    try:
        with pytest.raises(InputError):
            FORM.parse(sent % b",".join([b"[]"] * 100_000))
    finally:
        gc.callbacks.pop()
    assert len(started) <= 2, "one collection, after it has been read"
    assert gc.isenabled()


def test_the_last_of_two_equal_keys_counts() -> None:
    assert FORM.parse(b'{"candidates": {"item": [1], "item": [2]}}').candidates == {"item": [2]}


def test_a_body_names_its_model_whatever_else_it_holds() -> None:
    named = addressed(b'{"model": "a", "version": "2", "candidates": 5}')
    assert (named.model, named.version) == ("a", "2")
    assert addressed(b'{"candidates": 5}').model is None
    with pytest.raises(InputError, match=r"^model: got 5, expected text$"):
        addressed(b'{"model": 5}')
    with pytest.raises(NotJson):
        addressed(b'{"model": "a"')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
features = st.sampled_from([f.name for f in SCHEMA.features])
requests = st.fixed_dictionaries(
    {},
    optional={
        "context": json_values | st.dictionaries(features, json_values, max_size=3),
        "candidates": json_values
        | st.dictionaries(features, json_values | st.lists(json_values, max_size=3), max_size=3)
        | st.lists(st.dictionaries(features, json_values, max_size=3), max_size=3),
        "options": json_values | st.dictionaries(st.sampled_from(["deadline_ms", "priority", "top_k"]), json_values),
        "model": json_values,
    },
)


@given(requests | json_values)
def test_whatever_is_sent_is_parsed_or_refused_on_purpose(sent: Any) -> None:
    try:
        parsed = FORM.parse(json.dumps(sent).encode())
    except InputError:  # and nothing else
        return
    assert set(parsed.candidates) <= {f.name for f in SCHEMA.features}
    assert all(1 <= len(column) <= 5 for column in parsed.candidates.values())


near_values = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3) | st.lists(st.text())
sound_values = st.fixed_dictionaries(
    {"item": st.integers(0, 9) | st.none(), "price": st.integers(0, 9) | st.floats(0, 9), "site": st.sampled_from(["a", None])}
)
near_rows = st.lists(sound_values | st.dictionaries(features | st.just("other"), near_values, max_size=3), max_size=4)


@given(st.fixed_dictionaries({"candidates": near_rows}, optional={"context": st.just({"user": 3}), "version": near_values}))
def test_rows_turned_into_columns_at_once_mean_what_they_mean_one_by_one(sent: Any) -> None:
    def outcome(form: RequestForm) -> object:
        try:
            parsed = form.parse(json.dumps(sent).encode())
        except InputError as error:
            return str(error)
        return repr((parsed.candidates, parsed.context, parsed.options, parsed.version))

    assert outcome(FORM) == outcome(ONE_BY_ONE)


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_refused_on_purpose(sent: bytes) -> None:
    with pytest.raises(InputError):
        FORM.parse(sent)


def test_the_schema_shows_the_true_features_with_their_types_and_bounds() -> None:
    references, schemas = openapi_schemas([FORM])
    request = schemas[references[0]["$ref"].rsplit("/", 1)[1]]
    assert request["required"] == ["candidates"]
    by_columns, by_rows = request["properties"]["candidates"]["anyOf"]
    shown = schemas[by_columns["$ref"].rsplit("/", 1)[1]]
    assert list(shown["properties"]) == [f.name for f in SCHEMA.features]
    assert shown["additionalProperties"] is False
    item = shown["properties"]["item"]
    assert (item["items"], item["maxItems"], item["minItems"]) == ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5, 1)
    assert item["description"] == "candidate feature, identity, one value; null if missing"
    assert by_rows["maxItems"] == 3
