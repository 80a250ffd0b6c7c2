"""What clients of a replica see while its models change: the real app, coordinator and follower, over engines that are not."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.access.gate import Gate
from deployments.batching.batcher import RowBatcher
from deployments.config import parse_config
from deployments.lifecycle.control import FixedModels
from deployments.lifecycle.coordinator import Coordinator
from deployments.lifecycle.desired import Desired, desired_of
from deployments.lifecycle.follower import Follower
from deployments.lifecycle.members import Member
from deployments.lifecycle.release import Key, Release
from deployments.lifecycle.routes import _release, lifecycle_routes
from deployments.lifecycle.serving import route
from deployments.lifecycle.state_file import StateFile
from deployments.metrics import RequestSeen, ShadowSeen
from deployments.scoring.catalog import Catalog, place_of
from deployments.scoring.served_model import ServedModel
from deployments.serve.http_app import build_app
from dpiframe_core.errors import BundleError
from tests.deployments.direct.direct_app import served
from tests.deployments.lifecycle.replicas import hurry
from tests.deployments.protocol.test_rest import packed, tensors
from tests.deployments.serve.test_http_app import refused
from tests.deployments.serving_doubles import SCHEMA, FakeEngine, columns, until

MODEL = "/v1/models/fake"
Body = Callable[[httpx.AsyncClient], Awaitable[None]]


class Replica:
    """A `Host`, a `Link` and a `Control`. Each version of an engine adds its number to the scores.

    Its client needs no socket; or with `direct` it is one of its direct port.
    """

    direct = False

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, models: list[dict[str, Any]], **how: Any) -> None:
        hurry(monkeypatch)
        self.config = parse_config(
            {"models": models, "models_root": str(folder), "http": how.get("http", {}), "access": how.get("access")}, "test"
        )
        self.gate = Gate.of(self.config.access)
        self.catalog, self.coordinator = Catalog(), Coordinator(StateFile(None))
        self.engines: dict[Key, FakeEngine] = {}
        self.batchers: dict[Key, RowBatcher] = {}
        self.seen: list[RequestSeen] = []
        self.shadowed: list[ShadowSeen] = []
        self.follow, self.hear, self.leave = self.coordinator.follow, self.coordinator.hear, self.coordinator.leave

    async def load(self, release: Release) -> None:
        if release.version == "bad":
            raise BundleError(f"{release.path}: golden rows: got scores off by 0.1")
        name, version = release.key
        self.engines[release.key] = engine = FakeEngine(name=name, version=version)
        score = engine.run_batch
        engine.run_batch = lambda blocks: plus(score(blocks), int(version))  # type: ignore[method-assign]
        if version == "8":
            engine.schema = SCHEMA.model_copy(update={"features": SCHEMA.features[:-1]})  # it reads no bias
        self.batchers[release.key] = batcher = RowBatcher(engine.run_batch, max_batch_rows=64, lanes=1, max_queued_rows=1000)
        self.catalog.add(ServedModel.of(engine, batcher, self.config.limits))

    def route(self, desired: Desired) -> None:
        route(self.catalog, desired)

    async def unload(self, key: Key) -> None:
        await self.catalog.remove(*key).in_use.over()
        await self.batchers.pop(key).close(1)
        del self.engines[key]

    async def ask(self, method: str, *args: Any, **named: Any) -> dict[str, Any]:
        answer = getattr(self.coordinator, method)(*args, **named)
        return answer if method == "state" else await answer  # type: ignore[no-any-return]

    def run(self, body: Body) -> None:
        async def main() -> None:
            member = Member("r", "n", scores=True, answers=True, digest="d")
            follower = Follower(self, desired_of(self.config.models), member, self)
            await follower.start()
            routes = lifecycle_routes(self, self.config, self.gate, self.catalog)
            app = build_app(
                self.catalog, self.config.limits, self.seen.append, on_shadow=self.shadowed.append, lifecycle=routes
            )
            async with contextlib.AsyncExitStack() as stack:
                client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
                if self.direct:
                    self.server, port = await stack.enter_async_context(served(app, self.config.limits))
                    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
                await stack.enter_async_context(client)
                try:
                    async with asyncio.timeout(60):
                        await body(client)
                finally:
                    for engine in self.engines.values():
                        engine.go.set()
                    await follower.stop()
                    for batcher in self.batchers.values():
                        await batcher.close(5)

        asyncio.run(main())


def plus(result: Any, number: int) -> Any:
    result.scores[:] += number
    return result


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Replica]:
    """Over bundles 1, 2, 3, 8 and `bad` of the model `fake`."""

    class Parsed:
        def __init__(self, text: bytes) -> None:
            self.name, self.version = text.decode().split()
            self.feature_schema = FakeEngine().schema

    monkeypatch.setattr("deployments.lifecycle.release.parse_manifest", Parsed)
    for version in ("1", "2", "3", "8", "bad"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "model.yaml").write_text(f"fake {version}")

    def made(*models: dict[str, Any], **how: Any) -> Replica:
        given = [m | {"path": str(tmp_path / m["path"])} for m in models or ({"path": "1"},)]
        return Replica(tmp_path, monkeypatch, given, **how)

    return made


def request(user: int = 1, **parts: Any) -> dict[str, Any]:
    return {"context": {"user": user}, "candidates": columns(2), **parts}


async def version_of(client: httpx.AsyncClient, **parts: Any) -> str:
    """Of the version that scored a request, once its scores are proven to be that version's."""
    answer = await client.post("/v1/score", json=request(**parts))
    assert answer.status_code == 200, answer.text
    version: str = answer.json()["version"]
    first = np.float32(0) / np.float32(1000) + np.float32(0.25)
    assert answer.json()["scores"][0] == float(first + np.float32(int(version)))
    return version


