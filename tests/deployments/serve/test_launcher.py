"""The real thing on loopback: `dpiframe serve` as a user starts it, Ray Serve behind HAProxy, requests through it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from deployments.config import parse_config
from deployments.processes import cores
from deployments.serve import host
from deployments.serve.cluster import FASTER, FLAGS, LaunchError, serve_settings
from deployments.serve.host import WINDOW, free_ports, port_windows
from deployments.serve.launcher import _cause
from dpiframe_core.errors import ConfigError
from tests import run_guard
from tests.deployments.own_ports import own_port
from tests.deployments.server_process import DPIFRAME, Server, outcomes_of_ctrl_c_under_load, score

RAY = str(Path(sys.executable).with_name("ray"))
WINDOWS = (20_000, 20_100, 20_200)  # as `port_windows` gives them


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("configs") / "patient.yaml"
    config.write_text(f"models: [{{path: {demo_bundle}}}]\ndrain_s: 20\n")  # a busy host may take longer than the default
    with Server(config) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def example(demo_bundle: Path) -> bytes:
    return (demo_bundle / "example.json").read_bytes()


@pytest.mark.ray
@pytest.mark.slow
def test_scores_over_http_are_those_of_the_engine(server: Server, demo_bundle: Path, example: bytes) -> None:
    from dpiframe_core.engine.engine import Engine

    engine = Engine.load(demo_bundle, "cpu")
    engine.warmup()
    request = json.loads(example)
    wanted = engine.score(request["candidates"], request["context"])[:, 0]
    engine.close()
    answer = score(server.url, example)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get_list("x-request-id") == [answer.json()["request_id"]]
    assert np.array_equal(np.float32(answer.json()["scores"]), wanted)


@pytest.mark.ray
@pytest.mark.slow
def test_scoring_is_answered_in_front_of_serve_but_for_what_only_serve_does(server: Server, example: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"caf\xe9")]  # for Serve a 500
    answer = httpx.post(f"{server.url}/v1/score", content=example, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get_list("x-request-id") == [answer.json()["request_id"]]
    infer = httpx.post(f"{server.url}/v2/models/small/infer", content=b"{", headers=headers)
    assert infer.status_code == 404
    assert infer.json() == {"error": "model: got 'small', expected one of ['demo']"}
    assert len(infer.headers.get_list("x-request-id")) == 1
    timed = httpx.post(f"{server.url}/v1/score", content=example, headers={"x-request-timeout-seconds": "1e-6"})
    assert (timed.status_code, timed.text[:8]) == (408, "Request ")
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 500


@pytest.mark.ray
@pytest.mark.slow
def test_liveness_readiness_serves_own_health_and_the_documentation_answer(server: Server) -> None:
    for path in ("/livez", "/readyz", "/-/healthz", "/docs", "/openapi.json", "/v1/models", "/v1/batch-sizes"):
        assert httpx.get(server.url + path).status_code == 200, path


@pytest.mark.ray
@pytest.mark.slow
def test_prometheus_sees_the_requests_of_the_model_at_rays_endpoint_and_ours_alone_at_the_services(
    server: Server, example: bytes
) -> None:
    score(server.url, example)
    url = next(line.split()[-1] for line in server.output.splitlines() if "metrics at" in line)
    seen = re.compile(r'^ray_dpiframe_requests_total\{.*model="demo",.*outcome="ok",.*version="1"\} [1-9]', re.MULTILINE)
    for source in (url, f"{server.url}/metrics"):
        give_up = time.monotonic() + 40  # Ray reports every ten seconds
        while not seen.search(text := httpx.get(source).text):
            assert time.monotonic() < give_up, [line for line in text.splitlines() if "dpiframe" in line]
            time.sleep(1)
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert {line.split("{")[0].split(" ")[-1][:13] for line in lines if line[0] != "#"} == {"ray_dpiframe_", "0"}
    assert "ray_dpiframe_unreachable_nodes 0" in lines
    for name in ("model_info", "model_ready", "device_active_ms_total", "scores_bucket", "batches_total", "values_total"):
        assert [line for line in lines if line.startswith(f"ray_dpiframe_{name}{{") and 'version="1"' in line], name


@pytest.mark.ray
@pytest.mark.slow
def test_clients_reach_the_service_on_loopback_only_and_ray_only_with_a_token_that_its_user_can_read(server: Server) -> None:
    listening = {(address, port) for address, port in listeners() if port == server.port}
    assert listening == {("127.0.0.1", server.port)}
    (state,) = server.states()
    token = state / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    environment = Path(f"/proc/{pid_of('raylet', server)}/environ").read_bytes().split(b"\0")
    assert b"RAY_AUTH_MODE=token" in environment
    assert f"RAY_AUTH_TOKEN_PATH={token}".encode() in environment


@pytest.mark.ray
@pytest.mark.slow
def test_what_nobody_asks_in_a_private_cluster_is_left_out(server: Server) -> None:
    """Of Ray's processes, and pandas of its workers: the controller, two proxies and a replica at least."""
    commands = server.processes()
    assert [c for c in commands.values() if re.search(r"/(dashboard|monitor|log_monitor)\.py", c)] == []
    workers = [pid for pid, command in commands.items() if re.match(r"ray::(?!\w+Agent)", command)]
    assert len(workers) >= 4
    assert [commands[pid] for pid in workers if "/pandas/" in Path(f"/proc/{pid}/maps").read_text()] == []


