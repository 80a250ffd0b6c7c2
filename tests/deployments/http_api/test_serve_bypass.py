"""What is answered in front of Serve and what goes on to it, and that neither a request nor an error is lost on the way."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from deployments.access.gate import Gate
from deployments.config import parse_config
from deployments.http_api.serve_bypass import _FOR_SERVE, BypassMiddleware, ServeBypass, middlewares
from deployments.serve.replica_app import OneRequestId
from tests.deployments.http_api.test_rude_clients import RUDE, call
from tests.deployments.protocol.test_rest import listed
from tests.deployments.serve.test_http_app import Service, expected, refused, request
from tests.deployments.serving_doubles import FakeEngine, until

# Ray's generated modules warn at import with today's pydantic and protobuf.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

GOOD = json.dumps(request(2)).encode()
FOR_SERVE = [
    "x-request-timeout-seconds",
    "X-Request-Timeout-Seconds",
    "x-request-disconnect-disabled",
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
    "Serve-Multiplexed_Model-Id",
]
Body = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(autouse=True)
def no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own, as a replica is."""
    monkeypatch.setattr(ServeBypass, "installed", None)
    monkeypatch.setattr(uvicorn.Server, "startup", uvicorn.Server.startup)  # which a hook has changed until a server starts


class Serve:
    """What is behind the front: notes what comes through, and lets the app answer it."""

    def __init__(self, app: Any) -> None:
        self._app = OneRequestId(app)
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await self._app(scope, receive, send)


class Fronted:
    """A service with the front before it. `bypass` and `serve` are there once it runs."""

    def __init__(self, *engines: FakeEngine, prefix: str = "/", gate: Gate | None = None) -> None:
        self.service, self._prefix = Service(*engines, gate=gate), prefix

    def run(self, body: Body) -> None:
        async def fronted(_: httpx.AsyncClient) -> None:
            state = self.service.app.state
            prefix = self._prefix.rstrip("/")
            self.bypass = ServeBypass(state.score, state.infer, prefix, asyncio.get_running_loop())
            self.serve = Serve(self.service.app)
            self.app = BypassMiddleware(self.serve, self.bypass)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test") as client:
                await body(client)

        self.service.run(fronted)


def test_scoring_in_every_form_is_answered_without_serve_and_anything_else_by_it() -> None:
    fronted = Fronted()

    async def body(client: httpx.AsyncClient) -> None:
        infer = listed()
        for path in ("/v2/models/fake/infer", "/v2/models/fake/versions/7/infer"):
            answer = await client.post(path, json=infer)
            assert answer.status_code == 200, answer.text
        assert (await client.post("/v1/score", json=request(3, 5))).json()["scores"] == expected(3, 5)
        assert fronted.serve.paths == []
        others = {
            ("GET", "/v1/score"): 405,
            ("POST", "/v1/score/"): 404,
            ("GET", "/v2/models/fake/infer"): 405,
            ("POST", "/v2/models/fake/infer/"): 200,
            ("POST", "/v2/repository/index"): 200,
            ("GET", "/v2/models/fake"): 200,
            ("GET", "/v1/models"): 200,
            ("GET", "/readyz"): 200,
            ("GET", "/openapi.json"): 200,
            ("POST", "/else/v1/score"): 404,
        }
        for (method, path), status in others.items():
            content = None if method == "GET" or path.endswith("index") else json.dumps(infer)
            assert (await client.request(method, path, content=content)).status_code == status, path
        assert fronted.serve.paths == [path for _, path in others]

    fronted.run(body)
    assert fronted.bypass.open == 0


@pytest.mark.parametrize("header", FOR_SERVE)
def test_a_request_that_asks_something_of_serve_goes_through_it(header: str) -> None:
    fronted = Fronted()

    async def body(client: httpx.AsyncClient) -> None:
        for path in ("/v1/score", "/v2/models/fake/infer"):
            await client.post(path, content=GOOD, headers={header: "5"})
        assert fronted.serve.paths == ["/v1/score", "/v2/models/fake/infer"]

    fronted.run(body)


