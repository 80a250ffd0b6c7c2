"""The client against the real app on loopback, and its patience against a transport that plays the service's moods."""

import ast
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.client import client as module
from deployments.client.client import AsyncClient, Client, ClientError, Retry
from deployments.client.columns import encoded_texts
from deployments.client.scores import Scores
from tests.deployments.live_app import LiveApp
from tests.deployments.serving_doubles import FakeEngine, columns

QUICK = Retry(times=3, first_wait_s=0.001)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveApp]:
    with LiveApp(FakeEngine(), FakeEngine(("click", "buy"), "two", "3")) as app:
        yield app


def wanted(rows: int, first: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(first, first + rows, dtype=np.float32)[:, None] / np.float32(1000) + np.float32(0.25)


def test_raw_columns_give_scores_of_every_task(live: LiveApp) -> None:
    with Client(live.url, "two", "3") as client:
        assert client.ready()
        scores = client.score(columns(5, 10), {"user": 1})
        assert scores.dtype == np.float32
        assert np.array_equal(scores, np.hstack([wanted(5, 10), wanted(5, 10) + np.float32(1)]))


@pytest.mark.parametrize(
    "changed",
    [
        {"item": np.arange(3, dtype=np.int32)},
        {"item": np.arange(3, dtype=np.uint64)},
        {"price": np.array([1.5, 2.5, 3.5], ">f8")},
        {"price": [1, None, 2.5]},
        {"site": ["a", None, "é"]},
        {"site": np.array(["a", "bc", "d"])},
        {"site": np.array(["a", None, "d"], object)},
        {"site": [None, None, None]},
        {"tags": [[], None, ["x", "y", "z"]]},
        {"tags": np.array([["x", "y"]] * 3)},
        {"tags": [(), (), ()]},
        {"tags": [None, None, None]},
        {"tags": {"a": ["x"], "b": None, "c": []}.values()},
    ],
    ids=str,
)
def test_columns_in_the_forms_that_callers_have(live: LiveApp, changed: dict[str, Any]) -> None:
    with Client(live.url, "fake") as client:
        assert np.array_equal(client.score({**columns(3), **changed}, {"user": 1}), wanted(3))


def test_a_single_candidate_and_a_missing_context(live: LiveApp) -> None:
    with Client(live.url, "fake") as client:
        assert np.array_equal(client.score(columns(1, 4), {"user": np.int64(3)}), wanted(1, 4))
        assert np.array_equal(client.score(columns(2, 4), {"user": None}), wanted(2, 4))
        without = {name: column for name, column in columns(2, 4).items() if name != "tags"}
        for tags in (["x", "y"], None):
            assert np.array_equal(client.score(without, {"user": 1, "tags": tags}), wanted(2, 4))


def test_encoded_sections_and_features(live: LiveApp) -> None:
    ids = np.zeros((4, 5), np.int64)
    ids[:, 0] = np.arange(4)
    dense = np.array([[1, 0.25]] * 4, np.float32)
    with Client(live.url, "fake") as client:
        sections = {"context_ids": np.array([[7]]), "candidate_ids": ids, "candidate_dense": dense}
        assert np.array_equal(client.score_encoded(sections), wanted(4))
        assert np.array_equal(client.score_encoded({**sections, "candidate_ids": np.asfortranarray(ids)}), wanted(4))
        features = {
            "user": np.array([7]), "item": ids[:, 0], "site": ids[:, 1], "tags": ids[:, 2:], "price": dense[:, 0],
            "bias": dense[:, 1],
        }  # fmt: skip
        assert np.array_equal(client.score_encoded(features), wanted(4))


def test_the_async_client_scores_many_requests_at_once(live: LiveApp) -> None:
    async def main() -> None:
        async with AsyncClient(live.url, "fake") as client:
            assert await client.ready()
            many = await asyncio.gather(*(client.score(columns(3, i), {"user": 1}) for i in range(20)))
            assert all(np.array_equal(scores, wanted(3, i)) for i, scores in enumerate(many))
            sections = {
                "context_ids": np.array([[7]]), "candidate_ids": np.zeros((1, 5), np.int64),
                "candidate_dense": np.array([[1, 0.25]], np.float32),
            }  # fmt: skip
            assert np.array_equal(await client.score_encoded(sections), wanted(1))

    asyncio.run(main())


def test_a_refusal_is_raised_at_once_with_the_services_words(live: LiveApp) -> None:
    with Client(live.url, "fake") as client, pytest.raises(ClientError) as caught:
        client.score({**columns(3), "item": [1, 2, 5000]}, {"user": 1})
    assert caught.value.status == 422
    assert caught.value.message == "candidates.item[2]: got 5000, expected an id from 0 to 999"
    assert caught.value.request_id
    with Client(live.url, "none") as client, pytest.raises(ClientError, match=r"^404: model: got 'none', expected"):
        client.score(columns(3), {"user": 1})


@pytest.mark.parametrize("name", [".", ".."])
def test_a_version_of_dots_is_not_the_live_one(live: LiveApp, name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: got '\.\.?', expected that of a model or a version$"):
        Client(live.url, "fake", version=name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", 1, 2], "item: got values of ['int', 'str'], expected all text or all numbers"),
        ([True, False, True], "item: got values of ['bool'], expected all text or all numbers"),
        ([[1, None], [2], [3]], "item: got None inside a list, expected values"),
        ([[1], "1^2", [3]], "item: got '1^2' beside lists, expected lists alone"),
        ([[1], 2, None], "item: got 2 beside lists, expected lists alone"),
        ([2**80, 1, 2], "item: got values of ['int'], expected all text or all numbers"),
        (np.zeros((3, 1, 1)), "item: got float64[3, 1, 1], expected numbers in one or two dimensions"),
        ([5], "item: got 1 values, expected 3, as of site"),
        (5, "item: got int, expected a list or an array, a value a candidate"),
        ("abc", "item: got str, expected a list or an array, a value a candidate"),
        (np.array(5), "item: got ndarray, expected a list or an array, a value a candidate"),
        (["a", "\ud800", "b"], "item: got '\\ud800', expected text that UTF-8 can say"),
        (np.array([1j, 2, 3]), "item: got values of ['complex'], expected all text or all numbers"),
    ],
)
def test_a_column_that_cannot_be_sent_is_named(live: LiveApp, values: Any, message: str) -> None:
    with Client(live.url, "fake") as client, pytest.raises(ValueError) as caught:  # noqa: PT011 (its whole text follows)
        client.score({"site": columns(3)["site"], **columns(3), "item": values}, {"user": 1})
    assert str(caught.value) == message


def test_no_candidates_are_refused_before_they_are_sent(live: LiveApp) -> None:
    with Client(live.url, "fake") as client, pytest.raises(ValueError, match=r"^candidates: got none, expected at least one$"):
        client.score(dict.fromkeys(columns(1), ()), {"user": 1})


class Moods(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers with what it is given, one after the other; notes what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self.handle_request(request)


def good(scores: int = 1, degraded: int | None = 0, **changed: Any) -> httpx.Response:
    """So many scores, in the binary form; `changed`: of the output. degraded: None: the answer has no parameters."""
    output = {"name": "scores", "datatype": "FP32", "shape": [scores, 1], "parameters": {"binary_data_size": 4 * scores}}
    parameters = None if degraded is None else {"oov_count": 0, **({"degraded_rows": degraded} if degraded else {})}
    envelope = json.dumps({"parameters": parameters, "outputs": [output | changed]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(envelope))}
    return httpx.Response(200, headers=headers, content=envelope + np.full(scores, 0.5, np.float32).tobytes())


def ours(status: int, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, json={"error": f"it: got {status}, expected 200"}, headers=headers or {})


def sync_score(moods: Moods, **how: Any) -> Any:
    with Client("http://service", "m", retry=QUICK, transport=moods) as client:
        return client.score({"a": [1]}, **how)


def async_score(moods: Moods, **how: Any) -> Any:
    async def main() -> Any:
        async with AsyncClient("http://service", "m", retry=QUICK, transport=moods) as client:
            return await client.score({"a": [1]}, **how)

    return asyncio.run(main())


@pytest.mark.parametrize("score", [sync_score, async_score], ids=["sync", "async"])
@pytest.mark.parametrize(
    "mood",
    [
        lambda: ours(429),
        lambda: ours(429, {"Retry-After": "0"}),
        lambda: ours(429, {"Retry-After": "60", "Retry-After-Ms": "1"}),
        lambda: ours(429, {"Retry-After": "0", "Retry-After-Ms": "1.5"}),
        lambda: ours(503),
        lambda: httpx.Response(503, html="<html>no server</html>"),
        lambda: httpx.Response(500, html="<html>Internal</html>"),
        lambda: httpx.Response(500, text="Internal Server Error"),
        lambda: httpx.Response(500, json={"detail": "not ours"}),
        lambda: httpx.Response(404, text="Path '/v2' not found."),  # HAProxy, until it knows the application
        lambda: httpx.ConnectError("refused"),
        lambda: httpx.ConnectTimeout("no answer to the handshake"),
        lambda: httpx.RemoteProtocolError("closed without an answer"),
        lambda: httpx.ReadError("reset"),
    ],
    ids=lambda mood: "",
)
def test_what_may_pass_is_tried_again(score: Callable[..., Any], mood: Callable[[], Any]) -> None:
    moods = Moods(mood(), mood(), good())
    assert score(moods) == np.float32(0.5)
    assert len(moods.asked) == 3
    always = Moods(*(mood() for _ in range(10)))
    with pytest.raises(ClientError):
        score(always)
    assert len(always.asked) == 1 + QUICK.times


@pytest.mark.parametrize("score", [sync_score, async_score], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("mood", "status"),
    [
        (lambda: ours(422), 422),
        (lambda: ours(404), 404),
        (lambda: ours(413), 413),
        (lambda: ours(500), 500),
        (lambda: ours(504), 504),
        (lambda: httpx.Response(500, json={"error": {"code": "internal", "message": "m"}}), 500),
        (lambda: ours(429, {"Retry-After": "60"}), 429),
        (lambda: ours(429, {"Retry-After": "1", "Retry-After-Ms": "5001"}), 429),
        (lambda: httpx.Response(408, text="timed out"), 408),
        (lambda: httpx.Response(400, html="<html>"), 400),
        (lambda: httpx.ReadTimeout("slow"), 504),
        (lambda: httpx.Response(200, text="hello"), 200),
        (lambda: good(2), 200),
        (lambda: good(name="x"), 200),
        (lambda: good(datatype="INT32"), 200),
        (lambda: good(shape=[1]), 200),
        (lambda: good(shape=[1, 2]), 200),
        (lambda: good(parameters={"binary_data_size": 8}), 200),
        (lambda: good(parameters={}), 200),
    ],
)
def test_what_will_not_pass_is_raised_at_once(score: Callable[..., Any], mood: Callable[[], Any], status: int) -> None:
    moods = Moods(mood(), good())
    with pytest.raises(ClientError) as caught:
        score(moods)
    assert caught.value.status == status
    assert len(moods.asked) == 1


def test_the_wait_is_what_the_service_asks_for_in_milliseconds_and_up_to_a_quarter_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    by_chance = iter((0.0, 0.5, 1.0))
    monkeypatch.setattr(random, "random", lambda: next(by_chance))
    asked = [
        {"Retry-After": "1", "Retry-After-Ms": "200"},
        {"Retry-After": "2"},
        {"Retry-After": "5", "Retry-After-Ms": "5000"},
    ]
    assert sync_score(Moods(*(ours(429, headers) for headers in asked), good())) == np.float32(0.5)
    assert waits == pytest.approx([0.2, 2 * 1.125, 5 * 1.25])


def test_a_version_of_odd_characters_reaches_its_model() -> None:
    odd = "1#a?b=c%2F+~d"
    with LiveApp(FakeEngine(version=odd)) as app, Client(app.url, "fake", odd) as client:
        assert np.array_equal(client.score(columns(2), {"user": 1}), wanted(2))


def envelopes(moods: Moods) -> list[dict[str, Any]]:
    return [json.loads(r.content[: int(r.headers["Inference-Header-Content-Length"])]) for r in moods.asked]


def test_each_try_tells_the_service_what_is_left_of_the_deadline() -> None:
    moods = Moods(ours(503), ours(503), good())
    sync_score(moods, deadline_s=20.0, priority=3)
    asked = envelopes(moods)
    left = [one["parameters"]["deadline_ms"] for one in asked]
    assert 20_000 >= left[0] > left[1] > left[2] > 0
    assert {one["parameters"]["priority"] for one in asked} == {3}


@pytest.mark.parametrize("score", [sync_score, async_score], ids=["sync", "async"])
def test_no_wait_goes_beyond_the_deadline(score: Callable[..., Any]) -> None:
    moods = Moods(ours(429, {"Retry-After": "5"}), good())
    with pytest.raises(ClientError, match="429"):
        score(moods, deadline_s=4.0)
    assert len(moods.asked) == 1
    with pytest.raises(ClientError, match=r"504: deadline: got past -1 s, expected the scores before it"):
        score(Moods(good()), deadline_s=-1.0)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
def test_texts_on_the_wire_are_lengths_and_bytes(texts: Sequence[bytes]) -> None:
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    assert encoded_texts(texts) == data


def test_the_client_needs_neither_ray_nor_fastapi_nor_torch() -> None:
    unwanted = {"ray", "fastapi", "torch", "pydantic", "pyarrow"}
    code = f"from deployments.client import Client; import sys; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for path in Path(module.__file__).parent.glob("*.py"):
        tops = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        assert tops <= {*sys.stdlib_module_names, "httpx", "numpy", "deployments"}


@pytest.mark.parametrize("score", [sync_score, async_score], ids=["sync", "async"])
def test_scores_say_how_many_rows_were_late(score: Callable[..., Any]) -> None:
    assert score(Moods(good())).degraded_rows == score(Moods(good(degraded=None))).degraded_rows == 0
    found = score(Moods(good(degraded=3)))
    assert (found.degraded_rows, found[:, 0].degraded_rows, found.tolist()) == (3, 3, [[0.5]])
    assert isinstance(found, Scores)
    with Client("http://service", "m", transport=Moods(good(3, degraded=2))) as client:
        parts = client.score_together([({"a": [1]}, {}), ({"a": [2, 3]}, {})])
    assert [(part.shape, part.degraded_rows) for part in parts] == [((1, 1), 2), ((2, 1), 2)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([{"a": 1}, {"b": 1}], {}), "candidates[1]: got other features than "),
        (([{"a": 1}, 3], {}), "candidates[1]: got int, expected a dict of feature values"),
        (([], {}), "candidates: got none, expected at least one"),
        ((None, {}), "candidates: got NoneType, expected columns by feature, a list of dicts, or"),
        (({"a": [1]}, "b"), "context: got str, expected a mapping from features to their values"),
    ],
)
def test_what_is_no_columns_is_refused_before_it_is_sent(given: Any, message: str) -> None:
    with Client("http://service", "m", transport=Moods()) as client:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            client.score(*given)
        with pytest.raises(ValueError, match=rf"^requests\[1\] {re.escape(message)}"):
            client.score_together([({"a": [1]}, {}), given])


