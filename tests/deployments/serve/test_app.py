"""The Serve application that a configuration becomes, without a cluster."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpiframe_core.errors import ConfigError, Unavailable

# Ray's generated modules warn at import with today's pydantic and protobuf.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODEL = {"models": [{"path": "models/demo"}]}


def deployment(**keys: Any) -> Any:
    from deployments.app import build

    return build(MODEL | keys)._bound_deployment


def test_a_replica_takes_one_whole_gpu_or_none() -> None:
    assert deployment(device="cuda", cpus_per_replica=4).ray_actor_options == {"num_cpus": 4, "num_gpus": 1}
    assert deployment(device="cpu").ray_actor_options == {"num_cpus": 1, "num_gpus": 0}


def test_the_settings_of_serve_are_those_of_the_configuration() -> None:
    made = deployment(device="cpu", replicas=3, max_ongoing_requests=7, drain_s=4)
    options = made._deployment_config
    assert (options.num_replicas, options.max_ongoing_requests, options.graceful_shutdown_timeout_s) == (3, 7, 4)
    assert options.autoscaling_config is None
    assert options.logging_config["enable_access_log"] is False


def test_the_autoscaling_rules_reach_the_policy_that_serve_makes_of_its_configuration() -> None:
    from ray.serve._private.autoscaling_state import _resolve_policy_callable

    rules = {"min_replicas": 2, "max_replicas": 5, "target_busy": 0.5, "look_back_s": 10.0}
    scaling = deployment(device="cpu", autoscaling=rules)._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.look_back_period_s, scaling.metrics_interval_s) == (2, 5, 10, 2)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0, 0)
    policy = _resolve_policy_callable(scaling.policy)  # as the controller does it, pickled and unpickled
    figures = {"queued_rows": {"a": 0.0, "b": 0.0}, "device_share": {"a": 0.9, "b": 0.7}, "loop_share": {"a": 0.1, "b": 0.2}}
    state: dict[str, Any] = {}
    for now, wanted in ((100.0, 2), (101.0, 2), (102.0, 4)):  # 1.6 replicas' worth at half a replica each
        context = SimpleNamespace(aggregated_metrics=figures, policy_state=state, current_time=now, target_num_replicas=2)
        replicas, state = policy(context)
        assert replicas == wanted


def test_the_batching_of_the_configuration_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.config import parse_config
    from deployments.config_models import ModelRef
    from deployments.serve.loaded_models import load_engine
    from dpiframe_core.bundle import bundle
    from dpiframe_core.engine import engine

    made: list[Any] = []

    class Engine:
        def __init__(self, *args: Any) -> None:
            made.append(args)

        def warmup(self) -> None:
            pass

    monkeypatch.setattr(engine, "Engine", Engine)
    monkeypatch.setattr(bundle, "read_bundle", lambda path: f"bundle {path}")
    batching = {"max_batch_rows": 512, "lanes": 3, "buckets": [16, 100, 512]}
    config = parse_config(MODEL | {"device": "cuda", "precision": "bf16", "batching": batching}, "test")
    load_engine(config, ModelRef(path="m"))
    options = engine.EngineOptions(max_batch_rows=512, lanes=3, buckets=(16, 100, 512))
    assert made == [("bundle m", "cuda", "bf16", options, None)]


def test_a_model_scores_with_the_home_that_its_configuration_gives_its_tables(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.config import parse_config
    from deployments.serve.loaded_models import load_engine
    from dpiframe_core.embedding.home import Home
    from dpiframe_core.engine import engine

    made: list[Any] = []

    class Engine(engine.Engine):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(engine, "Engine", Engine)
    model = {"path": str(demo_bundle), "tables": {"hbm_gib": 1e-5, "host_folder": None}}
    config = parse_config({"models": [model], "device": "cpu"}, "test")
    load_engine(config, config.models[0]).close()  # its warm-up has compared the golden rows' scores
    (home,) = (args[4] for args in made)
    assert isinstance(home, Home)
    assert home.folder is None


def fanin(**keys: Any) -> tuple[Any, Any]:
    """The ingress deployment and the engine deployment that it is bound to."""
    ingress = deployment(topology="fanin", device="cpu", **keys)
    return ingress, ingress.init_args[1]._bound_deployment


def test_the_fan_in_is_engines_with_a_device_each_and_ingresses_without_one() -> None:
    from deployments.app import build

    app = build(MODEL | {"topology": "fanin", "device": "cuda", "replicas": 2, "ingress_replicas": 6, "cpus_per_ingress": 0.5})
    ingress = app._bound_deployment
    engine = ingress.init_args[1]._bound_deployment
    assert (ingress.name, engine.name) == ("Ingress", "Engine")
    assert (ingress._deployment_config.num_replicas, engine._deployment_config.num_replicas) == (6, 2)
    assert ingress.ray_actor_options == {"num_cpus": 0.5, "num_gpus": 0}
    assert engine.ray_actor_options == {"num_cpus": 1, "num_gpus": 1}


def test_engines_are_what_is_scaled_and_they_outlast_the_ingresses_that_drain() -> None:
    ingress, engine = fanin(autoscaling={"max_replicas": 5}, drain_s=4)
    assert ingress._deployment_config.autoscaling_config is None
    assert engine._deployment_config.autoscaling_config.max_replicas == 5
    assert ingress._deployment_config.graceful_shutdown_timeout_s == 4
    assert engine._deployment_config.graceful_shutdown_timeout_s > 2 * 4


@pytest.mark.parametrize(
    ("keys", "engines", "ingresses"),
    [
        ({"replicas": 2, "ingress_replicas": 6}, None, None),  # one node: as many as there are
        ({"nodes": 2, "replicas": 2, "ingress_replicas": 6}, 1, 3),
        ({"nodes": 2, "replicas": 3, "ingress_replicas": 5}, 2, 3),
        ({"nodes": 3, "autoscaling": {"min_replicas": 3, "max_replicas": 12}, "ingress_replicas": 3}, 4, 1),
    ],
)
def test_no_node_gets_more_than_its_share(keys: dict[str, Any], engines: int | None, ingresses: int | None) -> None:
    ingress, engine = fanin(**keys)
    assert engine._replica_config.max_replicas_per_node == engines
    assert ingress._replica_config.max_replicas_per_node == ingresses
    del keys["ingress_replicas"]
    assert deployment(device="cpu", **keys)._replica_config.max_replicas_per_node == engines


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nodes": 2}, "replicas: got 1 for nodes 2, expected one or more for each"),
        (
            {"nodes": 3, "replicas": 3, "topology": "fanin", "ingress_replicas": 2},
            "ingress_replicas: got 2 for nodes 3, expected one or more for each",
        ),
        (
            {"nodes": 2, "replicas": 33, "topology": "fanin"},
            "replicas: got 33 for topology 'fanin', expected at most 16 a node",
        ),
        ({"topology": "fanin", "ingress_replicas": 65}, "ingress_replicas: got 65, expected at most 64 a node"),
    ],
)
def test_a_share_that_a_node_cannot_have_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment(device="cpu", **keys)
    assert str(caught.value) == f"args: {message}"


def test_a_cluster_of_one_host_has_one_node(demo_bundle: Path) -> None:
    from deployments.config import parse_config
    from deployments.serve.cluster import private_cluster

    config = parse_config({"models": [{"path": str(demo_bundle)}], "nodes": 2, "replicas": 2}, "test")
    with (
        pytest.raises(ConfigError, match="nodes: got 2 for a cluster of this host alone, expected --address"),
        private_cluster(config, print),
    ):
        pytest.fail("started")


@pytest.mark.parametrize(
    ("keys", "gpus", "expected"),
    [
        ({"device": "cuda", "replicas": 4}, (8,), 4),
        ({"device": "cuda", "replicas": 4}, (2,), 2),
        ({"device": "cuda", "replicas": 4}, (4, 4), 1),
        ({"device": "cuda", "autoscaling": {"min_replicas": 2, "max_replicas": 8}}, (8,), 2),
        ({"device": "cpu", "replicas": 3}, (0,), 3),
    ],
)
def test_an_ingress_waits_for_the_engines_that_its_node_is_sure_to_get(
    keys: dict[str, Any], gpus: tuple[int, ...], expected: int
) -> None:
    from deployments.config import parse_config
    from deployments.serve.ingress_replica import expected_engines

    nodes = [{"NodeID": f"n{i}", "Alive": True, "Resources": {"GPU": float(n)}} for i, n in enumerate(gpus)]
    dead = {"NodeID": "dead", "Alive": False, "Resources": {"GPU": 8.0}}
    assert expected_engines(parse_config(MODEL | {"topology": "fanin"} | keys, "test"), [dead, *nodes], "n0") == expected


def test_unknown_arguments_of_a_serve_config_file_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"args: lanes: got an unknown key"):
        deployment(device="cpu", lanes=2)


def replicas(loaded: Any) -> list[tuple[Any, Any]]:
    """Either kind of replica that has engines, without its construction."""
    from deployments.serve.engine_replica import EngineReplica
    from deployments.serve.replica import Replica

    held = {"_loaded": loaded, "_follower": SimpleNamespace(check=lambda: None)}
    return [(Replica, SimpleNamespace(**held)), (EngineReplica, SimpleNamespace(**held, _acceptor=None))]


def test_a_failed_engine_makes_a_replica_of_either_kind_unhealthy() -> None:
    from deployments.config import parse_config
    from deployments.serve.loaded_models import LoadedModels

    def failed() -> None:
        raise Unavailable("engine: device cuda:0 failed: an illegal memory access")

    loaded: Any = LoadedModels(parse_config(MODEL, "test"))
    for kind, replica in replicas(loaded):
        loaded._engines = {"well": SimpleNamespace(check=lambda: None)}
        kind.check_health(replica)
        loaded._engines["ill"] = SimpleNamespace(check=failed)
        with pytest.raises(Unavailable, match="engine: device cuda:0 failed"):
            kind.check_health(replica)


def test_a_replica_of_either_kind_reports_its_load_over_all_models() -> None:
    from deployments.config import parse_config
    from deployments.serve.loaded_models import LoadedModels, LoadMeter

    for i in range(2):
        now = [0.0]
        models = [SimpleNamespace(queued_rows=rows, busy_s=0.0) for rows in (3, 4)]
        loaded: Any = LoadedModels(parse_config(MODEL, "test"))
        loaded._meter = LoadMeter(lambda now=now: now[0], lambda: 0.0)
        for version, model in enumerate(models):
            loaded.meter(("m", str(version)), model)
        kind, replica = replicas(loaded)[i]
        now[0], models[0].busy_s, models[1].busy_s = 10.0, 1.5, 0.5
        load = asyncio.run(kind.record_autoscaling_stats(replica))
        assert load == {"queued_rows": 7, "device_share": 0.2, "loop_share": 0}


def test_shards_of_rows_are_for_the_releases_of_the_configuration_alone(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.config import parse_config
    from deployments.lifecycle.release import Release
    from deployments.serve import loaded_models

    config = parse_config({"models": [{"path": "m", "name": "other"}, {"path": str(demo_bundle)}], "device": "cpu"}, "test")
    release, given = Release.of(config.models[1]), []

    def warm(config: Any, bundle: Any, tables: Any, rows: Any) -> Any:
        given.append(rows)
        return SimpleNamespace(), SimpleNamespace(buffer_bytes=0, captured_bytes=0)

    async def main() -> None:
        loaded = loaded_models.LoadedModels(config)
        finds: Any = [lambda: None]
        await loaded.find_rows({1: finds})
        for one in (release, release.model_copy(update={"version": "9"}), release):
            await loaded.load(one)
        assert given == [finds, (), finds]

    monkeypatch.setattr(loaded_models, "warm_engine", warm)
    asyncio.run(main())