def test_these_are_the_spellings_that_serve_knows() -> None:
    from ray.serve._private import constants
    from ray.serve._private.http_util import parse_disconnect_disabled_header, parse_request_timeout_header

    assert parse_request_timeout_header({b"x-request-timeout-seconds": b"5"}, None) == 5
    assert parse_disconnect_disabled_header({b"x-request-disconnect-disabled": b"?1"})
    names = {name for name in _FOR_SERVE if name.startswith(b"serve")}
    assert {name.decode().replace("-", "_") for name in names} == {constants.SERVE_MULTIPLEXED_MODEL_ID}
    assert len(names) == 2 ** constants.SERVE_MULTIPLEXED_MODEL_ID.count("_")


@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_under_a_prefix_the_paths_are_those_below_it(root: str) -> None:
    fronted = Fronted(prefix="/ads/top")

    async def body(_: httpx.AsyncClient) -> None:
        transport = httpx.ASGITransport(fronted.app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://test{root}") as client:
            assert (await client.post("/ads/top/v1/score", json=request(2))).json()["scores"] == expected(2)
            answer = await client.post("/ads/top/v2/models/fake/infer", json=listed())
            assert answer.status_code == 200, answer.text
            assert fronted.serve.paths == []
            await client.post("/v1/score", json=request(2))
            assert fronted.serve.paths == [f"{root}/v1/score"]

    fronted.run(body)


@pytest.mark.parametrize(("sent", "headers", "status"), [case[1:] for case in RUDE], ids=[case[0] for case in RUDE])
def test_a_rude_body_gets_the_same_error_as_behind_serve(sent: bytes, headers: dict[str, str], status: int) -> None:
    fronted = Fronted()

    async def body(client: httpx.AsyncClient) -> None:
        named = {**headers, "x-request-id": "the client's"}
        answer = await client.post("/v1/score", content=sent, headers=named)
        assert answer.status_code == status, answer.text
        assert answer.headers.get_list("x-request-id") == ["the client's"]
        assert fronted.serve.paths == []
        behind = await client.post("/v1/score", content=sent, headers={**named, "x-request-timeout-seconds": "9"})
        if status != 200:
            assert refused(answer, status, answer.json()["error"]["code"]) == behind.json()["error"]
            ours = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
            assert ours == dict(behind.headers)

    fronted.run(body)


def test_a_full_queue_a_passed_deadline_and_a_failed_device_are_answered_in_their_own_forms() -> None:
    engine = FakeEngine()
    engine.go.clear()
    fronted = Fronted(engine)
    fronted.service.max_queued_rows = 70

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/score", json=request(1)))
        await until(lambda: engine.batches == [1])
        refused(await client.post("/v1/score", json=request(2, options={"deadline_ms": 20})), 504, "deadline_exceeded")
        waiting = asyncio.create_task(client.post("/v1/score", json=request(60)))
        await until(lambda: fronted.service.batchers["fake"].dispatcher.queued_rows == 60)
        full = await client.post("/v1/score", json=request(20))
        refused(full, 429, "overloaded")
        assert {"retry-after", "retry-after-ms"} <= set(full.headers)
        assert fronted.bypass.open == 2
        engine.fault = RuntimeError("the device failed")
        engine.go.set()
        refused(await first, 503, "unavailable")
        refused(await waiting, 503, "unavailable")

    fronted.run(body)
    assert (fronted.serve.paths, fronted.bypass.open) == ([], 0)


@pytest.mark.parametrize("sent", [b"\xe9", b"caf\xc3\xa9", b"a" * 129, b" ", b""])
def test_a_request_id_that_is_none_is_replaced_by_a_fresh_one(sent: bytes) -> None:
    fronted = Fronted()

    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", content=GOOD, headers=[(b"x-request-id", sent)])
        assert answer.status_code == 200, answer.text
        [fresh] = answer.headers.get_list("x-request-id")
        assert fresh == answer.json()["request_id"]
        assert fresh.encode() != sent

    fronted.run(body)


def test_a_client_that_hangs_up_is_taken_out_of_the_queue_and_is_open_no_longer() -> None:
    engine = FakeEngine()
    engine.go.clear()
    fronted = Fronted(engine)

    async def body(client: httpx.AsyncClient) -> None:
        first = asyncio.create_task(client.post("/v1/score", json=request(1)))
        await until(lambda: engine.batches == [1])
        assert await call(fronted.app, [{"type": "http.request", "body": GOOD}, {"type": "http.disconnect"}]) == []
        assert (fronted.bypass.open, fronted.service.batchers["fake"].dispatcher.queued_rows) == (1, 0)
        engine.go.set()
        assert (await first).json()["scores"] == expected(1)

    fronted.run(body)


def test_a_client_that_closes_its_socket_while_it_waits_is_open_no_longer() -> None:
    engine = FakeEngine()
    engine.go.clear()
    fronted = Fronted(engine)

    async def body(client: httpx.AsyncClient) -> None:
        server = uvicorn.Server(uvicorn.Config(fronted.app, port=0, lifespan="off", access_log=False, log_level="error"))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        first = asyncio.create_task(client.post("/v1/score", json=request(1)))
        await until(lambda: engine.batches == [1])
        _, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        writer.write(b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(GOOD), GOOD))
        await until(lambda: fronted.service.batchers["fake"].dispatcher.queued_rows == 2)
        writer.close()
        await until(lambda: (fronted.service.batchers["fake"].dispatcher.queued_rows, fronted.bypass.open) == (0, 1))
        engine.go.set()
        assert (await first).json()["scores"] == expected(1)
        server.should_exit = True
        await serving

    fronted.run(body)
    assert engine.batches == [1]


