"""The port of Serve's server, taken over from uvicorn: who answers what there, and how it ends."""

import asyncio
import os
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from deployments.config import parse_config
from deployments.host_sockets.accepting import Accepting
from deployments.http_api.serve_bypass import BypassMiddleware, ServeBypass
from deployments.serve import replica_app
from dpiframe_core.errors import ConfigError
from tests.deployments.http_api.test_serve_bypass import FOR_SERVE, Serve, no_replica  # noqa: F401 (a fixture)
from tests.deployments.serve.test_http_app import Service, expected, request
from tests.deployments.serving_doubles import FakeEngine, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@asynccontextmanager
async def started(service: Service, prefix: str = "", root: str = "") -> AsyncIterator[SimpleNamespace]:
    """uvicorn as Serve starts it in a replica, which has installed its front; `serve` notes what is left to Serve."""
    config = parse_config({"models": [{"path": "m"}], "route_prefix": prefix or "/"}, "test")
    state, loop = service.app.state, asyncio.get_running_loop()
    bypass = ServeBypass(
        state.score, state.infer, prefix, loop,
        answers=lambda front, root, listening: replica_app._serves_port(config, service.app, front, root, listening),
    )  # fmt: skip
    bypass.install()
    serve = Serve(service.app)
    front = BypassMiddleware(serve, bypass)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(lambda: front, factory=True, lifespan="off", log_level="critical", root_path=root))
    serving = loop.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        try:
            yield SimpleNamespace(client=client, bypass=bypass, serve=serve, port=port, server=server, serving=serving)
        finally:
            await bypass.close(1)
            server.should_exit = True
            await serving


def test_scoring_is_answered_by_the_listener_and_all_else_by_serve_on_the_same_port() -> None:
    service = Service()

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service) as at:
            answer = await at.client.post("/v1/score", json=request(2))
            assert answer.json()["scores"] == expected(2)
            assert "server" not in answer.headers  # uvicorn says its name
            assert at.serve.paths == []
            assert (await at.client.get("/v1/models?all=1")).json()["models"][0]["name"] == "fake"
            assert (await at.client.get("/-/a%20path")).status_code == 404
            assert at.serve.paths == ["/v1/models", "/-/a path"]
            for name in FOR_SERVE:
                del at.serve.paths[:]
                assert (await at.client.post("/v1/score", json=request(1), headers={name: "1"})).status_code == 200
                assert at.serve.paths == ["/v1/score"]
            assert (at.server.server_state.total_requests, at.bypass.open) == (0, 0)

    service.run(body)


def test_routes_lie_below_the_prefix() -> None:
    service = Service()

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service, "/ads") as at:
            assert (await at.client.post("/ads/v1/score", json=request(1))).json()["scores"] == expected(1)
            assert at.serve.paths == []
            await at.client.post("/v1/score", json=request(1))
            assert at.serve.paths == ["/v1/score"]

    service.run(body)


def test_a_stop_answers_what_is_open_and_lets_nobody_else_in() -> None:
    engine = FakeEngine()
    engine.go.clear()
    service = Service(engine)

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service) as at:
            waiting = asyncio.create_task(at.client.post("/v1/score", json=request(1)))
            await until(lambda: engine.batches == [1])
            closing = asyncio.create_task(at.bypass.close(5))
            await asyncio.sleep(0.05)
            assert not closing.done()
            with pytest.raises(httpx.ConnectError):
                await httpx.AsyncClient(base_url=at.client.base_url).get("/livez")
            engine.go.set()
            answer = await waiting
            assert (answer.json()["scores"], answer.headers["connection"]) == (expected(1), "close")
            await closing
            at.bypass.taken = None  # which the end would close again

    service.run(body)


