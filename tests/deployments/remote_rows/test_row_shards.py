"""Rows that shards answer for: in the application that a configuration becomes, and as a user starts it, one of them killed."""

import asyncio
import copy
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.config import parse_config
from dpiframe_core.errors import Unavailable
from tests.deployments.server_process import Server

# Ray's generated modules warn at import with today's pydantic and protobuf.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

REMOTE = {"shards": 2, "replicas": 3, "cpus_per_shard": 2, "resource": "disk"}
TABLES = {"hbm_gib": 0.0002, "host_gib": 0.0005}  # of the demo's 3 MB: most rows of its tables of 8,194 rows lie in files


@pytest.mark.parametrize("topology", ["colocated", "fanin"])
def test_each_shard_is_a_deployment_without_a_gpu(topology: str) -> None:
    from deployments.app import build

    models = [{"path": "a"}, {"path": "b", "tables": TABLES | {"remote": REMOTE}}]
    app = build({"models": models, "device": "cpu", "topology": topology, "replicas": 4})
    served = app._bound_deployment
    config = served.init_args[0]
    if topology == "fanin":
        served = served.init_args[1]._bound_deployment
    (shards,) = served.init_args[1:]
    assert list(shards) == [1]
    made = [shard._bound_deployment for shard in shards[1]]
    assert [(d.name, d.num_replicas) for d in made] == [("Rows-1-0", 3), ("Rows-1-1", 3)]
    assert made[0].ray_actor_options == {"num_cpus": 2, "num_gpus": 0, "resources": {"disk": 0.001}}
    assert made[0].init_args == (config, config.models[1])
    assert config.cpus == 4 + 2 * 3 * 2 + (4 if topology == "fanin" else 0)


def test_without_shards_a_replica_is_bound_as_before() -> None:
    from deployments.app import build

    assert len(build({"models": [{"path": "a", "tables": TABLES}], "device": "cpu"})._bound_deployment.init_args) == 1
    assert parse_config({"models": [{"path": "a"}]}, "x").cpus == 1


def test_a_shard_is_found_from_any_thread_by_a_handle_that_is_asked_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.remote_rows import row_shard

    class Handle:
        """Serve's, as it is with our flags: it belongs to one event loop."""

        def __init__(self, port: int) -> None:
            self.loop, self.port = asyncio.get_running_loop(), port
            self.address = self

        def remote(self) -> asyncio.Task[tuple[str, int, bytes, str]]:
            assert asyncio.get_running_loop() is self.loop
            return asyncio.ensure_future(self.said())

        async def said(self) -> tuple[str, int, bytes, str]:
            await asyncio.sleep(0 if self.port else 20)
            return "127.0.0.1", self.port, b"s", "f"

    async def found() -> None:
        finds = row_shard.finders({3: [Handle(7), Handle(0)]})[3]
        assert (await asyncio.to_thread(finds[0])).port == 7
        monkeypatch.setattr(row_shard, "_FIND_S", 0.05)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(finds[1])
        assert row_shard.finders(None) == {}

    asyncio.run(found())


def test_an_engine_takes_its_rows_from_shards_and_the_same_come_out(demo_bundle: Path) -> None:
    from deployments.remote_rows.remote_rows import Found
    from deployments.remote_rows.row_server import RowServer
    from deployments.serve.loaded_models import load_engine
    from dpiframe_core.bundle.bundle import read_bundle
    from dpiframe_core.engine.engine import Engine

    bundle = read_bundle(demo_bundle)
    servers = [RowServer([bundle.tables[t.name] for t in bundle.manifest.feature_schema.tables], "127.0.0.1") for _ in range(2)]
    finds = [lambda s=s: Found("127.0.0.1", s.port, s.secret, bundle.fingerprint) for s in servers]
    model = {"path": str(demo_bundle), "tables": TABLES | {"remote": {"shards": 2, "timeout_ms": 30_000}}}
    config = parse_config({"models": [model], "device": "cpu"}, "test")
    engine = load_engine(config, config.models[0], finds)
    plain = Engine(bundle, "cpu")
    plain.warmup()
    example = json.loads((demo_bundle / "example.json").read_bytes())
    n = 60
    candidates = {name: column[:1] * n for name, column in example["candidates"].items()}

    def scores(engine: Engine, first: int) -> np.ndarray:
        return engine.score(candidates | {"C12": [f"value {first + i}" for i in range(n)]}, example["context"])

    np.testing.assert_allclose(scores(engine, 0), scores(plain, 0), rtol=0, atol=1e-5)
    servers[1].close()
    with pytest.raises(Unavailable, match="rows in files: got "):
        scores(engine, 1000)
    np.testing.assert_allclose(scores(engine, 0), scores(plain, 0), rtol=0, atol=1e-5)  # they lie in slots
    servers[1] = RowServer([bundle.tables[t.name] for t in bundle.manifest.feature_schema.tables], "127.0.0.1")
    finds[1].__defaults__ = (servers[1],)
    time.sleep(0.6)
    np.testing.assert_allclose(scores(engine, 1000), scores(plain, 1000), rtol=0, atol=1e-5)
    engine.close()
    servers[0].close()
    servers[1].close()