def test_websockets_and_lifespan_go_on_to_serve() -> None:
    fronted = Fronted()

    async def body(_: httpx.AsyncClient) -> None:
        seen: list[str] = []

        async def behind(scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])

        app = BypassMiddleware(behind, fronted.bypass)
        await app({"type": "websocket", "path": "/v1/score", "headers": []}, None, None)  # type: ignore[arg-type]
        await app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
        assert seen == ["websocket", "lifespan"]

    fronted.run(body)


class Slow:
    """A request of which the second half comes when the test says so."""

    def __init__(self, app: Any) -> None:
        self._rest = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._messages = self._halves()
        self.task = asyncio.create_task(app(self.scope(), self._messages.__anext__, self._send))

    @staticmethod
    def scope() -> dict[str, Any]:
        return {"type": "http", "method": "POST", "path": "/v1/score", "root_path": "", "headers": []}

    async def _halves(self) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": GOOD[:30], "more_body": True}
        await self._rest.wait()
        yield {"type": "http.request", "body": GOOD[30:]}
        await asyncio.Event().wait()

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def finish(self) -> list[float]:
        self._rest.set()
        await self.task
        assert self.sent[0]["status"] == 200
        scores: list[float] = json.loads(self.sent[1]["body"])["scores"]
        return scores


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
def test_a_replica_that_stops_gives_an_open_request_its_scores_before_it_closes_anything(topology: str) -> None:
    from deployments.serve.ingress_replica import IngressReplica
    from deployments.serve.loaded_models import LoadedModels
    from deployments.serve.replica import Replica

    fronted, closed = Fronted(), []
    config = parse_config({"models": [{"path": "m"}], "drain_s": 20}, "test")

    async def body(_: httpx.AsyncClient) -> None:
        slow = Slow(fronted.app)
        await until(lambda: fronted.bypass.open == 1)
        [batcher] = fronted.service.batchers.values()
        metrics = SimpleNamespace(close=lambda: closed.append("metrics"))
        observers = SimpleNamespace(close=lambda: closed.append("observers"))
        loaded = LoadedModels(config)
        loaded._engines["m", "1"] = SimpleNamespace(close=lambda: closed.append("engine"))  # type: ignore[assignment]
        scorer = SimpleNamespace(close=lambda: batcher.close(0))
        held = {"_batchers": {"m": batcher}, "_loaded": loaded} if topology == "colocated" else {"_scorers": {"m": scorer}}
        held |= {"_follower": None, "_config": config, "_metrics": metrics, "_observers": observers}
        held |= {"_bypass": fronted.bypass, "_direct": None}
        kind = Replica if topology == "colocated" else IngressReplica
        stopping = asyncio.create_task(kind.__mro__[1].__del__(SimpleNamespace(**held)))  # [0] is Serve's wrapper
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert (batcher.accepting, stopping.done()) == (True, False)
        assert await slow.finish() == expected(2)
        await stopping
        assert not batcher.accepting

    fronted.run(body)
    assert closed == (["engine"] if topology == "colocated" else []) + ["observers", "metrics"]


