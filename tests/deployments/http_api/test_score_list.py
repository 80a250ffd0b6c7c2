"""Several requests in one body of `POST /v1/score`: each is scored, or refused, as if it had come alone."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.config import Limits
from deployments.http_api import score_list
from dpiframe_core.errors import InputError
from tests.deployments.serve.test_http_app import Service, expected, refused, request
from tests.deployments.serving_doubles import FakeEngine, until


async def listed(client: httpx.AsyncClient, requests: list[Any], **headers: str) -> list[dict[str, Any]]:
    answer = await client.post("/v1/score", json=requests, headers=headers)
    assert answer.status_code == 200, answer.text
    answers: list[dict[str, Any]] = answer.json()
    assert len(answers) == len(requests)
    return answers


@pytest.mark.usefixtures("both_ways")
def test_answers_come_in_the_order_of_the_requests_and_each_counts_alone() -> None:
    service = Service(FakeEngine(), FakeEngine(("click", "buy"), "two", "3"))

    async def body(client: httpx.AsyncClient) -> None:
        sent = [request(3, 10, model="fake"), request(2, 5, model="two"), request(4, 0, model="fake", options={"top_k": 1})]
        one, two, three = await listed(client, sent, **{"X-Request-ID": "abc"})
        assert (one["scores"], one["model"], one["request_id"]) == (expected(3, 10), "fake", "abc.0")
        assert (two["scores"]["click"], two["model"], two["version"]) == (expected(2, 5), "two", "3")
        assert three["scores"] == expected(4)
        assert three["top_k"]["indices"] == [3]
        assert sorted((seen.model, seen.outcome, seen.rows) for seen in service.seen) == [
            ("fake", "ok", 3), ("fake", "ok", 4), ("two", "ok", 2),
        ]  # fmt: skip

    service.run(body)


@pytest.mark.usefixtures("both_ways")
def test_what_is_wrong_with_one_is_told_in_its_place_and_costs_no_other() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        wrong = request(3)
        wrong["candidates"]["site"][1] = 5
        late = request(2, options={"deadline_ms": 1e-6})
        sent = [request(2), wrong, {"candidates": {}}, [1], late, {**request(1), "model": "none"}, request(2, 7)]
        answers = await listed(client, sent)
        assert (answers[0]["scores"], answers[6]["scores"]) == (expected(2), expected(2, 7))
        told = [answers[i]["error"] for i in (1, 2, 3, 4, 5)]
        assert told[0]["message"] == "requests[1].candidates.site[1]: got 5, expected text or null"
        assert told[0]["where"] == "requests[1].candidates.site[1]"
        assert told[1]["message"] == "requests[2].candidates: got {}, expected at least one feature"
        assert told[2]["message"].startswith("requests[3]: got a list of 1 values, expected an object")
        assert told[4]["message"] == "requests[5].model: got 'none', expected one of ['fake']"
        codes = ["invalid_input", "invalid_input", "invalid_input", "deadline_exceeded", "model_not_found"]
        assert [error["code"] for error in told] == codes
        assert [error["status"] for error in told] == [422, 422, 422, 504, 404]
        assert sorted(seen.outcome for seen in service.seen) == sorted([*codes, "ok", "ok"])

    service.run(body)


@pytest.mark.parametrize(
    ("where", "told"),
    [("body", "requests[2]"), ("candidates.body[1]", "requests[2].candidates.body[1]"), ("body_mass", "requests[2].body_mass")],
)
def test_a_feature_called_body_keeps_its_name_in_a_message(where: str, told: str) -> None:
    fault = score_list.fault_body(InputError(where, 5, "text or null"), 2, "r")["error"]
    assert isinstance(fault, dict)
    assert (fault["where"], fault["message"]) == (told, f"{told}: got 5, expected text or null")


def test_requests_beyond_the_queue_are_refused_in_their_places() -> None:
    engine = FakeEngine()
    service = Service(engine, max_queued_rows=8, limits=Limits(max_rows_per_request=64))

    async def body(client: httpx.AsyncClient) -> None:
        engine.go.clear()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(listed(client, [request(4) for _ in range(12)]))
            await until(lambda: any(seen.outcome == "overloaded" for seen in service.seen))
            engine.go.set()
        answers = waiting.result()
        shed = [answer["error"] for answer in answers if "error" in answer]
        assert shed
        assert {(error["code"], error["status"], error["retry_after_s"] > 0) for error in shed} == {("overloaded", 429, True)}
        assert all(answer["scores"] == expected(4) for answer in answers if "error" not in answer)

    service.run(body)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("sent", "status", "code", "message"),
    [
        (b"[]", 422, "invalid_input", "requests: got [], expected at least one request"),
        (b"[{]", 400, "not_json", "body: got invalid JSON"),
        (b' [{"candidates": {"item": [1]}}, ', 400, "not_json", "body: got invalid JSON"),
        (b'[{"candidates": {"item": [nul]}}]', 400, "not_json", "body: got invalid JSON"),
        (b"[{}] {}", 400, "not_json", "body: got invalid JSON"),
        (b"[{},]", 400, "not_json", "body: got invalid JSON"),
        (json.dumps([request(40)] * 3).encode(), 413, "too_large", "requests: got 120 candidates in all, expected at most 1"),
        (
            b"[" + b",".join([b"{}"] * 257) + b"]",
            413,
            "too_large",
            "requests: got more than 256 requests, expected at most 256",
        ),
    ],
)
def test_what_is_wrong_with_all_of_it_is_refused_as_ever(sent: bytes, status: int, code: str, message: str) -> None:
    service = Service(limits=Limits(max_rows_per_request=100))

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", content=sent, headers={"content-type": "application/json"})
        assert refused(answer, status, code)["message"].startswith(message)

    service.run(body)


def test_items_are_cut_where_json_cuts_them() -> None:
    items: list[Any] = [{"a": '],[{"\\'}, [], "x,y", 1.5, None, {"b": [[{}], "é"]}]
    for indent in (None, 1):
        found = score_list.items_of(json.dumps(items, indent=indent, ensure_ascii=False).encode())
        assert [json.loads(item) for item in found] == items


@pytest.mark.usefixtures("both_ways")
def test_a_number_that_json_lacks_is_for_the_request_that_has_it_as_when_it_comes_alone() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        bad = json.dumps(request(2)).replace("0.25", "NaN").encode()
        alone = await client.post("/v1/score", content=bad)
        both = await client.post("/v1/score", content=b"[%s,%s]" % (bad, json.dumps(request(2)).encode()))
        first, second = both.json()
        assert (alone.status_code, both.status_code, first["error"]["status"]) == (422, 200, 422)
        assert first["error"]["got"] == alone.json()["error"]["got"] == "nan"
        assert second["scores"] == expected(2)

    service.run(body)
