"""Deployment configurations: the files in configs/, and what the strict schema refuses, word for word."""

from pathlib import Path

import pytest
import yaml

from deployments.config import DeploymentConfig, parse_config, read_config
from deployments.config_load import Autoscaling, Batching
from dpiframe_core.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
ONE_MODEL = {"models": [{"path": "models/demo"}]}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_in_the_repository_is_valid(file: Path) -> None:
    assert read_config(file).models


def test_the_repository_has_the_configurations_that_it_promises() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {"demo.yaml", "cpu.yaml", "gpu.yaml", "fanin.yaml"}


def test_values_of_a_file_arrive_and_the_rest_are_defaults() -> None:
    gpu = read_config(CONFIGS / "gpu.yaml")
    assert (gpu.http.host, gpu.device, gpu.precision, gpu.batching.lanes) == ("0.0.0.0", "cuda", "tf32", 2)
    assert gpu.autoscaling == Autoscaling(min_replicas=1, max_replicas=8, target_busy=0.6, down_after_s=120)
    assert (gpu.first_replicas, gpu.max_replicas) == (1, 8)
    demo = read_config(CONFIGS / "demo.yaml")
    assert (demo.http.host, demo.http.port, demo.replicas, demo.drain_s) == ("127.0.0.1", 8000, 1, 3)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("batching: {lanes: 0}", "batching.lanes: got 0, expected greater than or equal to 1"),
        ("batching: {lanes: '2'}", "batching.lanes: got '2', expected a valid integer"),
        (
            "batching: {lane: 1}",
            "batching.lane: got an unknown key, expected one of buckets, lanes, max_batch_rows, max_queued_rows",
        ),
        ("batching: {buckets: [8, 64]}", "batching.buckets: got [8, 64], expected growing sizes up to max_batch_rows 4096"),
        ("batching: {buckets: [8, 8, 4096]}", "batching.buckets: got [8, 8, 4096], expected growing sizes up to"),
        ("batching: {buckets: [0, 4096]}", "batching.buckets.0: got 0, expected greater than or equal to 1"),
        ("batching: {max_queued_rows: 1}", "batching.max_queued_rows: got 1, expected at least max_batch_rows 4096"),
        ("replicas: true", "replicas: got True, expected a valid integer"),
        ("replicas: 0", "replicas: got 0, expected greater than or equal to 1"),
        ("replicas: 1\nautoscaling: {max_replicas: 2}", "replicas: got both a number and autoscaling, expected one of the two"),
        ("autoscaling: {}", "autoscaling.max_replicas: got nothing, expected a value"),
        (
            "autoscaling: {min_replicas: 3, max_replicas: 2}",
            "autoscaling.max_replicas: got 2, expected at least min_replicas 3",
        ),
        ("topology: star", "topology: got 'star', expected 'colocated' or 'fanin'"),
        ("ingress_replicas: 2", "ingress_replicas: got a number for topology 'colocated', expected topology 'fanin' with it"),
        ("grpc: {port: 8000}", "grpc.port: got 8000, the port of http, expected another one"),
        ("grpc: {port: 0}", "grpc.port: got 0, expected greater than or equal to 1"),
        ("grpc: {ports: 1}", "grpc.ports: got an unknown key, expected one of port"),
        ("http: {port: 65536}", "http.port: got 65536, expected less than or equal to 65535"),
        (
            "http: {direct_socket: run/score.sock}",
            "http.direct_socket: got 'run/score.sock', expected match pattern '^/[!-~]{1,106}$'",
        ),
        ("http: {direct_socket_group: a}", "http.direct_socket_group: got 'a' without direct_socket, expected both"),
        ("http: {host: localhost}", "http.host: got 'localhost', expected '127.0.0.1' or '0.0.0.0'"),
        (
            "http: {host: 0.0.0.0}",
            "http.host: got '0.0.0.0' without access, expected access: {tokens: FILE} (--tokens), whose ",
        ),
        ("access: {}", "access.tokens: got neither it nor open: true, expected one of the two"),
        ("access: {open: false}", "access.tokens: got neither it nor open: true, expected one of the two"),
        ("access: {open: true, tokens: t}", "access.tokens: got both it and open: true, expected one of the two"),
        ("access: {open: 'yes'}", "access.open: got 'yes', expected a valid boolean"),
        ("access: {token: t}", "access.token: got an unknown key, expected one of open, tokens"),
        ("limits: {max_body_s: 0}", "limits.max_body_s: got 0, expected greater than 0"),
        ("device: cpu\nprecision: tf32", "precision: got 'tf32' for device 'cpu', expected fp32 or bf16"),
        ("device: tpu", "device: got 'tpu', expected 'auto', 'cpu' or 'cuda'"),
        ("drain_s: .inf", "drain_s: got inf, expected a finite number"),
        ("drain_s: 0", "drain_s: got 0, expected greater than or equal to 1"),
        ("application: a/b", "application: got 'a/b', expected match pattern '^[A-Za-z0-9_][A-Za-z0-9_.\\-]{0,127}$'"),
        ("topology: fanin\nreplicas: 17", "replicas: got 17 for topology 'fanin', expected at most 16"),
        (
            "topology: fanin\nautoscaling: {max_replicas: 17}",
            "autoscaling.max_replicas: got 17 for topology 'fanin', expected at most 16",
        ),
        ("limits: {max_rows: 5}", "limits.max_rows: got an unknown key, expected one of default_deadline_ms, "),
    ],
)
def test_a_broken_rule_is_one_line_with_the_keys_path(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"models: [{{path: models/demo}}]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"{file}: {line}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "got None, expected a mapping of keys"),
        ("- a", "got ['a'], expected a mapping of keys"),
        ("models: []", "models: got [], expected at least 1 item"),
        (
            "models: [{path: x, version: a/b}]",
            "models.0.version: got 'a/b', expected match pattern '^\\.*[!-\\-0-~][!-.0-~]*$'",
        ),
        ("models: [{pth: x}]", "models.0.path: got nothing, expected a value"),
        ("models: [{path: x, tables: {}}]", "models.0.tables.hbm_gib: got neither it nor placement, expected one of the two"),
        (
            "models: [{path: x, tables: {hbm_gib: 1, placement: p}}]",
            "models.0.tables.hbm_gib: got both it and placement, expected one of the two",
        ),
        (
            "models: [{path: x, tables: {placement: p, host_gib: 1}}]",
            "models.0.tables.host_gib: got a number beside placement, which says itself what the host holds",
        ),
        (
            "topology: fanin\nmodels: [{path: x, tables: {hbm_gib: 1, miss_budget_ms: 2}}]",
            "models.0.tables.miss_budget_ms: got 2 for topology 'fanin', expected topology 'colocated' with it",
        ),
        (
            "models: [{path: x, tables: {hbm_gib: 1, replan_s: 0}}]",
            "models.0.tables.replan_s: got 0, expected greater than or equal to 1",
        ),
        ("models: [{path: x, tables: {hbm_gib: 0}}]", "models.0.tables.hbm_gib: got 0, expected greater than 0"),
        ("models: [{path: x, tables: {hbm_gib: 1, host_folder: shm}}]", "models.0.tables.host_folder: got 'shm', expected "),
        ("device: cpu", "models: got nothing, expected a value"),
        ("models: {path: x}", "models: got {'path': 'x'}, expected a list"),
        ("models: [x]", "models.0: got 'x', expected a mapping"),
        ("models: [{path: x}]\nlimits: [1]", "limits: got [1], expected a mapping"),
        (
            "models: [{path: a, name: m}, {path: b, name: m}]",
            "models.1.name: got 'm', the name of models.0, expected another one, or a canary or shadow of it",
        ),
        (
            "models: [{path: a}, {path: b}, {path: ./a}]",
            "models.2.name: got none for the bundle of models.0, expected another one, or a canary or shadow of it",
        ),
        ("device: cpu\ndevice: cuda", "got the key 'device' twice"),
        ("a: [", "got while parsing"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    assert f"{file}: {line}" in str(caught.value)


def test_a_version_beside_the_live_one_has_the_same_name() -> None:
    models = [{"path": "a", "name": "m"}, {"path": "b", "name": "m", "shadow": True}, {"path": "a", "canary": {"percent": 5}}]
    assert len(parse_config({"models": models}, "test").models) == 3
    assert len(parse_config({"models": [{"path": "a"}, {"path": "a", "name": "again"}]}, "test").models) == 2


def test_every_fault_of_a_file_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("models: [{path: x, nam: y}]\ndevise: cpu\nreplicas: 0\n")
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    wheres = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert sorted(wheres) == ["devise", "models.0.nam", "replicas"]


def test_a_missing_file_and_a_file_of_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: got 'No such file or directory', expected a readable file"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: got "):
        read_config(tmp_path / "bytes.yaml")


