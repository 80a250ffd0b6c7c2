"""All that `lifecycle.test_serving` claims, on the direct port (see this folder's conftest), and what is open there alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from deployments.direct.direct_server import DirectServer
from deployments.http_api.score_route import ScoreRoute
from tests.deployments.lifecycle.test_serving import *  # noqa: F403
from tests.deployments.lifecycle.test_serving import Replica, asked, request, version_of
from tests.deployments.protocol.test_rest import packed, tensors
from tests.deployments.serving_doubles import until


@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/fake/infer"])
@pytest.mark.parametrize("end", ["scored", "failed", "hung up"])
def test_a_version_serves_what_is_open_on_the_direct_port_before_it_is_unloaded(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch, path: str, end: str
) -> None:
    service = replica()

    async def body(client: httpx.AsyncClient) -> None:
        async def no_task(*_: object) -> None:
            pytest.fail("it went by way of the application")

        monkeypatch.setattr(ScoreRoute, "__call__", no_task)
        first = service.engines["fake", "1"]
        in_use = service.catalog.live["fake"].in_use
        first.go.clear()
        content, headers = packed(tensors())
        sent = {"json": request()} if path == "/v1/score" else {"content": content, "headers": headers}
        slow = asyncio.create_task(client.post(path, **sent))
        await until(lambda: bool(first.batches))
        await asked(client, "PUT", "/versions/2", path="2")
        unloading = asyncio.create_task(asked(client, "DELETE", "/versions/1"))
        await until(lambda: service.catalog.versions("fake") == ["2"])
        assert await version_of(client) == "2"
        await asyncio.sleep(0.05)
        assert (unloading.done(), in_use._users) == (False, 1)
        if end == "hung up":
            slow.cancel()
            await until(lambda: in_use._users == 0)
            assert service.seen[-1].outcome == "cancelled"
        if end == "failed":
            first.fault = RuntimeError("the device failed")
        first.go.set()
        if end != "hung up":
            answer = await slow
            assert answer.status_code == (200 if end == "scored" else 503), answer.text
            assert service.seen[-1].version == "1"
        await unloading
        assert (in_use._users, list(service.engines)) == (0, [("fake", "2")])

    service.run(body)


def test_what_is_refused_on_the_direct_port_leaves_its_version_free(replica: Callable[..., Replica]) -> None:
    service = replica()

    async def body(client: httpx.AsyncClient) -> None:
        wrong = request()
        wrong["candidates"] |= {"bias": ["x", "y"]}
        for sent, status in ((wrong, 422), (request(options={"deadline_ms": 1e-6}), 504), (request(version="9"), 404)):
            assert (await client.post("/v1/score", json=sent)).status_code == status
        assert service.catalog.live["fake"].in_use._users == 0
        await asked(client, "PUT", "/versions/2", path="2")
        await asked(client, "DELETE", "/versions/1")
        assert await version_of(client) == "2"

    service.run(body)


def test_an_answer_is_written_before_the_shadow_of_its_request_begins(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, order = replica({"path": "1"}, {"path": "3", "shadow": True}), list[str]()
    write = DirectServer._write

    def written(server: DirectServer) -> None:
        order.extend("answer" for _ in server._answers)
        write(server)

    async def body(client: httpx.AsyncClient) -> None:
        encoder = service.catalog.loaded("fake", "3").encoder
        encode = encoder.encode

        def encoded(*given: Any) -> Any:
            order.append("shadow")
            return encode(*given)

        object.__setattr__(encoder, "encode", encoded)
        for i in range(1, 6):  # the first on a lane's thread, others on the event loop
            assert await version_of(client) == "1"
            await until(lambda i=i: len(service.shadowed) == i)  # type: ignore[misc]

    monkeypatch.setattr(DirectServer, "_write", written)
    service.run(body)
    assert order == ["answer", "shadow"] * 5
    assert {one.outcome for one in service.shadowed} == {"ok"}