async def asked(client: httpx.AsyncClient, method: str, where: str, /, **body: Any) -> dict[str, Any]:
    answer = await client.request(method, MODEL + where, json=body or None)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def test_no_request_fails_while_versions_come_go_and_fail(replica: Callable[..., Replica]) -> None:
    service = replica()
    seen: Counter[str] = Counter()

    async def body(client: httpx.AsyncClient) -> None:
        over = asyncio.Event()

        async def load() -> None:
            while not over.is_set():
                seen[await version_of(client)] += 1

        clients = [asyncio.create_task(load()) for _ in range(4)]
        for turn in range(3):
            await asked(client, "PUT", "/versions/2", path="2")
            for given in ({"path": "a\0b"}, {"path": "2", "tables": {"placement": "a\0"}}):
                error = refused(await client.put(f"{MODEL}/versions/bad", json=given), 422, "invalid_input")
                assert error["where"].removeprefix("body.") in ("path", "tables.placement")
            error = refused(await client.put(f"{MODEL}/versions/bad", json={"path": "bad"}), 422, "load_failed")
            assert error["message"].endswith("bad: golden rows: got scores off by 0.1 (replica r on n)")
            assert await version_of(client) == "2"
            await asked(client, "PUT", "/versions/3", path="3")
            assert await version_of(client) == "3"
            state = await asked(client, "POST", "/rollback")
            assert (state["live"], state["previous"]) == ("2", "3")
            await asked(client, "DELETE", "/versions/3")
            state = await asked(client, "PUT", "/versions/1", path="1")
            assert [v["version"] for v in state["versions"]] == ["2", "1"], turn
            assert state["replicas"] == [
                {"id": "r", "node": "n", "current": True, "loaded": ["fake/1", "fake/2"], "failed": {}}
            ]
        over.set()
        await asyncio.gather(*clients)

    service.run(body)
    assert set(seen) == {"1", "2", "3"}
    assert {one.outcome for one in service.seen} == {"ok"}
    assert {one.version for one in service.seen} == {"1", "2", "3"}


