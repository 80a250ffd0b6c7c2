"""Clients that send garbage, hang up, or send too much. None may get a 500, and a polite client after each must be served."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.deployments.serve.test_http_app import LIMITS, Service, expected, refused, request
from tests.deployments.serving_doubles import FakeEngine, columns, until

GOOD = json.dumps(request(2)).encode()

RUDE: list[tuple[str, bytes, dict[str, str], int]] = [
    ("empty", b"", {}, 400),
    ("null", b"null", {}, 422),
    ("number", b"1", {}, 422),
    ("list", b"[]", {}, 422),
    ("text", b'"score this"', {}, 422),
    ("html", b"<html>", {}, 400),
    ("nul bytes", b"\x00" * 100, {}, 400),
    ("cut off", GOOD[:-5], {}, 400),
    ("trailing", GOOD + b"{}", {}, 400),
    ("invalid utf-8", GOOD.replace(b'"a"', b'"\xc3\x28"'), {}, 400),
    ("lone surrogate", GOOD.replace(b'"a"', b'"\\ud800"'), {}, 400),
    ("surrogate key", b'{"\\udfff": 1}', {}, 400),
    ("utf-16", GOOD.decode().encode("utf-16"), {}, 400),
    ("deep lists", b'{"candidates": ' + b"[" * 9000, {}, 400),
    ("deep objects", b'{"a":' * 3000 + b"1" + b"}" * 3000, {}, 400),
    ("huge integer", GOOD.replace(b"0.25", b"1" + b"0" * 400), {}, 422),
    ("endless integer", GOOD.replace(b"0.25", b"1" * 9000), {}, 400),
    ("huge exponent", GOOD.replace(b"0.25", b"1e99999"), {}, 422),
    ("nan", GOOD.replace(b"0.25", b"NaN"), {}, 422),
    ("many unknown keys", b"{" + b",".join(b'"k%d":1' % i for i in range(1500)) + b', "candidates": {"item": [1]}}', {}, 422),
    ("escaped key", GOOD.replace(b'"candidates"', b'"c\\u0061ndidates"'), {}, 200),
    ("equal keys", GOOD.replace(b'"item"', b'"item": [1, 2], "item"'), {}, 200),
    ("nul in text", GOOD.replace(b'"a"', b'"\\u0000"'), {}, 200),
    ("media type", GOOD, {"content-type": "text/plain"}, 415),
    ("curl -d", GOOD, {"content-type": "application/x-www-form-urlencoded"}, 415),
    ("odd media type", GOOD, {"content-type": ";;;"}, 415),
    ("json with charset", GOOD, {"content-type": "Application/JSON; charset=utf-8"}, 200),
    ("a json dialect", GOOD, {"content-type": "application/vnd.x+json"}, 200),
    ("gzip that is none", GOOD, {"content-encoding": "gzip"}, 422),
    ("gzip", gzip.compress(GOOD), {"content-encoding": "GZIP"}, 200),
    ("deflate", zlib.compress(GOOD), {"content-encoding": "deflate"}, 200),
    ("gzip cut short", gzip.compress(GOOD)[:-9], {"content-encoding": "gzip"}, 422),
    ("gzip and more", gzip.compress(GOOD) + b"x", {"content-encoding": "gzip"}, 422),
    ("a bomb", gzip.compress(b" " * 10_000_000), {"content-encoding": "gzip"}, 413),
    ("an unknown compression", GOOD, {"content-encoding": "br"}, 415),
    ("two compressions", GOOD, {"content-encoding": "gzip, deflate"}, 415),
    ("identity", GOOD, {"content-encoding": "identity"}, 200),
    ("too long", b" " * (LIMITS.max_body_bytes + 1), {}, 413),
    ("exactly as long as allowed", GOOD.ljust(LIMITS.max_body_bytes), {}, 200),
    ("lying length", GOOD, {"content-length": "9" * 30}, 413),
    ("senseless length", GOOD, {"content-length": "-1"}, 200),
]


@pytest.mark.parametrize(("sent", "headers", "status"), [case[1:] for case in RUDE], ids=[case[0] for case in RUDE])
def test_a_rude_body_gets_its_status_and_a_polite_client_is_served_next(
    sent: bytes, headers: dict[str, str], status: int
) -> None:
    if Service.direct and "content-length" in headers:
        pytest.skip("a client refuses to send it")

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", content=sent, headers=headers)
        assert answer.status_code == status, answer.text
        if status != 200:
            refused(answer, status, answer.json()["error"]["code"])
        polite = await client.post("/v1/score", json=request(2))
        assert polite.json()["scores"] == expected(2)

    Service().run(body)


async def call(
    app: Any, messages: Iterable[dict[str, Any]], headers: Iterable[tuple[bytes, bytes]] = (), path: str = "/v1/score"
) -> list[dict[str, Any]]:
    """Calls the app as a server would, with the given incoming messages and then silence; what it sends back."""
    incoming, sent = list(messages), []

    async def receive() -> dict[str, Any]:
        while not incoming:
            await asyncio.sleep(0.001)
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path}
    rest = {"raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "headers": list(headers)}
    await app({**scope, **rest}, receive, send)
    return sent


def test_a_body_without_a_length_is_cut_off_at_the_limit() -> None:
    service, taken = Service(), []

    async def body(client: httpx.AsyncClient) -> None:
        def chunks() -> Iterable[dict[str, Any]]:
            for _ in range(1000):
                taken.append(5000)
                yield {"type": "http.request", "body": b" " * 5000, "more_body": True}

        endless = chunks()

        async def receive() -> dict[str, Any]:
            return next(iter(endless))

        answers: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": [], "query_string": b"", "root_path": ""}
        await service.app(scope, receive, send)
        assert answers[0]["status"] == 413
        assert (b"connection", b"close") in answers[0]["headers"]

    service.run(body)
    assert sum(taken) <= LIMITS.max_body_bytes + 5000


def test_a_body_in_many_chunks_is_read_whole() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        parts = [{"type": "http.request", "body": GOOD[i : i + 7], "more_body": True} for i in range(0, len(GOOD), 7)]
        sent = await call(service.app, [*parts, {"type": "http.request"}])
        assert sent[0]["status"] == 200
        assert json.loads(sent[1]["body"])["scores"] == expected(2)

    service.run(body)


def test_a_client_that_hangs_up_before_its_body_is_whole_is_forgotten() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        half = {"type": "http.request", "body": GOOD[:20], "more_body": True}
        assert await call(service.app, [half, {"type": "http.disconnect"}]) == []

    service.run(body)
    assert [seen.outcome for seen in service.seen] == ["cancelled"]
    assert service.engines[0].batches == []


def test_a_client_that_hangs_up_while_it_waits_is_taken_out_of_the_queue() -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine)

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/score", json=request(1)))
        await until(lambda: engine.batches == [1])
        neighbour = asyncio.create_task(client.post("/v1/score", json=request(2)))
        await until(lambda: service.batchers["fake"].dispatcher.queued_rows == 2)
        whole = {"type": "http.request", "body": json.dumps(request(5)).encode()}
        assert await call(service.app, [whole, {"type": "http.disconnect"}]) == []
        assert service.batchers["fake"].dispatcher.queued_rows == 2
        engine.go.set()
        assert (await neighbour).json()["scores"] == expected(2)
        await first

    service.run(body)
    assert engine.batches == [1, 2]
    assert service.seen[0].outcome == "cancelled"


def test_a_cancellation_from_outside_is_not_taken_for_a_hang_up() -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine)

    async def body(client: httpx.AsyncClient) -> None:
        whole = {"type": "http.request", "body": GOOD}
        task = asyncio.create_task(call(service.app, [whole]))
        await until(lambda: engine.batches == [2])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    service.run(body)


def test_a_websocket_is_closed() -> None:
    service = Service()

    async def body(client: httpx.AsyncClient) -> None:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/v1/score", "headers": [], "query_string": b"", "root_path": ""}
        await service.app(scope, receive, send)
        assert [message["type"] for message in sent] == ["websocket.close"]

    service.run(body)


def test_a_crowd_of_rude_and_polite_clients_leaves_the_polite_ones_their_own_scores() -> None:
    sendable = [case for case in RUDE if "content-length" not in case[2]]

    async def body(client: httpx.AsyncClient) -> None:
        async def polite(i: int) -> None:
            answer = await client.post("/v1/score", json=request(1 + i % 5, 10 * (i % 50)))
            assert answer.json()["scores"] == expected(1 + i % 5, 10 * (i % 50))

        async def rude(i: int) -> None:
            _, sent, headers, status = sendable[i % len(sendable)]
            assert (await client.post("/v1/score", content=sent, headers=headers)).status_code == status

        async def impatient(i: int) -> None:
            task = asyncio.create_task(client.post("/v1/score", json=request(candidates=columns(90))))
            await asyncio.sleep(0.001 * (i % 3))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*[(polite, rude, impatient)[i % 3](i) for i in range(150)])

    Service().run(body)