def test_nobody_else_is_let_in_from_when_serve_ends_its_server_and_who_is_here_is_served_on() -> None:
    service = Service()

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service) as at:
            assert (await at.client.post("/v1/score", json=request(1))).status_code == 200
            with socket.create_connection(("127.0.0.1", at.port)) as early:  # nobody has accepted it yet
                at.server.should_exit = True
                await at.serving
                with pytest.raises(httpx.ConnectError):
                    await httpx.AsyncClient(base_url=at.client.base_url).get("/livez")
                assert (await at.client.post("/v1/score", json=request(2))).json()["scores"] == expected(2)
                early.setblocking(False)
                early.send(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
                reader, writer = await asyncio.open_connection(sock=early)
                assert (await reader.readline()).split()[1] == b"200"
                writer.close()

    service.run(body)


def test_serve_s_own_root_is_part_of_what_it_is_told() -> None:
    service = Service()

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service, root="/outer") as at:
            assert (await at.client.post("/v1/score", json=request(1))).json()["scores"] == expected(1)
            await at.client.get("/v1/models")
            assert at.serve.paths == ["/outer/v1/models"]

    service.run(body)


@pytest.mark.parametrize("why", ["no listener", "no replica"])
def test_without_a_listener_or_a_replica_uvicorn_answers(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ConfigError("http.direct_port: got no listener")

    if why == "no listener":
        monkeypatch.setattr(replica_app, "DirectServer", missing)
    else:
        monkeypatch.setattr(ServeBypass, "install", lambda self: None)
    service = Service()

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service) as at:
            answer = await at.client.post("/v1/score", json=request(2))
            assert (answer.json()["scores"], answer.headers["server"]) == (expected(2), "uvicorn")
            assert at.bypass.taken is None

    service.run(body)


@pytest.mark.parametrize("why", ["full", "no descriptor"])
def test_newcomers_wait_while_there_is_no_room_and_the_log_says_so(why: str, caplog: pytest.LogCaptureFixture) -> None:
    class Server:
        full, lacking = why == "full", why != "full"
        taken: list[int] = []  # noqa: RUF012

        def accept(self, listening: int, most: int) -> list[int]:
            if self.full:
                return []
            if self.lacking:
                raise OSError(24, "Too many open files")
            return [socket.fromfd(listening, socket.AF_INET, socket.SOCK_STREAM).accept()[0].detach()]

        def adopt(self, clients: list[int]) -> int:
            self.taken += clients
            return len(clients)

        async def drain(self, within_s: float) -> None: ...

    async def main(listening: socket.socket) -> None:
        server = Server()
        accepting = Accepting(server, listening)
        with socket.create_connection(listening.getsockname()):
            await asyncio.sleep(0.35)
            assert server.taken == []
            server.full = server.lacking = False
            await until(lambda: len(server.taken) == 1)
        server.lacking = True
        await accepting.close(0)
        for client in server.taken:
            os.close(client)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(main(socket.create_server(("127.0.0.1", 0))))
    (said,) = [record.message for record in caplog.records if "newcomers wait" in record.message]
    assert ("as many connections as may be" if why == "full" else "Too many open files") in said


def test_a_server_that_speaks_tls_keeps_its_port() -> None:
    asked: list[object] = []

    async def main(listening: socket.socket) -> None:
        bypass = ServeBypass(None, None, "", asyncio.get_running_loop(), answers=lambda *of: asked.append(of))  # type: ignore[arg-type]
        bypass.install()
        servers = [SimpleNamespace(sockets=[listening])]
        bypass.take(SimpleNamespace(config=SimpleNamespace(is_ssl=True, root_path=""), servers=servers), None)  # type: ignore[arg-type]
        assert asked == []
        bypass.take(SimpleNamespace(config=SimpleNamespace(is_ssl=False, root_path=""), servers=servers), None)  # type: ignore[arg-type]
        assert len(asked) == 1

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(main(listening))


def test_the_next_server_of_the_process_is_uvicorns_own_again() -> None:
    service = Service()

    async def body(_: httpx.AsyncClient) -> None:
        async with started(service):
            assert uvicorn.Server.startup.__qualname__ == "Server.startup"

    service.run(body)