def test_a_version_is_unloaded_once_its_last_request_is_answered(replica: Callable[..., Replica]) -> None:
    service = replica()

    async def body(client: httpx.AsyncClient) -> None:
        first = service.engines["fake", "1"]
        first.go.clear()
        slow = asyncio.create_task(version_of(client))
        await until(lambda: bool(first.batches))
        await asked(client, "PUT", "/versions/2", path="2")
        unloading = asyncio.create_task(asked(client, "PUT", "/versions/3", path="3"))
        await until(lambda: service.catalog.live["fake"].info.version == "3")
        assert await version_of(client) == "3"  # nobody waits for the slow one
        await asyncio.sleep(0.05)
        assert not unloading.done()
        assert ("fake", "1") in service.engines
        first.go.set()
        assert await slow == "1"
        state = await unloading
        assert [v["version"] for v in state["versions"]] == ["2", "3"]
        assert ("fake", "1") not in service.engines

    service.run(body)


def test_a_version_is_not_unloaded_under_a_request_that_is_still_being_encoded(replica: Callable[..., Replica]) -> None:
    service = replica()

    async def body(client: httpx.AsyncClient) -> None:
        encoder = service.catalog.find(None, None).encoder
        reached, go = threading.Event(), threading.Event()
        encode = encoder.encode

        def slowly(*given: Any) -> Any:
            reached.set()
            assert go.wait(30)
            return encode(*given)

        object.__setattr__(encoder, "encode", slowly)
        large = columns(500) | {"site": ["x" * 1200] * 500}  # above what is encoded on the event loop
        slow = asyncio.create_task(client.post("/v1/score", json=request() | {"candidates": large}))
        await until(reached.is_set)
        await asked(client, "PUT", "/versions/2", path="2")
        unloading = asyncio.create_task(asked(client, "DELETE", "/versions/1"))
        await until(lambda: service.catalog.versions("fake") == ["2"])
        await asyncio.sleep(0.05)
        assert not unloading.done()
        go.set()
        answer = await slow
        assert (answer.status_code, answer.json()["version"]) == (200, "1"), answer.text
        await unloading

    service.run(body)


def test_a_key_goes_to_one_version_and_a_growing_share_takes_nobody_back(replica: Callable[..., Replica]) -> None:
    service = replica({"path": "1"}, {"path": "2", "canary": {"percent": 20, "by": "user"}})
    users = range(120)

    async def body(client: httpx.AsyncClient) -> None:
        async def to_the_canary() -> set[int]:
            return {user for user in users if await version_of(client, user=user) == "2"}

        some = await to_the_canary()
        assert 6 < len(some) < 46  # of 120 with a chance of 0.2: four standard deviations to each side
        assert await to_the_canary() == some
        state = await asked(client, "PUT", "/canary", version="2", percent=60, by="user")
        assert state["canary"] == {"version": "2", "percent": 60, "by": "user"}
        more = await to_the_canary()
        assert some < more
        assert 50 < len(more) < 94
        inside, outside = min(some), next(user for user in users if user not in more)
        for user in (inside, outside):  # the same user by tensors, in both forms
            given = tensors() | {"user": ("INT64", [1], np.int64([user]).tobytes())}
            content, headers = packed(given)
            answer = await client.post("/v2/models/fake/infer", content=content, headers=headers)
            assert answer.status_code == 200, answer.text
            version = b'"model_version":"2"' in answer.content.replace(b" ", b"")
            assert version == (user == inside)
        key = next(str(i) for i in range(1000) if place_of("fake", str(i)) >= 60)
        assert await version_of(client, user=inside, options={"key": key}) == "1"  # a request's own key goes first
        assert await version_of(client, user=inside, version="1") == "1"  # and the version that it asks for before all
        assert await version_of(client, user=outside, version="2") == "2"
        state = await asked(client, "DELETE", "/canary")
        assert (state["canary"], len(state["versions"])) == (None, 2)
        assert await to_the_canary() == set()

    service.run(body)