@pytest.mark.parametrize("deadline", [float("inf"), float("nan"), "1"])
def test_a_deadline_is_a_number(deadline: Any) -> None:
    with pytest.raises(ValueError, match=f"^deadline_s: got {deadline!r}, expected a finite number$"):
        sync_score(Moods(), deadline_s=deadline)


def test_several_users_are_scored_together_as_each_alone(live: LiveApp) -> None:
    users = [({**columns(rows, rows), "site": ["a"] * rows}, {"user": rows}) for rows in (3, 1, 4)]

    async def together() -> list[Any]:
        async with AsyncClient(live.url, "fake") as client:
            return await client.score_together(users)

    with Client(live.url, "fake") as client:
        alone = [client.score(*user) for user in users]
        generated = [({name: iter(values) for name, values in own.items()}, beside) for own, beside in users]
        for got in (client.score_together(users, deadline_s=20), client.score_together(generated), asyncio.run(together())):
            assert all(np.array_equal(one, other) for one, other in zip(got, alone, strict=True))
        with pytest.raises(ClientError, match=r"^422: candidates.price\[4\]: got nan"):
            client.score_together([*users[:2], ({**users[2][0], "price": [float("nan")] * 4}, {"user": 1})])
    with pytest.raises(
        ValueError, match=r"^requests\[1\]: got other features than requests\[0\] on a side, expected the same$"
    ):
        client.score_together([users[0], (users[1][0], {})])
    with pytest.raises(ValueError, match=r"^requests\[0\]\.site: got 3 values, expected 2, as of item$"):
        client.score_together([({**users[0][0], "item": [1, 2]}, {"user": 1})])
    with pytest.raises(ValueError, match=r"^requests\[1\]\.candidates: got none, expected at least one$"):
        client.score_together([users[0], (dict.fromkeys(users[0][0], ()), {"user": 1})])
