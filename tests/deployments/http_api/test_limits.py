"""What a request may cost before it is refused: bombs, depth, headers, stalled bodies; on both ways, at the border."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import httpx
import pyarrow as pa
import pytest

from deployments.config import Limits
from deployments.http_api.request_body import SlowBody, decompressed, read_body
from dpiframe_core.errors import TooLarge
from tests.deployments.http_api.test_serve_bypass import Fronted
from tests.deployments.protocol.test_rest import listed
from tests.deployments.serve.test_http_app import LIMITS, Service, expected, request

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import

SERVE = {"x-request-timeout-seconds": "5"}  # has the bypass leave a request to Serve
WAYS = pytest.mark.parametrize("way", [pytest.param({}, id="bypass"), pytest.param(SERVE, id="serve")])
PATHS = pytest.mark.parametrize("path", ["/v1/score", "/v2/models/fake/infer"])
DEEP = 10_000


def code_of(answer: httpx.Response) -> Any:
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


@WAYS
@PATHS
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_of_a_thousand_to_one_is_refused_without_being_expanded(path: str, way: dict[str, str], coding: str) -> None:
    most = 50_000
    fronted = Fronted()
    fronted.service.limits = Limits(max_body_bytes=most, max_rows_per_request=100)
    compress = gzip.compress if coding == "gzip" else zlib.compress
    bomb = compress(b" " * 40_000_000)
    assert len(bomb) < most
    assert 40_000_000 / len(bomb) > 900

    async def body(client: httpx.AsyncClient) -> None:
        tracemalloc.start()
        answer = await client.post(path, content=bomb, headers={"content-encoding": coding, **way})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert answer.status_code == 413
        assert code_of(answer) == f"body: got more than {most} bytes when decompressed, expected at most {most}"
        assert peak < 2_000_000

    fronted.run(body)


@pytest.mark.parametrize("over", [0, 1])
def test_what_a_body_becomes_may_be_as_long_as_a_body_and_not_a_byte_longer(over: int) -> None:
    packed = gzip.compress(b"x" * (LIMITS.max_body_bytes + over))
    if over:
        with pytest.raises(TooLarge):
            decompressed(packed, 31, LIMITS.max_body_bytes)
    else:
        assert decompressed(packed, 31, LIMITS.max_body_bytes) == b"x" * LIMITS.max_body_bytes


def nested(opening: bytes, closing: bytes, inner: bytes = b"1") -> bytes:
    return opening * DEEP + inner + closing * DEEP


def arrow_with(rest: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"item": [1]}, metadata={"request": rest})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


DEEP_BODIES = {
    "lists": nested(b"[", b"]"),
    "objects": nested(b'{"a":', b"}"),
    "lists that never end": b"[" * DEEP,
    "a candidate": b'{"candidates": {"item": ' + nested(b"[", b"]") + b"}}",
    "the context": b'{"candidates": {"item": [1]}, "context": {"user": ' + nested(b"[", b"]") + b"}}",
    "an unknown key": b'{"candidates": {"item": [1]}, "what": ' + nested(b'{"a":', b"}") + b"}",
    "a tensor": b'{"inputs": [{"name": "item", "shape": [1], "datatype": "INT64", "data": ' + nested(b"[", b"]") + b"}]}",
    "a parameter": b'{"inputs": [], "parameters": {"a": ' + nested(b"[", b"]") + b"}}",
}


@WAYS
@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/fake/infer", "/v2/repository/index"])
@pytest.mark.parametrize("form", DEEP_BODIES)
def test_json_of_ten_thousand_levels_is_the_clients_fault(form: str, path: str, way: dict[str, str]) -> None:
    fronted = Fronted()
    fronted.service.limits = Limits()

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post(path, content=DEEP_BODIES[form], headers=way)
        assert answer.status_code in (400, 422), answer.text
        assert (await client.post("/v1/score", json=request(2))).json()["scores"] == expected(2)

    fronted.run(body)


def test_an_arrow_stream_with_such_json_in_its_metadata_is_the_clients_fault() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for form in ("objects", "the context", "an unknown key"):
            content = arrow_with(DEEP_BODIES[form])
            answer = await client.post(
                "/v1/score", content=content, headers={"content-type": "application/vnd.apache.arrow.stream"}
            )
            assert answer.status_code in (400, 422), answer.text

    Service(limits=Limits()).run(body)


@WAYS
@PATHS
@pytest.mark.parametrize(
    "name", ["x-request-id", "content-type", "content-encoding", "inference-header-content-length", "authorization", "x-other"]
)
def test_a_header_of_64_kilobytes_costs_no_more_than_a_refusal_and_is_not_sent_back(
    name: str, path: str, way: dict[str, str]
) -> None:
    """HAProxy refuses it; this is what becomes of one that is sent to a replica itself."""
    fronted = Fronted()

    async def body(client: httpx.AsyncClient) -> None:
        content = json.dumps(request(2) if path == "/v1/score" else listed())
        answer = await client.post(path, content=content, headers={**way, name: "9" * 65_536})
        refuses = name.startswith("content") or (name.startswith("inference") and path != "/v1/score")
        assert answer.status_code in ((415, 422) if refuses else (200,)), answer.text
        assert len(answer.content) + sum(len(k) + len(v) for k, v in answer.headers.raw) < 3000

    fronted.run(body)


class Stalled:
    """A client that sends its headers, perhaps a part of its body, and then nothing, for good."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError


@WAYS
@PATHS
@pytest.mark.parametrize("parts", [(), (b"{",), (b"{", b'"', b"c")], ids=len)
def test_a_body_that_stalls_is_cut(parts: tuple[bytes, ...], path: str, way: dict[str, str]) -> None:
    fronted = Fronted()
    fronted.service.limits = Limits(max_body_s=0.01)

    async def body(_: httpx.AsyncClient) -> None:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(k.encode(), v.encode()) for k, v in way.items()]
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": headers, "query_string": b""}
        async with asyncio.timeout(20):
            await fronted.app(scope, Stalled(*parts).receive, send)
        assert sent[0]["status"] == 408
        assert (b"connection", b"close") in list(sent[0]["headers"])
        error = json.loads(sent[1]["body"])["error"]
        message = "body: got no end of it, expected one within 0.01 s"
        assert (error if path.startswith("/v2") else error["message"]) == message

    fronted.run(body)
    assert [seen.outcome for seen in fronted.service.seen] == ["slow_body"]


def test_a_body_that_drips_is_cut_though_it_never_stalls_and_one_that_ends_in_time_is_whole() -> None:
    async def main() -> None:
        async def dripping() -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"", "more_body": True}

        with pytest.raises(SlowBody):
            await read_body([], dripping, Limits(max_body_s=0.01))
        left = [b"a", b"b", b"c"]

        async def ending() -> dict[str, Any]:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        assert await read_body([], ending, Limits(max_body_s=3600)) == b"abc"

    asyncio.run(main())
