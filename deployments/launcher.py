"""Starts and stops a deployment on this host: Ray, Serve with HAProxy and throughput mode, one application.

Serve reads its settings from the environment when its modules are imported, in every one of its processes, so Ray is imported
only after they are set. Nothing here knows models or requests.
"""

import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from deployments.config import DeploymentConfig
from deployments.metrics import LATENCY_BOUNDS_MS
from dpiframe_core.errors import ConfigError, DPIFrameError

FLAGS = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
_LOOPBACK = "127.0.0.2"  # Ray swaps 127.0.0.1 for the host's outer address; this one it leaves alone
_OBJECT_STORE_BYTES = 80 * 2**20  # requests never touch it; Ray refuses less than 75 MiB
_REPLICA_PORTS = 100
_POLL_S = 0.1

Report = Callable[[str], None]


class LaunchError(DPIFrameError):
    """The service could not be started."""

    code = "launch_failed"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running service. Filled by `running`; `metrics_url` is empty on a cluster that somebody else started."""

    url: str
    metrics_url: str
    config: DeploymentConfig


@contextlib.contextmanager
def running(config: DeploymentConfig, report: Report, *, address: str | None = None) -> Iterator[Endpoint]:
    """The service of `config`, ready for requests within the block and stopped after it.

    Args:
        report: told of each step of starting and stopping, when it begins.
        address: of an existing Ray cluster with both flags active; without it a private one is started and stopped.

    Raises:
        ConfigError, LaunchError: and nothing is left running.
    """
    if "ray.serve" in sys.modules and any(os.environ.get(flag) != "1" for flag in FLAGS):
        raise LaunchError("launcher: got Ray Serve imported without its flags, expected a process that has not imported it")
    config = config.with_absolute_paths()
    with _interruptible():
        if address is None:
            with _private_cluster(config, report) as metrics_port:
                yield _deploy(config, report, f"http://127.0.0.1:{metrics_port}/metrics")
        else:
            with _joined_cluster(config, report, address):
                yield _deploy(config, report, "")


def serve_settings(config: DeploymentConfig, state: Path) -> dict[str, str]:
    """The environment of a private cluster: the two flags, one free port for everything that would have a fixed one, own files."""
    metrics, stats, fallback, fallback_grpc = _free_ports(4)
    first = _free_ports(1)[0] // _REPLICA_PORTS * _REPLICA_PORTS
    proxy = state / "haproxy"
    return {
        **dict.fromkeys(FLAGS, "1"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        # A window of its own: else a stale HAProxy of one instance could reach a replica of another on a port used again.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + _REPLICA_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(config.drain_s),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(10, round(config.drain_s))),
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "a"),  # short: socket paths end at 108 bytes and hold a node id of 56
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS": ",".join(map(str, LATENCY_BOUNDS_MS)),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Anyone who reaches a Ray port could run code: a token that only this user can read guards them.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state / "token"),
    }


@contextlib.contextmanager
def _private_cluster(config: DeploymentConfig, report: Report) -> Iterator[int]:
    _require_free_port(config.http.host, config.http.port)
    state = Path(tempfile.mkdtemp(prefix="dpi-", dir="/tmp"))
    (state / "token").touch(0o600)
    (state / "token").write_text(secrets.token_hex(32))
    metrics_port = _free_ports(1)[0]
    os.environ.update(serve_settings(config, state))
    clean = False
    try:
        report("Starting Ray")
        ray = _import_ray()
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(config.max_replicas * config.cpus_per_replica + 0.999)),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            namespace="serve",
            _node_ip_address=_LOOPBACK,
            _metrics_export_port=metrics_port,
            _temp_dir=str(state / "ray"),
        )
        _interrupt_on_sigterm()  # ray.init puts a handler of its own there
        yield metrics_port
        clean = True
    except KeyboardInterrupt:
        clean = True
        raise
    finally:
        with _uninterrupted():
            report("Stopping: finishing the requests in flight")
            _stop_haproxy(state, config.drain_s)
            _import_ray().shutdown()
            if clean:
                shutil.rmtree(state, ignore_errors=True)
            else:
                report(f"Logs are kept in {state}/ray/session_latest/logs")


@contextlib.contextmanager
def _joined_cluster(config: DeploymentConfig, report: Report, address: str) -> Iterator[None]:
    os.environ.update(dict.fromkeys(FLAGS, "1"))
    report(f"Joining the Ray cluster at {address}")
    ray = _import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="serve")
    except Exception as error:
        raise LaunchError(f"address: got {address!r} ({_last_line(str(error))}), expected a Ray cluster that can be joined") from None
    try:
        _interrupt_on_sigterm()
        _require_flags(ray)
        yield
    finally:
        with _uninterrupted():
            from ray import serve

            report("Stopping: finishing the requests in flight")
            with contextlib.suppress(Exception):
                serve.delete(config.application)
            ray.shutdown()


def _deploy(config: DeploymentConfig, report: Report, metrics_url: str) -> Endpoint:
    import ray
    from ray import serve

    from deployments.app import application

    config = config.placed(int(ray.cluster_resources().get("GPU", 0)))
    report("Starting HAProxy and the Serve controller")
    http = {"host": config.http.host, "port": config.http.port}
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(http_options=http, proxy_location="HeadOnly", logging_config=quiet)
    names = ", ".join(Path(m.path).name for m in config.models)
    report(f"Loading {names} on {config.device} and warming up")
    app = application(config, constructor_tries=1)
    serve.run_many(
        [serve.RunTarget(app, name=config.application, route_prefix=config.route_prefix)],
        wait_for_applications_running=False,
    )
    while (status := serve.status().applications[config.application]).status != "RUNNING":
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise LaunchError(_last_line("\n".join(d.message for d in status.deployments.values())))
        time.sleep(_POLL_S)
    url = f"http://127.0.0.1:{config.http.port}{config.route_prefix.rstrip('/')}"
    _wait_ready(url)
    return Endpoint(url, metrics_url, config)


def _wait_ready(url: str, patience_s: float = 10) -> None:
    """Serve calls an application running a moment before HAProxy has its new configuration."""
    import httpx

    give_up = time.monotonic() + patience_s
    while True:
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5)
            if answer.status_code == 200:
                return
            seen = f"status {answer.status_code}"
        except httpx.HTTPError as error:
            seen = str(error)
        if time.monotonic() > give_up:
            raise LaunchError(f"{url}/readyz: got {seen}, expected status 200 within {patience_s:g} s")
        time.sleep(_POLL_S)


def _stop_haproxy(state: Path, drain_s: float) -> None:
    """HAProxy's own soft stop: newcomers are refused at once, requests in flight are answered, then it exits.

    Deleting the application first, Serve's way, answers 404 for as long as the replicas drain, and ends in cut connections.
    """
    for pid in _haproxy_pids(state):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    give_up = time.monotonic() + drain_s
    while _haproxy_pids(state) and time.monotonic() < give_up:
        time.sleep(0.02)


def _haproxy_pids(state: Path) -> list[int]:
    """HAProxy processes whose configuration lies in `state`, those that an earlier reload has left to drain included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().split(b"\0")
            if command[0].endswith(b"haproxy") and any(arg.startswith(os.fsencode(state)) for arg in command):
                found.append(int(path.parent.name))
    return found


def _require_flags(ray: Any) -> None:
    """The flags count where Ray was started: read them from the environment of a fresh worker on each node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    def flags() -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in FLAGS}

    for node in (n for n in ray.nodes() if n["Alive"]):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for name, value in ray.get(flags.options(scheduling_strategy=here).remote()).items():
            if value != "1":
                raise ConfigError(f"{name} on node {node['NodeManagerAddress']}: got {value!r}, expected '1' before Ray starts there")


def _require_free_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"http.port: got {port} ({error.strerror}), expected a free port on {host}; try --port") from None


def _free_ports(count: int) -> list[int]:
    """Distinct ports that nobody listens on, below the range from which the kernel hands out ports for connections."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            if port not in found:
                found.append(port)
    return found


def _import_ray() -> Any:
    import ray

    return ray


def _last_line(message: str) -> str:
    print(message)
    return message.strip().splitlines()[-1]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    _interrupt_on_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half a stop behind; stopping has its own bound in time."""
    before = [(s, signal.signal(s, signal.SIG_IGN)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)