@pytest.mark.ray
@pytest.mark.slow
def test_a_client_that_stalls_in_the_middle_of_a_request_is_dropped_within_a_minute(server: Server) -> None:
    (state,) = server.states()
    (config,) = state.glob("haproxy/*/haproxy.cfg")
    (seconds,) = re.findall(r"^\s*timeout client (\d+)s$", config.read_text(), re.MULTILINE)
    assert int(seconds) <= 60


@pytest.mark.ray
@pytest.mark.slow
def test_a_second_instance_runs_beside_the_first_and_its_end_by_sigterm_leaves_no_process_and_no_file(
    server: Server, demo_bundle: Path, example: bytes
) -> None:
    """The second one as nohup starts it: its processes ignore SIGINT. SIGTERM comes to the command alone, as below."""
    with Server(demo_bundle, ignores_sigint=True) as second:
        second.wait_ready()
        assert len(second.states()) == 1
        assert score(second.url, example).json()["scores"] == score(server.url, example).json()["scores"]
        os.killpg(second.process.pid, signal.SIGINT)
        assert score(second.url, example).status_code == 200
        assert second.stop(signal.SIGTERM, alone=True) == 0, second.output
    assert "Traceback" not in second.output
    assert second.states() == []
    with pytest.raises(httpx.ConnectError):
        score(second.url, example)
    assert second.processes() == {}
    assert score(server.url, example).status_code == 200


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_under_load_loses_no_request(server: Server, example: bytes) -> None:
    """The last test of this server."""
    outcomes = outcomes_of_ctrl_c_under_load(server, example)
    assert outcomes.keys() == {"scored", "late"}, outcomes
    assert outcomes["late"] == 2
    assert "Traceback" not in server.output


@pytest.mark.ray
@pytest.mark.slow
def test_ctrl_c_while_starting_leaves_nothing_behind(demo_bundle: Path) -> None:
    with Server(demo_bundle) as server:
        server.wait_for("HAProxy")
        assert len(server.states()) == 1
        assert server.stop(signal.SIGINT) == 130
    assert server.states() == []
    assert "Traceback" not in server.output


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["before Ray", "Starting Ray", "a raylet", "Starting HAProxy", "Loading", "the stop"])
def test_sigterm_ends_with_status_0_in_every_phase_and_leaves_nothing_behind(demo_bundle: Path, phase: str) -> None:
    """The command alone has it, as a supervisor with `KillMode=mixed` or a container sends it. While it serves: the second one
    above.
    """
    with Server(demo_bundle) as server:
        if phase == "before Ray":  # its imports last a second
            await_true(lambda: catches(server.process.pid, signal.SIGTERM))
        elif phase == "a raylet":
            await_true(lambda: any("raylet/raylet" in command for command in server.processes().values()))
        elif phase == "the stop":
            server.wait_for("Serving at")
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("Stopping")
        else:
            server.wait_for(phase)
        assert server.stop(signal.SIGTERM, alone=True) == 0, server.output
    assert server.states() == []
    assert "Traceback" not in server.output
    assert server.processes() == {}