def test_what_is_open_is_waited_for_no_longer_than_it_may_and_nothing_not_at_all() -> None:
    fronted = Fronted()

    async def body(_: httpx.AsyncClient) -> None:
        await fronted.bypass.close(1e9)
        slow = Slow(fronted.app)
        await until(lambda: fronted.bypass.open == 1)
        await fronted.bypass.close(0.02)
        assert fronted.bypass.open == 1
        assert await slow.finish() == expected(2)
        await fronted.bypass.close(1e9)

    fronted.run(body)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Serve says of itself to its replicas; not traced, no timeout."""
    from ray.serve import context
    from ray.serve._private import tracing_utils

    said = SimpleNamespace(request_timeout_s=None)
    monkeypatch.setattr(context, "_get_global_client", lambda: SimpleNamespace(http_config=said))
    monkeypatch.setattr(tracing_utils, "_tracing_enabled", False)
    return said


async def hooked(*, replica: bool = True) -> list[Any]:
    async def route(scope: Any, receive: Any, send: Any) -> None:
        pass

    if replica:
        ServeBypass(route, route, "", asyncio.get_running_loop()).install()
    return [middleware.cls for middleware in middlewares()]


def test_a_replica_has_the_front_and_a_proxy_nothing(cluster: SimpleNamespace) -> None:
    assert asyncio.run(hooked(replica=False)) == []
    assert asyncio.run(hooked()) == [BypassMiddleware]


def test_nothing_is_in_front_of_a_server_on_another_event_loop_than_the_scorers(cluster: SimpleNamespace) -> None:
    assert asyncio.run(hooked()) == [BypassMiddleware]
    assert asyncio.run(hooked(replica=False)) == []  # as the one before, from a loop of its own


def test_nothing_is_in_front_where_serve_times_requests_out_or_traces_them(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve._private import tracing_utils

    cluster.request_timeout_s = 3.0
    assert asyncio.run(hooked()) == []
    cluster.request_timeout_s = None
    monkeypatch.setattr(tracing_utils, "_tracing_enabled", True)
    monkeypatch.setattr(tracing_utils, "trace", object())
    assert asyncio.run(hooked()) == []


def test_serve_finds_the_hook_that_the_launcher_names() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    from deployments.serve.serve_settings import FASTER

    assert validate_http_proxy_callback_return(call_function_from_import_path(next(iter(FASTER.values())))) == []


def test_what_serve_puts_behind_the_target_of_haproxys_log_is_a_comment() -> None:
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    from deployments.serve.serve_settings import FASTER

    (line,) = (x for x in HAPROXY_CONFIG_TEMPLATE.splitlines() if "config.log_target" in x)
    whole = line.replace("{{ config.log_target }}", FASTER["RAY_SERVE_HAPROXY_LOG_TARGET"])
    assert whole.strip() == "log 127.0.0.1:514 local0 alert # local0 info"
