"""With tokens configured every route asks for one, in front of Serve and behind it, and says no in its protocol's form."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.routing import Mount

from deployments.access.gate import Gate
from deployments.config import parse_config
from deployments.http_api.gated import OPEN
from tests.deployments.access.token_files import bearing, made
from tests.deployments.http_api.test_serve_bypass import Fronted
from tests.deployments.protocol.test_rest import listed
from tests.deployments.serve.test_http_app import Service, expected, request
from tests.deployments.serving_doubles import FakeEngine

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import

SCORING = ("/v1/score", "/v2/models/fake/infer", "/v2/models/fake/versions/7/infer", "/v2/models/fake/infer/")
THROUGH_SERVE = {"x-request-timeout-seconds": "5"}  # a header that the bypass leaves to Serve
WAYS = [pytest.param({}, id="bypass"), pytest.param(THROUGH_SERVE, id="serve")]


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    return made(tmp_path / "tokens.yaml", ranker=["score"], graphs=["metrics"], boss=["admin"])


@pytest.fixture
def gate(tokens: dict[str, str], tmp_path: Path) -> Gate:
    return Gate(str(tmp_path / "tokens.yaml"))


def body_of(path: str) -> dict[str, Any]:
    return request(2) if path == "/v1/score" else listed()


def denied(answer: httpx.Response, path: str, status: int, message: str) -> None:
    """In the form of the path's protocol. The request id in a header is Serve's to add behind the bypass."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    error = answer.json()["error"]
    if path.startswith("/v2"):
        assert error == message
    else:
        assert error.pop("request_id")
        assert error == {"code": {401: "unauthenticated", 403: "forbidden"}[status], "message": message}
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", SCORING)
def test_scoring_takes_the_scope_score_on_both_ways(path: str, way: dict[str, str], gate: Gate, tokens: dict[str, str]) -> None:
    fronted = Fronted(gate=gate)

    async def body(client: httpx.AsyncClient) -> None:
        async def ask(headers: dict[str, str]) -> httpx.Response:
            return await client.post(path, json=body_of(path), headers=way | headers)

        denied(await ask({}), path, 401, "authorization: got no bearer token, expected one bearer token")
        unknown = "authorization: got an unknown token, expected one of this service"
        denied(await ask(bearing("dpi_x")), path, 401, unknown)
        for name in ("graphs", "boss"):
            lacks = "authorization: got a token without the scope 'score', expected one with it"
            denied(await ask(bearing(tokens[name])), path, 403, lacks)
        assert fronted.service.engines[0].batches == []
        answer = await ask(bearing(tokens["ranker"]))
        assert answer.status_code == 200, answer.text
        past_serve = not way and not path.endswith("/")
        assert fronted.serve.paths == [] if past_serve else set(fronted.serve.paths) == {path}

    fronted.run(body)
    assert [seen.outcome for seen in fronted.service.seen] == ["unauthenticated"] * 2 + ["forbidden"] * 2 + ["ok"]