def test_the_cpus_of_a_deployment_are_those_of_all_its_processes() -> None:
    assert read_config(CONFIGS / "fanin.yaml").cpus == 1 * 4 + 8 * 1
    assert read_config(CONFIGS / "gpu.yaml").cpus == 8 * 4


def test_auto_becomes_the_gpu_where_there_is_one_and_else_the_cpu() -> None:
    config = parse_config(ONE_MODEL, "test")
    assert (config.placed(0).device, config.placed(0).gpus_per_replica) == ("cpu", 0)
    assert (config.placed(8).device, config.placed(8).gpus_per_replica) == ("cuda", 1)
    explicit = parse_config(ONE_MODEL | {"device": "cpu"}, "test")
    assert explicit.placed(8) == explicit


def test_more_rows_wait_before_a_gpu_unless_it_is_said_how_many() -> None:
    assert [Batching().most_queued(device) for device in ("cpu", "cuda:1", "auto")] == [65_536, 262_144, 262_144]
    assert {Batching(max_queued_rows=5000).most_queued(device) for device in ("cpu", "cuda:1")} == {5000}
    with pytest.raises(ConfigError, match=r"limits\.max_rows_per_request: got 70000, expected at most .* 65536"):
        parse_config(ONE_MODEL | {"limits": {"max_rows_per_request": 70000}}, "here")