@pytest.mark.ray
@pytest.mark.slow
def test_a_bundle_that_a_replica_refuses_is_one_line_and_exit_code_1(demo_bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(demo_bundle, broken)
    (broken / "dense.safetensors").write_bytes(b"short")
    with Server(broken) as server:
        said, _ = server.process.communicate(timeout=120)
    assert server.process.returncode == 1
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "dense.safetensors" in line
    assert server.states() == []


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_without_the_flags_is_not_joined(demo_bundle: Path, tmp_path: Path) -> None:
    port, client_port, folder = own_port(), own_port(), Path("/tmp") / f"dpi-test-{os.getpid()}"
    token = tmp_path / "token"
    token.write_text("0" * 64)
    environment = {k: v for k, v in os.environ.items() if k not in FLAGS}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = subprocess.Popen(
        [RAY, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.3", "--include-dashboard=false",
         "--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={folder}", f"--ray-client-server-port={client_port}"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert ray.stdout is not None
        started = ""
        for line in ray.stdout:
            started += line
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail(started)
        joined = subprocess.run(
            [DPIFRAME, "serve", "--bundle", str(demo_bundle), "--address", f"127.0.0.3:{port}",
             "--port", str(own_port())],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        ray.terminate()
        run_guard.kill_all(lambda: {process.pid for process in run_guard.processes() if process.session == ray.pid})
        ray.communicate(timeout=60)
        shutil.rmtree(folder)
    assert joined.returncode == 1
    said = "RAY_SERVE_ENABLE_HA_PROXY on node 127.0.0.3: got nothing, expected '1' in the environment in which Ray is started"
    assert said in joined.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import
def test_a_stop_does_not_wait_for_a_serve_controller_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray import serve

    from deployments.serve import cluster

    never, done, said = threading.Event(), [], []
    for name in FLAGS:
        monkeypatch.setenv(name, "1")
    for what, name, double in (
        (ray, "init", lambda **_: None), (ray, "shutdown", lambda: done.append("shutdown")),
        (serve, "delete", lambda _: never.wait()), (cluster, "_require_flags", lambda: None),
        (cluster, "ray_init", contextlib.nullcontext), (cluster, "_DELETE_S", -2.9),
    ):  # fmt: skip
        monkeypatch.setattr(what, name, double)
    with cluster.joined_cluster(parse_config({"models": [{"path": "x"}]}, "test"), said.append, "there"):
        pass
    never.set()
    assert done == ["shutdown"]
    assert said[-1] == "The Serve controller does not answer: the application stays on the cluster"


def listeners() -> set[tuple[str, int]]:
    """(address, port) of all listening IPv4 sockets of this host."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has a handler for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"^SigCgt:\s+(\w+)", status, re.MULTILINE)[0], 16) >> signum - 1 & 1)


def await_true(there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not there():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def pid_of(name: str, server: Server) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == server.process.pid and (folder / "comm").read_text().strip() == name:
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"no process {name} in the server's session")


def test_a_window_of_ports_has_one_owner_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PORTS", range(61_000, 65_000))  # who takes all of the usual ones stops services that start now
    with port_windows(15) as mine, port_windows(15) as theirs:
        assert len({*mine, *theirs}) == 30
        with pytest.raises(ConfigError, match=r"ports: got \d+ free windows of 40, expected 16"), port_windows(16):
            pass
    with port_windows(30) as every:  # given back, those of the refused attempt too
        assert not {port - port % WINDOW for port in free_ports(40)} & {*every}


def test_two_instances_share_no_port_and_no_file(tmp_path: Path) -> None:
    config = parse_config({"models": [{"path": "models/x"}], "drain_s": 4}, "test")
    with port_windows(3) as one, port_windows(3) as other:
        first, second = (serve_settings(config, tmp_path / name, w) for name, w in (("a", one), ("b", other)))
    for settings, windows in ((first, one), (second, other)):
        ports = [int(value) for name, value in settings.items() if name.endswith("PORT")]
        assert len({*ports}) == len(ports) == 8
        assert {port - port % WINDOW for port in ports} == {*windows}  # of 12,000 ports two draws may be alike
    assert first.keys() == second.keys()
    alike = {key for key in first if first[key] == second[key]}
    fixed = {*FLAGS, *FASTER, "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"}
    assert {key for key in alike if "PORT" in key or "PATH" in key or "FILE" in key or "BASE" in key} == {next(iter(FASTER))}
    assert fixed <= alike
    assert all(first[flag] == "1" for flag in FLAGS)
    assert first["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "4.0"


@pytest.mark.parametrize(
    ("name", "theirs"),
    [*zip(FASTER, ("theirs.middlewares", "1", "10.0.0.5:514"), strict=True), ("RAY_SERVE_HAPROXY_NBTHREAD", "7")],
)
def test_what_the_user_sets_himself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, theirs: str) -> None:
    config = parse_config({"models": [{"path": "models/x"}]}, "test")
    monkeypatch.delenv(name, raising=False)
    assert serve_settings(config, tmp_path, WINDOWS)[name] == FASTER.get(name, str(max(2, cores() // 8)))
    monkeypatch.setenv(name, theirs)
    assert serve_settings(config, tmp_path, WINDOWS)[name] == theirs


def test_a_grpc_message_has_the_bound_of_a_body_and_replicas_ports_of_their_own(tmp_path: Path) -> None:
    config = parse_config({"models": [{"path": "models/x"}], "limits": {"max_body_bytes": 5000}}, "test")
    settings = serve_settings(config, tmp_path, WINDOWS)
    assert int(settings["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"]) == 5000 + 65_536
    windows = []
    for kind in ("HTTP", "GRPC"):
        first, last = (int(settings[f"RAY_SERVE_DIRECT_INGRESS_{end}_{kind}_PORT"]) for end in ("MIN", "MAX"))
        windows.append(range(first, last))
    assert not set(windows[0]) & set(windows[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import
def test_a_proxy_that_starts_slowly_has_as_long_as_the_start_waits_for_it(tmp_path: Path) -> None:
    from ray.serve._private.constants import HTTP_PROXY_TIMEOUT

    settings = serve_settings(parse_config({"models": [{"path": "models/x"}]}, "test"), tmp_path, WINDOWS)
    assert float(settings["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]) == HTTP_PROXY_TIMEOUT


def test_latency_histograms_start_below_a_millisecond(tmp_path: Path) -> None:
    settings = serve_settings(parse_config({"models": [{"path": "models/x"}]}, "test"), tmp_path, WINDOWS)
    bounds = [float(b) for b in settings["RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS"].split(",")]
    assert bounds == sorted(set(bounds))
    assert bounds[0] <= 0.1


def test_the_admin_sockets_of_haproxy_fit_into_a_socket_address() -> None:
    config = parse_config({"models": [{"path": "models/x"}]}, "test")
    settings = serve_settings(config, Path("/tmp/dpi-4194304-12345678"), WINDOWS)
    for key in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        folder, name = os.path.split(settings[key])
        with_node_id = f"{folder}/{'0' * 56}/{name}"
        assert len(f"{with_node_id}.4194304.tmp") < 108, "HAProxy binds it under a temporary name first"


def test_an_error_of_ours_is_taken_out_of_the_traceback_that_serve_reports() -> None:
    message = 'The deployment failed to start.\nray::Replica()\n  File "x.py", line 1\n    load()\n'
    ours = _cause(message + "dpiframe_core.errors.BundleError: models/x: got nothing, expected a bundle")
    assert (str(ours), ours.logs_help) == ("models/x: got nothing, expected a bundle", False)
    other = _cause(message + "RuntimeError: first line\nsecond line")
    assert (str(other), other.logs_help) == ("RuntimeError: first line second line", True)
    assert str(_cause("")) == "Serve gave no reason"


def test_a_second_launch_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.serve.launcher import running

    monkeypatch.setitem(sys.modules, "ray.serve", sys)
    config = parse_config({"models": [{"path": "models/x"}]}, "test")
    with (
        pytest.raises(LaunchError, match="launcher: got a process that has imported Ray Serve before"),
        running(config, print),
    ):
        pytest.fail("started")