def test_without_a_key_the_request_id_decides(replica: Callable[..., Replica]) -> None:
    service = replica({"path": "1"}, {"path": "2", "canary": {"percent": 50}})

    async def body(client: httpx.AsyncClient) -> None:
        for i in range(40):
            answer = await client.post("/v1/score", json=request(), headers={"X-Request-ID": f"id {i}"})
            assert answer.json()["version"] == ("2" if place_of("fake", f"id {i}") < 50 else "1")

    service.run(body)


def test_places_of_keys_are_even_and_of_each_model_its_own() -> None:
    places = np.array([place_of("m", str(i)) for i in range(20_000)])
    counts, _ = np.histogram(places, bins=20, range=(0, 100))
    assert counts.sum() == 20_000
    assert (abs(counts - 1000) < 6 * 1000**0.5).all()
    others = np.array([place_of("n", str(i)) for i in range(20_000)])
    assert abs(np.corrcoef(places, others)[0, 1]) < 0.05
    assert place_of("m", "\ud800") != place_of("m", "x")  # JSON may hold what UTF-8 does not


def test_a_canary_with_other_features_reads_the_request_in_its_own_form(replica: Callable[..., Replica]) -> None:
    service = replica({"path": "1"}, {"path": "8", "canary": {"percent": 100}})

    async def body(client: httpx.AsyncClient) -> None:
        error = refused(await client.post("/v1/score", json=request()), 422, "invalid_input")
        assert error["where"] == "candidates.bias"
        assert await version_of(client, version="1") == "1"
        without = {name: column for name, column in columns(2).items() if name != "bias"}
        answer = await client.post("/v1/score", json=request(candidates=without, version="8"))
        assert answer.status_code in (200, 422)
        assert "unknown key" not in answer.text

    service.run(body)


def test_a_shadow_scores_what_others_answer_and_only_metrics_show_it(replica: Callable[..., Replica]) -> None:
    service = replica({"path": "1"}, {"path": "3", "shadow": True})

    async def body(client: httpx.AsyncClient) -> None:
        assert await version_of(client) == "1"
        await until(lambda: len(service.shadowed) == 1)
        [seen] = service.shadowed
        assert (seen.model, seen.version, seen.shadow, seen.outcome) == ("fake", "1", "3", "ok")
        assert seen.differences == [2.0, 2.0]
        assert await version_of(client, version="3") == "3"  # asked for by name, it has no shadow: it would be its own
        content, headers = packed(tensors())
        assert (await client.post("/v2/models/fake/infer", content=content, headers=headers)).status_code == 200
        await until(lambda: len(service.shadowed) == 2)
        service.engines["fake", "3"].fault = RuntimeError("the device of the shadow failed")
        assert await version_of(client) == "1"
        await until(lambda: len(service.shadowed) == 3)
        assert service.shadowed[-1].outcome == "unavailable"

    service.run(body)
    assert [one.outcome for one in service.seen] == ["ok"] * 4


def test_a_shadow_that_hangs_delays_nobody_and_is_dropped_first(replica: Callable[..., Replica]) -> None:
    service = replica({"path": "1"}, {"path": "3", "shadow": True})

    async def body(client: httpx.AsyncClient) -> None:
        service.engines["fake", "3"].go.clear()
        for _ in range(10):
            assert await version_of(client) == "1"
        await until(lambda: [seen.outcome for seen in service.shadowed].count("dropped") >= 6)
        service.engines["fake", "3"].go.set()
        await until(lambda: len(service.shadowed) == 10)

    service.run(body)
    assert {one.outcome for one in service.seen} == {"ok"}