class Asking:
    """Requests each of which has rows that none had before: a feature of 8,194 hashed ids takes any text."""

    def __init__(self, server: Server, example: bytes) -> None:
        self.url, self.example, self.asked = server.url, json.loads(example), 0

    def request(self) -> dict[str, Any]:
        body = copy.deepcopy(self.example)
        n = 100
        body["candidates"] = {name: column[:1] * n for name, column in body["candidates"].items()}
        body["candidates"]["C12"] = [f"value {self.asked + i}" for i in range(n)]
        self.asked += n
        return body

    def score(self, model: str) -> tuple[dict[str, Any], httpx.Response]:
        body = self.request()
        return body, httpx.post(f"{self.url}/v1/score", json=body | {"model": model}, timeout=30)


def kill(server: Server, deployment: str) -> None:
    (pid,) = [pid for pid, command in server.processes().items() if f"ServeReplica:dpiframe:{deployment}" in command]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_shard_degrades_or_refuses_its_rows_alone_and_is_found_again(demo_bundle: Path, tmp_path: Path) -> None:
    from dpiframe_core.engine.engine import Engine

    remote = {"cpus_per_shard": 0.1, "timeout_ms": 20_000}
    models = [
        {"path": str(demo_bundle), "name": name, "tables": TABLES | {"remote": remote | {"shards": shards}} | own}
        for name, shards, own in (("late", 2, {"miss_budget_ms": 20_000}), ("strict", 1, {}))
    ]
    (tmp_path / "shards.yaml").write_text(json.dumps({"models": models, "device": "cpu", "cpus_per_replica": 0.5}))
    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()

    def scores_of(body: dict[str, Any]) -> np.ndarray:
        return engine.score(body["candidates"], body["context"])[:, 0]

    def right(body: dict[str, Any], answer: httpx.Response) -> np.ndarray:
        return np.abs(np.array(answer.json()["scores"]) - scores_of(body)) < 1e-5

    with Server(tmp_path / "shards.yaml") as server:
        server.wait_ready()
        asking = Asking(server, (demo_bundle / "example.json").read_bytes())
        for name in ("late", "strict"):
            body, answer = asking.score(name)
            assert answer.status_code == 200, answer.text
            assert answer.json().get("degraded_rows", 0) == 0
            assert right(body, answer).all()
        kill(server, "Rows-0-1")
        kill(server, "Rows-1-0")
        body, answer = asking.score("late")
        assert answer.status_code == 200, answer.text
        late = answer.json()["degraded_rows"]
        assert 10 < late < 90  # about half of them are the other shard's, or in memory
        assert right(body, answer).sum() >= 100 - late
        _, answer = asking.score("strict")
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["message"].startswith("rows in files: got ")
        back = {}
        give_up = time.monotonic() + 90
        while len(back) < 2 and time.monotonic() < give_up:
            for name in ("late", "strict"):
                body, answer = asking.score(name)
                if answer.status_code == 200 and answer.json().get("degraded_rows", 0) == 0:
                    assert right(body, answer).all()
                    back[name] = True
            time.sleep(0.5)
        assert back.keys() == {"late", "strict"}
