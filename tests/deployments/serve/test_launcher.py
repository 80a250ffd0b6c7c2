"""How `dpiframe serve` starts and ends: in every phase, with a bundle or a cluster that will not do; and its settings."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.config import parse_config
from deployments.processes import proxy_threads
from deployments.serve import host
from deployments.serve.cluster import LaunchError
from deployments.serve.host import WINDOW, free_ports, port_windows
from deployments.serve.launcher import _cause, _has_replica
from deployments.serve.serve_settings import FASTER, FLAGS, serve_settings
from dpiframe_core.errors import ConfigError
from kernels.runtime.cores import usable_cores
from tests import run_guard
from tests.deployments.own_ports import own_port
from tests.deployments.server_process import DPIFRAME, Server

RAY = str(Path(sys.executable).with_name("ray"))
WINDOWS = (20_000, 20_100, 20_200)  # as `port_windows` gives them


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
@pytest.mark.parametrize(
    "phase",
    ["before Ray", "a raylet", "Loading", *(pytest.param(p, marks=pytest.mark.whole) for p in ("Starting Ray", "HAProxy"))],
)
def test_sigterm_ends_with_status_0_in_every_phase_and_leaves_nothing_behind(demo_bundle: Path, phase: str) -> None:
    """The command alone has it, as a supervisor with `KillMode=mixed` or a container sends it. While it serves: every
    `Server`; twice: test_launched.
    """
    with Server(demo_bundle) as server:
        if phase == "before Ray":  # its imports last a second
            await_true(lambda: catches(server.process.pid, signal.SIGTERM))
        elif phase == "a raylet":
            await_true(lambda: any("raylet/raylet" in command for command in server.processes().values()))
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
        (cluster, "undisturbed_init", contextlib.nullcontext), (cluster, "_DELETE_S", -2.9),
    ):  # fmt: skip
        monkeypatch.setattr(what, name, double)
    with cluster.joined_cluster(parse_config({"models": [{"path": "x"}]}, "test"), said.append, "there"):
        pass
    never.set()
    assert done == ["shutdown"]
    assert said[-1] == "The Serve controller does not answer: the application stays on the cluster"


def catches(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has a handler for it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"^SigCgt:\s+(\w+)", status, re.MULTILINE)[0], 16) >> signum - 1 & 1)


def await_true(there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not there():
        assert time.monotonic() < give_up
        time.sleep(0.01)


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
    [
        *zip(FASTER, ("theirs.middlewares", "theirs.modules", "1", "10.0.0.5:514"), strict=True),
        ("RAY_SERVE_HAPROXY_NBTHREAD", "7"),
        ("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.1"),
    ],
)
def test_what_the_user_sets_himself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, theirs: str) -> None:
    config = parse_config({"models": [{"path": "models/x"}]}, "test")
    monkeypatch.delenv(name, raising=False)
    ours = FASTER | {
        "RAY_SERVE_HAPROXY_NBTHREAD": str(proxy_threads(usable_cores())),
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    }
    assert serve_settings(config, tmp_path, WINDOWS)[name] == ours[name]
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


@pytest.mark.parametrize(("replicas", "has_one"), [([], False), (["UP"], True), (["DOWN"], False), (["DOWN", "UP 1/2"], True)])
def test_haproxy_has_a_replica_once_one_that_is_no_backup_is_up(replicas: list[str], has_one: bool) -> None:
    servers = [f"http-dpiframe,replica-{i},{status},1,0,2" for i, status in enumerate(replicas)]
    rest = ["http_frontend,FRONTEND,OPEN,,,0", "http-dpiframe,fallback,UP,0,1,2", "http-dpiframe,BACKEND,UP,1,1,1"]
    assert _has_replica("\n".join(["# pxname,svname,status,act,bck,type", *servers, *rest])) is has_one


@pytest.mark.ray
@pytest.mark.slow
def test_an_address_at_which_nobody_listens_is_one_line_at_once(demo_bundle: Path) -> None:
    with Server(demo_bundle, "--address", f"127.0.0.1:{own_port()}") as server:
        said, _ = server.process.communicate(timeout=60)
    assert server.process.returncode == 1
    assert "Connection refused), expected a Ray cluster to join" in said