def test_each_replica_on_gpus_needs_a_whole_one() -> None:
    three = parse_config(ONE_MODEL | {"device": "cuda", "replicas": 3}, "test")
    assert three.placed(3).device == "cuda"
    with pytest.raises(ConfigError, match=r"device: got 'cuda' for 3 replica\(s\), expected a GPU each; found 2"):
        three.placed(2)
    scaled = parse_config(ONE_MODEL | {"device": "cuda", "autoscaling": {"min_replicas": 2, "max_replicas": 8}}, "test")
    assert scaled.placed(2).gpus_per_replica == 1


def test_relative_bundle_paths_start_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    models = [{"path": "a"}, {"path": "/b"}, {"path": "/c", "tables": {"placement": "p"}}]
    config = parse_config({"models": models}, "test").with_absolute_paths()
    assert [model.path for model in config.models] == [str(tmp_path / "a"), "/b", "/c"]
    placed = config.models[2].tables
    assert placed is not None
    assert placed.placement == str(tmp_path / "p")


def test_a_configuration_survives_the_way_through_yaml() -> None:
    config = read_config(CONFIGS / "gpu.yaml")
    text = yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True))
    assert parse_config(yaml.safe_load(text), "test") == config
    assert isinstance(config, DeploymentConfig)


def test_other_hosts_are_let_in_with_tokens_or_on_purpose_and_loopback_without_either() -> None:
    everywhere = ONE_MODEL | {"http": {"host": "0.0.0.0"}}
    for access in ({"tokens": "tokens.yaml"}, {"open": True}):
        assert parse_config(everywhere | {"access": access}, "test").http.host == "0.0.0.0"
        assert parse_config(ONE_MODEL | {"access": access}, "test").http.host == "127.0.0.1"
    assert parse_config(ONE_MODEL, "test").access is None


def test_every_configuration_that_other_hosts_reach_asks_for_tokens() -> None:
    reached = [c for c in map(read_config, CONFIGS.glob("*.yaml")) if c.http.host == "0.0.0.0"]
    assert len(reached) == 2
    assert all(c.access is not None and c.access.tokens for c in reached)


def test_a_relative_file_of_tokens_starts_at_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    access = parse_config(ONE_MODEL | {"access": {"tokens": "t.yaml"}}, "test").with_absolute_paths().access
    assert access is not None
    assert access.tokens == str(tmp_path / "t.yaml")
