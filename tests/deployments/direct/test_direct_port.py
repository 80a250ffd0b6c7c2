"""The direct port as a client meets it: what is HTTP and what is not, pipelines, slow and rude clients, and its end."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from deployments.config import Limits
from deployments.direct import direct_server, listener, request_head
from tests.deployments.direct.direct_app import served
from tests.deployments.serve.test_http_app import Service, expected, request
from tests.deployments.serving_doubles import FakeEngine, until

GOOD = json.dumps(request(2)).encode()


def post(body: bytes = GOOD, *headers: str, path: str = "/v1/score", length: bool = True) -> bytes:
    own = [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", *headers, *own, "", ""]).encode() + body


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def drip(self, data: bytes) -> None:
        for i in range(len(data)):
            self.send(data[i : i + 1])
            await asyncio.sleep(0.02)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:-2])}
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def scores(self) -> Any:
        status, _, body = await self.answer()
        assert status == 200, body
        return json.loads(body)["scores"]

    async def closed(self) -> bool:
        async with asyncio.timeout(20):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


class Port:
    """A service behind its direct port, for raw clients."""

    def __init__(self, service: Service, limits: Limits, **more: Any) -> None:
        self.service, self.limits, self.more = service, limits, more

    def run(self, body: Callable[["Port"], Awaitable[None]]) -> None:
        async def main(_: httpx.AsyncClient) -> None:
            async with served(self.service.app, self.limits, **self.more) as (self.server, self.port):
                await body(self)

        self.service.run(main)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "direct", False)


def on_port(body: Callable[[Port], Awaitable[None]], *engines: FakeEngine, **limits: Any) -> Service:
    service = Service(*engines)
    service.limits = service.limits.model_copy(update=limits)
    Port(service, service.limits).run(body)
    return service


NO_HTTP: list[tuple[str, bytes, int]] = [
    ("a bare line feed", b"GET /livez HTTP/1.1\nHost: a\r\n\r\n", 400),
    ("a bare line feed in the headers", b"GET /livez HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
    ("a folded header", b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400),
    ("a blank before the colon", b"GET /livez HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    ("a header without a name", b"GET /livez HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n", 400),
    ("a NUL in a header", b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
    ("a carriage return in a header", b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
    ("two lengths", post(GOOD, f"Content-Length: {len(GOOD)}"), 400),
    ("a list of lengths", post(GOOD, f"Content-Length: {len(GOOD)}, {len(GOOD)}", length=False), 400),
    ("a signed length", post(GOOD, f"Content-Length: +{len(GOOD)}", length=False), 400),
    ("an empty length", post(GOOD, "Content-Length:", length=False), 400),
    ("a length and chunks", post(GOOD, "Transfer-Encoding: chunked"), 400),
    ("another coding", post(GOOD, "Transfer-Encoding: gzip, chunked", length=False), 400),
    ("two codings", post(GOOD, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", length=False), 400),
    ("chunks in HTTP/1.0", b"POST /v1/score HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("no chunk", post(b"x\r\n", "Transfer-Encoding: chunked", length=False), 400),
    ("a chunk without its end", post(b"1\r\nxx\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False), 400),
    ("a chunk of 2^36 bytes", post(b"1000000000\r\n", "Transfer-Encoding: chunked", length=False), 400),
    ("trailers", post(b"0\r\nX: y\r\n\r\n", "Transfer-Encoding: chunked", length=False), 400),
    ("no host", b"GET /livez HTTP/1.1\r\n\r\n", 400),
    ("two hosts", b"GET /livez HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    ("a host with a user", b"GET /livez HTTP/1.1\r\nHost: b@a\r\n\r\n", 400),
    ("a host with a blank", b"GET /livez HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    ("a host beyond ASCII", b"GET /livez HTTP/1.1\r\nHost: \xe9\r\n\r\n", 400),
    ("a target with a fragment", b"GET /livez#a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a proxy's target", b"GET http://a/livez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a target with a space", b"GET /li vez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("a target beyond ASCII", b"GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ("TLS", bytes.fromhex("16030100c8010000c40303") + b"\n" * 9, 400),
    ("an empty line first", b"\r\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    ("an expectation", post(GOOD, "Expect: a-miracle"), 417),
    ("too many headers", b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 100 + b"\r\n", 431),
    ("too long headers", b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 15_360 + b"\r\n\r\n", 431),
]


@pytest.mark.parametrize(("sent", "status"), [case[1:] for case in NO_HTTP], ids=[case[0] for case in NO_HTTP])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_no_request_gets_its_status_in_our_form_and_the_end_of_the_connection(
    sent: bytes, status: int, at_once: bool
) -> None:
    async def body(port: Port) -> None:
        async with port.client() as client, port.client() as polite:
            for part in [sent] if at_once else [sent[:30], sent[30:]]:
                client.send(part)
                await asyncio.sleep(0.01)
            got, headers, text = await client.answer()
            assert (got, headers["connection"], headers["content-type"]) == (status, "close", "application/json")
            error = json.loads(text)["error"]
            assert error["message"].startswith("request: got ")
            assert error["request_id"] == headers["x-request-id"]
            assert await client.closed()
            polite.send(post())
            assert await polite.scores() == expected(2)

    assert [seen.outcome for seen in on_port(body).seen] == ["ok"]


def test_a_length_may_begin_with_noughts_and_every_answer_has_the_id_of_its_request() -> None:
    zeros = post(GOOD, f"Content-Length: {len(GOOD):030}", length=False)

    async def body(port: Port) -> None:
        async with port.client() as client:
            client.send(zeros)
            assert await client.scores() == expected(2)
            for path in (b"/livez", b"/readyz", b"/v1/models", b"/none"):
                client.send(b"GET %s HTTP/1.1\r\nHost: a\r\nX-Request-ID: of mine\r\n\r\n" % path)
                assert (await client.answer())[1]["x-request-id"] == "of mine"
            client.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            assert len((await client.answer())[1]["x-request-id"]) == 16

    on_port(body)


def test_a_body_that_is_none_is_told_in_the_form_of_its_route_and_by_its_id() -> None:
    framed = "Transfer-Encoding: chunked", "X-Request-ID: of mine"
    broken = post(b"0\r\nX: y\r\n\r\n", *framed, length=False)

    async def body(port: Port) -> None:
        for sent, ours in ((broken, True), (broken.replace(b"/v1/score", b"/v2/models/fake/infer"), False)):
            async with port.client() as client:
                client.send(sent)
                status, headers, text = await client.answer()
                assert (status, headers["x-request-id"]) == (400, "of mine")
                error = json.loads(text)["error"]
                message = "request: got trailers after the last chunk, expected HTTP/1.1 as RFC 9112 has it"
                assert (error["message"] if ours else error) == message

    on_port(body)


def test_requests_behind_one_another_are_answered_in_their_order() -> None:
    async def body(port: Port) -> None:
        async with port.client() as client:
            bodies = [json.dumps(request(2, i)).encode() for i in range(20)]
            client.send(b"".join(map(post, bodies)) + b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n" + post()[:50])
            for i in range(20):
                assert await client.scores() == expected(2, i)
            assert (await client.answer())[2] == b'{"status":"live"}'
            client.send(post()[50:])
            assert await client.scores() == expected(2)

    on_port(body)


def test_a_request_that_comes_byte_by_byte_or_in_chunks_is_the_same() -> None:
    chunked = b"".join(b"%x;why=not\r\n%s\r\n" % (len(part), part) for part in (GOOD[:1], GOOD[1:90], GOOD[90:])) + b"0\r\n\r\n"
    forms = [post(), post(chunked, "Transfer-Encoding: Chunked", length=False)]

    async def body(port: Port) -> None:
        async with port.client() as client:
            for form in forms:
                for i in range(len(form)):
                    client.send(form[i : i + 1])
                    await asyncio.sleep(0)
                assert await client.scores() == expected(2)
            client.send(forms[1] + forms[0] + forms[1])
            for _ in range(3):
                assert await client.scores() == expected(2)

    on_port(body)


def test_who_expects_100_continue_gets_it_before_the_body() -> None:
    async def body(port: Port) -> None:
        async with port.client() as client:
            whole = post(GOOD, "Expect: 100-continue")
            client.send(whole[: -len(GOOD)])
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(GOOD)
            assert await client.scores() == expected(2)

    on_port(body)


@pytest.mark.parametrize(
    ("version", "header", "closes"),
    [
        ("1.1", "Connection: close", True),
        ("1.1", "Connection: x , Close", True),
        ("1.1", "Connection: keep-alive", False),
        ("1.0", "X: y", True),
        ("1.0", "Connection: Keep-Alive", True),  # else the answer would have to say so: ab -k waits for the end otherwise
    ],
)
def test_a_connection_ends_when_the_client_says_so(version: str, header: str, closes: bool) -> None:
    async def body(port: Port) -> None:
        async with port.client() as client:
            client.send(post(GOOD, header).replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
            status, headers, _ = await client.answer()
            assert (status, headers.get("connection")) == (200, "close" if closes else None)
            if closes:
                assert await client.closed()
            else:
                client.send(post())
                assert await client.scores() == expected(2)

    on_port(body)


def test_a_client_that_is_refused_before_its_body_is_read_still_gets_the_answer() -> None:
    async def body(port: Port) -> None:
        async with port.client() as client:
            client.send(post(b" " * 3_000_000))
            status, headers, text = await client.answer()
            assert (status, headers["connection"]) == (413, "close")
            assert json.loads(text)["error"]["message"] == "Content-Length: got '3000000', expected at most 20000"
            assert await client.closed()

    assert [seen.outcome for seen in on_port(body).seen] == ["too_large"]


@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/fake/infer", "/v2/repository/index"])
@pytest.mark.parametrize("header", ["Content-Length: 400", "Transfer-Encoding: chunked"])
def test_a_body_that_stalls_is_answered_408(path: str, header: str) -> None:
    async def body(port: Port) -> None:
        async with port.client() as client:
            client.send(post(b"5\r\n12345", header, path=path, length=False))
            status, headers, text = await client.answer()
            assert (status, headers["connection"]) == (408, "close")
            assert b"body: got no end of it, expected one within 0.2 s" in text

    service = on_port(body, max_body_s=0.2)
    assert [seen.outcome for seen in service.seen] == ([] if "index" in path else ["slow_body"])


def test_headers_that_stall_and_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_MS", 300)
    monkeypatch.setattr(listener, "_IDLE_MS", 300)

    async def body(port: Port) -> None:
        async with port.client() as stalls, port.client() as drips, port.client() as idle:
            stalls.send(b"GET /livez HT")
            drips.send(post())  # and behind it headers that never end, a byte at a time
            assert await drips.scores() == expected(2)
            dripping = asyncio.create_task(drips.drip(b"GET /livez HTTP/1.1\r\nX: " + b"y" * 1000))
            for client in (stalls, drips):
                status, _, text = await client.answer()
                assert (status, json.loads(text)["error"]["code"]) == (408, "slow_headers")
            dripping.cancel()
            assert await idle.closed()

    on_port(body)


def test_a_client_that_hangs_up_is_taken_out_of_the_queue_and_counted() -> None:
    engine = FakeEngine()
    engine.go.clear()

    async def body(port: Port) -> None:
        batcher = port.service.batchers["fake"]
        async with port.client() as first, port.client() as neighbour:
            first.send(post(json.dumps(request(1)).encode()))
            await until(lambda: engine.batches == [1])
            async with port.client() as impatient, port.client() as half:
                impatient.send(post(json.dumps(request(5)).encode()))
                half.send(post()[:-5])
                await until(lambda: batcher.dispatcher.queued_rows == 5)
            await until(lambda: batcher.dispatcher.queued_rows == 0)
            neighbour.send(post())
            await until(lambda: batcher.dispatcher.queued_rows == 2)
            engine.go.set()
            assert await neighbour.scores() == expected(2)
            assert await first.scores() == expected(1)

    service = on_port(body, engine)
    assert engine.batches == [1, 2]
    assert sorted(seen.outcome for seen in service.seen) == ["cancelled", "cancelled", "ok", "ok"]


def test_a_client_that_closes_its_half_has_hung_up_and_what_it_asked_is_forgotten() -> None:
    """Nothing but an answer that cannot be sent would tell it from one that is gone."""

    async def body(port: Port) -> None:
        async with port.client() as half, port.client() as polite:
            half.send(post())
            half.writer.write_eof()
            assert await half.closed()
            polite.send(post())
            assert await polite.scores() == expected(2)
        await until(lambda: port.server.connections == 0)

    assert sorted(seen.outcome for seen in on_port(body).seen) == ["cancelled", "ok"]


def test_a_client_that_does_not_read_its_answers_holds_up_nobody() -> None:
    async def body(port: Port) -> None:
        deaf = socket.create_connection(("127.0.0.1", port.port))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # until nothing fits any more
            while True:
                deaf.send(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
                await asyncio.sleep(0)
        async with port.client() as polite:
            for _ in range(5):
                polite.send(post())
                assert await polite.scores() == expected(2)
        deaf.close()
        await until(lambda: port.server.connections == 0)

    on_port(body)


def test_beyond_its_connections_newcomers_wait_and_the_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = listener.open_listener
    monkeypatch.setattr(direct_server, "open_listener", lambda limits, most: opened(limits, 2))

    async def body(port: Port) -> None:
        async with port.client() as first, port.client() as second:
            for client in (first, second):
                client.send(post())
                assert await client.scores() == expected(2)
            async with port.client() as third:
                third.send(post())
                first.send(post())
                assert await first.scores() == expected(2)
                assert port.server.connections == 2
                second.writer.close()
                assert await third.scores() == expected(2)

    on_port(body)


def test_draining_answers_what_is_open_and_closes_what_is_not() -> None:
    engine = FakeEngine()
    engine.go.clear()

    async def body(port: Port) -> None:
        async with port.client() as idle, port.client() as busy, port.client() as late:
            busy.send(post())
            await until(lambda: engine.batches == [2])
            late.send(post()[:-5])
            await until(lambda: port.server.connections == 3)
            drained = asyncio.create_task(port.server.drain(20))
            assert await idle.closed()
            late.send(post()[-5:])
            await until(lambda: port.service.batchers["fake"].dispatcher.queued_rows == 2)
            assert not drained.done()
            engine.go.set()
            for client in (busy, late):
                status, headers, _ = await client.answer()
                assert (status, headers["connection"]) == (200, "close")
                assert await client.closed()
            await drained

    on_port(body, engine)


def test_a_mount_below_a_prefix_answers_there_and_nowhere_else() -> None:
    service = Service()

    async def body(port: Port) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.port}") as client:
            for path in ("/v1/score", "/v2/models/fake/infer", "/v1/models", "/livez"):
                assert (await client.post(path, content=b"")).status_code == 404
                assert (await client.post(f"/ctr{path}", content=b"")).status_code in (400, 405)
            assert (await client.post("/ctr/v1/score", content=GOOD)).json()["scores"] == expected(2)
            assert (await client.get("/ctr/v2/models/fake")).status_code == 200
            assert (await client.get("/ctr/v2/mod%65ls/fake")).status_code == 200
            for path in ("/%63tr/v1/models", "/ctr%2fv1/models", "/ctr%2Fv1%2Fmodels", "/ctrl/v1/models"):
                assert (await client.get(path)).status_code == 404  # as HAProxy has it, and who filters paths in front

    Port(service, service.limits, prefix="/ctr").run(body)


def test_a_flood_of_long_heads_is_answered_and_not_kept() -> None:
    before = request_head._kept.cache_info().currsize

    async def body(port: Port) -> None:
        async with port.client() as client:
            for i in range(50):
                client.send(post(GOOD, *[f"X-{i}-{j}: {'y' * 130}" for j in range(95)]))
                assert await client.scores() == expected(2)

    on_port(body)
    assert request_head._kept.cache_info().currsize == before


def test_one_connection_serves_every_route_and_a_head_has_no_body() -> None:
    async def body(port: Port) -> None:
        async with port.client() as client:
            for path, status in (("/v1/models", 200), ("/v2", 200), ("/openapi.json", 200), ("/nowhere", 404)):
                client.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
                got, headers, text = await client.answer()
                assert got == status
                assert json.loads(text)
                assert "date" in headers

    on_port(body)