def test_every_route_that_the_app_has_takes_a_token_but_for_health_and_the_page(gate: Gate, tokens: dict[str, str]) -> None:
    service = Service(gate=gate)

    async def body(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json", headers=bearing(tokens["graphs"]))).json()
        asked = set(walked(document["paths"]))
        asked |= {("GET", r.path) for r in service.app.router.routes if not isinstance(r, Mount) and r.path != "/v1/score"}
        assert len(asked) > 15
        page = {path for _, path in asked if path == "/" or path.startswith("/page/")}
        assert len(page) > 5
        for method, path in sorted(asked):
            for headers in ({}, bearing("dpi_x")):
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == (200 if path in OPEN or path in page else 401), (method, path, answer.text)
            for name in ("graphs", "boss"):
                answer = await client.request(method, path, headers=bearing(tokens[name]))
                lacks = (method, path) in scoring or (path == "/v1/recent" and name == "boss")
                otherwise = 404 if path == "/v1/profile" else 200  # none is stored
                assert answer.status_code == (403 if lacks else otherwise), (method, path, answer.text)

    scoring = {("POST", "/v1/score"), ("POST", "/v2/models/fake/infer")}
    service.run(body)


def walked(paths: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for path, operations in paths.items():
        for method in operations:
            yield method.upper(), path.replace("{model}", "fake")


@pytest.mark.parametrize(
    "path",
    ["/livez/", "//livez", "/livez/x", "/LIVEZ", "/readyz%2f..", "/v1/livez", "//", "/page", "/v1", "/v20", "/docs/x"],
)
def test_a_path_that_looks_like_an_open_one_is_not_open(path: str, gate: Gate) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        assert (await client.get(f"{client.base_url}".rstrip("/") + path)).status_code == 401

    Service(gate=gate).run(body)


@pytest.mark.parametrize("prefix", ["", "/ads/top"])
def test_under_a_prefix_the_same_paths_are_open_and_no_others(prefix: str, gate: Gate, tokens: dict[str, str]) -> None:
    service = Service(gate=gate)

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        await service.app(dict(scope, root_path=prefix), receive, send)

    async def body(_: httpx.AsyncClient) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(mounted), base_url="http://test") as client:
            for path, status in {"/livez": 200, "/readyz": 200, "/v1/models": 401, "/v1/score": 401, "/v2": 401}.items():
                method = "POST" if path == "/v1/score" else "GET"
                assert (await client.request(method, prefix + path)).status_code == status, path
            assert (await client.get(prefix + "/v1/models", headers=bearing(tokens["ranker"]))).status_code == 200
            if prefix:
                assert (await client.get("/livez")).status_code == 200  # as Starlette takes a path without the prefix
                assert (await client.get(prefix + prefix + "/livez")).status_code == 401

    service.run(body)


def test_a_refused_request_has_its_body_left_unread_and_its_connection_closed(gate: Gate) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        async def never() -> Any:
            raise AssertionError("the body was asked for")

        for path in ("/v1/score", "/v2/models/fake/infer", "/v2/repository/index", "/v1/models"):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": [], "query_string": b""}
            await service.app(scope, never, send)
            assert sent[0]["status"] == 401, path
            assert (b"connection", b"close") in list(sent[0]["headers"]), path

    service = Service(gate=gate)
    service.run(body)


def test_without_a_gate_a_token_is_neither_asked_for_nor_looked_at() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for headers in ({}, bearing("whatever")):
            assert (await client.post("/v1/score", json=request(2), headers=headers)).json()["scores"] == expected(2)
            document = (await client.get("/openapi.json", headers=headers)).json()
            assert "securitySchemes" not in document["components"]
            assert "security" not in document

    Service().run(body)


def test_the_openapi_document_names_the_bearer_scheme_and_what_is_open(gate: Gate, tokens: dict[str, str]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json", headers=bearing(tokens["boss"]))).json()
        assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
        assert document["security"] == [{"bearer": []}]
        open_paths = {p for p, methods in document["paths"].items() if any(m.get("security") == [] for m in methods.values())}
        assert open_paths == set(OPEN)

    Service(gate=gate).run(body)


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
def test_a_replica_of_either_topology_has_the_gate_of_its_configuration_at_each_of_its_ways(
    topology: str, tokens: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both replicas, Replica and IngressReplica, get their app, their bypass and their gRPC from `replica_app`."""
    from deployments.http_api.serve_bypass import BypassMiddleware, ServeBypass
    from deployments.lifecycle.control import FixedModels
    from deployments.lifecycle.desired import Desired
    from deployments.scoring.catalog import Catalog
    from deployments.serve import ingress_replica, replica
    from deployments.serve.replica_app import replica_app

    assert replica.replica_app is ingress_replica.replica_app is replica_app
    monkeypatch.setattr(ServeBypass, "installed", None)
    access = {"tokens": str(tmp_path / "tokens.yaml")}
    config = parse_config({"models": [{"path": "m"}], "topology": topology, "access": access}, "test")
    service, grpc_methods = Service(FakeEngine()), SimpleNamespace()
    metrics = SimpleNamespace(request=service.seen.append, shadow=None, endpoints=list)

    async def body(_: httpx.AsyncClient) -> None:
        control = FixedModels(lambda: Desired(models={}))
        app, bypass = replica_app(grpc_methods, config, Catalog(service.models), metrics, control)  # type: ignore[arg-type]
        for one in (app, BypassMiddleware(app, bypass)):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(one), base_url="http://test") as client:
                assert (await client.post("/v1/score", json=request(2))).status_code == 401
                answer = await client.post("/v1/score", json=request(2), headers=bearing(tokens["ranker"]))
                assert answer.json()["scores"] == expected(2)
                assert (await client.get("/v1/models")).status_code == 401
                for ask in (client.post("/v1/models/fake/rollback"), client.delete("/v1/models/fake")):
                    assert (await ask).status_code == 401
                ask = client.post("/v1/models/fake/rollback", headers=bearing(tokens["ranker"]))
                assert (await ask).json()["error"]["message"] == (
                    "authorization: got a token without the scope 'admin', expected one with it"
                )
                ask = client.post("/v1/models/fake/rollback", headers=bearing(tokens["boss"]))
                assert (await ask).json()["error"]["code"] == "conflict"  # let in: the models of this service are fixed
                assert (await client.get("/metrics")).status_code == 401
                assert (await client.get("/metrics", headers=bearing(tokens["ranker"]))).status_code == 403
                assert (await client.get("/metrics", headers=bearing(tokens["graphs"]))).status_code == 503  # there is no node
        assert isinstance(grpc_methods.gate, Gate)

    service.run(body)


def test_a_crowd_with_and_without_tokens_gets_each_its_own_answer(gate: Gate, tokens: dict[str, str]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        async def one(i: int) -> None:
            headers = [bearing(tokens["ranker"]), {}, bearing(tokens["boss"])][i % 3]
            answer = await client.post("/v1/score", json=request(2, i), headers=headers)
            assert answer.status_code == (200, 401, 403)[i % 3]
            assert i % 3 or answer.json()["scores"] == expected(2, i)

        await asyncio.gather(*map(one, range(90)))

    Fronted(gate=gate).run(body)