def test_what_waits_for_the_live_versions_device_goes_before_any_shadow(replica: Callable[..., Replica]) -> None:
    service = replica({"path": "1"}, {"path": "3", "shadow": True})

    async def body(client: httpx.AsyncClient) -> None:
        live = service.engines["fake", "1"]
        live.go.clear()
        crowd = [asyncio.create_task(version_of(client))]
        await until(lambda: bool(live.batches))  # alone: a lane that wakes up late takes up to 64 of the rows that are to wait
        crowd += [asyncio.create_task(version_of(client)) for _ in range(79)]
        await until(lambda: service.batchers["fake", "1"].queued_rows == 158)
        live.go.set()
        await asyncio.gather(*crowd)
        await until(lambda: len(service.shadowed) == 80)
        assert "dropped" in {seen.outcome for seen in service.shadowed}

    service.run(body)
    assert {one.outcome for one in service.seen} == {"ok"}


def test_the_protocol_and_the_documents_know_every_version(replica: Callable[..., Replica]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        before = (await client.get("/openapi.json")).json()
        await asked(client, "PUT", "/versions/2", path="2", live=False)
        assert (await client.get("/v2/models/fake")).json()["versions"] == ["1", "2"]
        assert (await client.get("/v2/models/fake/versions/2/ready")).json()["ready"]
        index = (await client.post("/v2/repository/index")).json()
        assert [(model["version"], model["state"]) for model in index] == [("1", "READY"), ("2", "READY")]
        content, headers = packed(tensors())
        answer = await client.post("/v2/models/fake/versions/2/infer", content=content, headers=headers)
        assert b'"model_version":"2"' in answer.content
        stats = (await client.get("/v2/models/fake/versions/2/stats")).json()["model_stats"][0]
        assert (stats["version"], stats["inference_stats"]["success"]["count"]) == ("2", 1)
        assert (await client.get("/v1/batch-sizes", params={"version": "2"})).json()["version"] == "2"
        error = refused(await client.post("/v1/score", json=request(version="9")), 404, "model_not_found")
        assert error["message"] == "version: got '9', expected one of ['1', '2'], the versions of 'fake' served here"
        assert {m["version"] for m in (await client.get("/v1/models")).json()["models"]} == {"1"}
        after = (await client.get("/openapi.json")).json()
        assert "/v1/models/{model}/versions/{version}" in before["paths"]
        assert before == after  # the forms of live versions alone: this one is not
        await asked(client, "PUT", "/versions/8", path="8")
        forms = [(await client.get("/openapi.json")).json(), before]
        assert [["bias" in d["components"]["schemas"]["Columns_fake"]["properties"]] for d in forms] == [[False], [True]]

    replica().run(body)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "why"),
    [
        ("PUT", "/versions/2", {"path": "../x"}, 422, "path: got '"),
        ("PUT", "/versions/2", {"path": "/etc"}, 422, "path: got '/etc', which is '/etc', expected a place below"),
        ("PUT", "/versions/2", {"path": "nothing"}, 422, "nothing/model.yaml: got no such file, expected one in every bundle"),
        ("PUT", "/versions/2", {}, 422, "path: got nothing, expected the bundle of version 2, which is not loaded"),
        ("PUT", "/versions/2", {"path": 1}, 422, "path: got 1, expected text"),
        ("PUT", "/versions/2", {"pth": "2"}, 422, "pth: got an unknown key, expected one of live, path, tables, timeout_s"),
        ("PUT", "/versions/2", {"tables": {"hbm": 1}}, 422, "tables.hbm: got an unknown key, expected one of ahead_mib, "),
        ("PUT", "/versions/1", {"path": "2"}, 409, "version: got '1' of another bundle than the one loaded"),
        ("PUT", "/versions/a b", {"path": "2"}, 422, "version: got 'a b', expected text of the pattern"),
        ("PUT", "/versions/2", {"path": "2", "timeout_s": 0}, 422, "timeout_s: got 0, expected greater than 0"),
        ("DELETE", "/versions/1", None, 409, "version: got '1', which is live, expected another one to be made live first"),
        ("DELETE", "", None, 409, "model: got 'fake', the only one of this service, expected another one to be loaded first"),
        ("POST", "/rollback", None, 409, "rollback: got no version before '1', expected one that was live and is still loaded"),
        ("PUT", "/canary", {"version": "2", "percent": 5}, 404, "version: got '2', expected one of ['1'], which are loaded"),
        ("PUT", "/canary", {"version": "1", "percent": 101}, 422, "percent: got 101, expected less than or equal to 100"),
        ("PUT", "/canary", {"version": "1", "percent": 5, "by": "usr"}, 422, "by: got 'usr', expected a feature of both"),
        ("PUT", "/shadow", {"version": "1"}, 409, "version: got '1', which is live, expected another one beside it"),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_is_refused_with_the_rule(
    replica: Callable[..., Replica], method: str, path: str, body: dict[str, Any] | None, status: int, why: str
) -> None:
    async def asking(client: httpx.AsyncClient) -> None:
        answer = await client.request(method, MODEL + path, json=body)
        assert answer.status_code == status, answer.text
        assert why in answer.json()["error"]["message"]
        assert await version_of(client) == "1"

    replica().run(asking)


def test_a_path_may_be_written_in_several_ways(replica: Callable[..., Replica]) -> None:
    async def asking(client: httpx.AsyncClient) -> None:
        for path in ("2", "1/../2", "./2/"):
            answer = await client.put(f"{MODEL}/versions/2", json={"path": path})
            assert answer.status_code == 200, answer.text
        assert await version_of(client) == "2"

    service = replica()
    service.run(asking)
    root = f"{service.config.models_root}/1/.."  # as a relative one becomes, and so as the configuration's versions have it
    assert _release(root, "fake", "2", "1/../2", None).path == f"{root}/2"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/versions/2", {"path": "2"}),
        ("PUT", "/versions/2", {}),
        ("PUT", "/versions/1", {}),
        ("DELETE", "/versions/1", None),
        ("DELETE", "", None),
        ("POST", "/rollback", None),
        ("PUT", "/canary", {"version": "1", "percent": 5}),
        ("PUT", "/shadow", {"version": "1"}),
    ],
)
def test_without_a_models_root_every_change_is_a_conflict(
    replica: Callable[..., Replica], method: str, path: str, body: dict[str, Any] | None
) -> None:
    service = replica()
    service.ask = FixedModels(lambda: desired_of(service.config.models)).ask  # type: ignore[method-assign]
    service.config = service.config.model_copy(update={"models_root": None})

    async def asking(client: httpx.AsyncClient) -> None:
        error = refused(await client.request(method, MODEL + path, json=body), 409, "conflict")
        assert error["message"].startswith("models_root: got none in the configuration, expected the folder below which")
        assert (await client.get(f"{MODEL}/versions")).json()["live"] == "1"

    service.run(asking)


def test_an_unknown_model_is_not_found_and_a_new_one_may_be_put_and_deleted(replica: Callable[..., Replica]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        refused(await client.get("/v1/models/other/versions"), 404, "model_not_found")
        refused(await client.post("/v1/models/other/rollback"), 404, "model_not_found")
        assert (await client.put("/v1/models/other/versions/2", json={"path": "2"})).json()["live"] == "2"
        answer = await client.post("/v1/score", json=request(model="other"))
        assert (answer.json()["model"], answer.json()["version"]) == ("other", "2")
        refused(await client.post("/v1/score", json=request()), 422, "invalid_input")  # two models, and none is named
        assert (await client.delete("/v1/models/other")).json() == {"models": ["fake"]}
        assert await version_of(client) == "1"

    replica().run(body)


def test_whoever_may_score_on_other_hosts_without_a_token_may_not_change_models(replica: Callable[..., Replica]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        error = refused(await client.put(f"{MODEL}/versions/2", json={"path": "2"}), 403, "forbidden")
        assert error["message"].startswith("access: got open: true, with which anybody may score, expected tokens")
        assert (await client.get(f"{MODEL}/versions")).status_code == 200

    replica(http={"host": "0.0.0.0"}, access={"open": True}).run(body)
