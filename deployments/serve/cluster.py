"""The Ray cluster that a deployment runs on: a private one with Serve's settings, or one that is joined.

Settings have to be in the environment before Serve is imported anywhere, so Ray is imported only after they are set.
"""

import contextlib
import math
import os
import secrets
import select
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.config import DeploymentConfig
from deployments.host_sockets.listening import SocketFile
from deployments.metrics import LATENCY_BOUNDS_MS
from deployments.preflight.named_files import require_files
from deployments.private_ray import idle_processes_left_out, undisturbed_init
from deployments.processes import cores, killed_after, processes_of, proxy_threads
from deployments.serve.host import (
    WINDOW,
    end_leftovers,
    free_ports,
    haproxy_stopped,
    held,
    port_windows,
    require_free_port,
    require_listener,
)
from deployments.signals import interrupts_deferred, uninterrupted
from dpiframe_core.errors import ConfigError, DPIFrameError

FLAGS = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")
# What a service can do without, but not as fast; see docs/serving.md.
FASTER = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.front.middlewares",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a line of log a request, which a Python process reads
    # Another goes to syslog's port, where mostly nobody listens: the kernel then answers each with an ICMP message. Serve's
    # configuration sets the level `info` behind this, past the `#`; `alert` is a replica that went down.
    "RAY_SERVE_HAPROXY_LOG_TARGET": "127.0.0.1:514 local0 alert #",
}
_LOOPBACK = "127.0.0.2"  # Ray swaps 127.0.0.1 for the host's outer address; this one it leaves alone
_OBJECT_STORE_BYTES = 80 * 2**20  # requests never touch it; Ray refuses less than 75 MiB
_DELETE_S = 15.0  # beyond the time that an engine has to end
_VITAL = ("gcs_server", "raylet")
_MESSAGE_ROOM = 65_536  # bytes of a gRPC message beside its tensors

Report = Callable[[str], None]


class LaunchError(DPIFrameError):
    """The service could not be started, or not be kept. `logs_help`: the message alone may not explain why."""

    code = "launch_failed"

    def __init__(self, message: str, *, logs_help: bool = True) -> None:
        self.logs_help = logs_help
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class PrivateCluster:
    """Filled by `private_cluster`.

    Attributes:
        metrics_port: of Ray's metrics. vital: processes that Ray starts once, as descriptors of theirs by their names.
    """

    metrics_port: int
    vital: Mapping[str, int]

    def check(self) -> None:
        """Raises LaunchError if a vital process has ended: Ray starts no other one, and replaces nothing any more."""
        ends = select.poll()
        for fd in self.vital.values():
            ends.register(fd, select.POLLIN)
        ended = {fd for fd, _ in ends.poll(0)}
        for name, fd in self.vital.items():
            if fd in ended:
                raise LaunchError(f"ray: got the end of its {name}, expected it to outlive the service, which stops")


def serve_settings(config: DeploymentConfig, state: Path, windows: Sequence[int]) -> dict[str, str]:
    """The environment of a private cluster: the two flags, and free ports and own files for all that is fixed by default."""
    first, first_grpc, single = windows
    metrics, stats, fallback, fallback_grpc = free_ports(4, single)
    proxy = state / "haproxy"
    ours = {  # unless the user has his own
        **FASTER,
        "RAY_SERVE_HAPROXY_NBTHREAD": str(proxy_threads()),
        # Serve's default, 0.1, is two fifths of the CPU time that an idle service takes. A start takes 1 s longer.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # libgomp spins between parallel regions; with HTTP on the same cores a region then waits for a whole time slice.
        "GOMP_SPINCOUNT": "10000",
        "RAY_preload_python_modules": "deployments.without_pandas",
    }
    return {
        **dict.fromkeys(FLAGS, "1"),
        **{name: os.environ.get(name, value) for name, value in ours.items()},
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        # A window of its own: else a stale HAProxy of one instance could reach a replica of another on a port used again. The
        # last port, which Serve leaves out, is taken: it holds the window.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + WINDOW - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first_grpc + WINDOW - 1),
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(config.limits.max_body_bytes + _MESSAGE_ROOM),  # else a message may have 2 GiB
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(config.drain_s),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(10, round(config.drain_s))),
        # Seconds without a byte of a request that a client has begun. By default 3600: 4,096 such clients, all that HAProxy
        # takes, lock out everybody else for an hour. Neither waiting for an answer nor an idle connection counts.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "30",
        # A HAProxy that died is started anew after three looks. By default they are ten seconds apart, and nobody is answered.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Serve kills a proxy that is not ready by then, and its start fails with it. By default it has 5 s, imports included.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "a"),  # short: socket paths end at 108 bytes and hold a node id of 56
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_REQUEST_LATENCY_BUCKETS_MS": ",".join(map(str, LATENCY_BOUNDS_MS)),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray runs workers at nice 15, so that on a busy host a replica comes after everything else.
        "RAY_worker_niceness": "0",
        # Anyone who reaches a Ray port could run code: a token that only this user can read guards them.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state / "token"),
    }


def _start_ray(state: Path, metrics_port: int | None, window: int, **settings: Any) -> int:
    """`ray.init`, and once more if it fails; returns its metrics port: that given, or one of the window, each time another.

    Ray gives up a raylet that has not registered within 30 s, as on a busy host or when somebody has taken its port meanwhile.
    """
    import ray

    port, other = [metrics_port] * 2 if metrics_port else free_ports(2, window)
    try:
        ray.init(_metrics_export_port=port, **settings)
        return port
    except Exception:
        with killed_after(state):
            ray.shutdown()
        ray.init(_metrics_export_port=other, **settings)
        return other


@contextlib.contextmanager
def private_cluster(config: DeploymentConfig, report: Report) -> Iterator[PrivateCluster]:
    """A cluster of this host alone for the block, with all settings.

    Raises:
        ConfigError: a file that it names is not as it must be, or a port is taken.
    """
    require_files(config)
    if config.nodes > 1:
        raise ConfigError(
            f"nodes: got {config.nodes} for a cluster of this host alone, expected --address of one that has them"
        )
    end_leftovers()
    for key, (host, port) in config.ports.items():
        require_free_port(host, port, key)
    file = None if config.http.direct_socket is None else SocketFile(config.http.direct_socket, config.http.direct_socket_group)
    if file is not None:
        file.check()
    with port_windows(4) as windows, contextlib.ExitStack() as stack:
        state = stack.enter_context(_state_folder())
        (state / "token").touch(0o600)
        (state / "token").write_text(secrets.token_hex(32))
        os.environ.update(serve_settings(config, state, windows[:3]))
        with interrupts_deferred():
            import ray
        try:
            report("Starting Ray")
            with undisturbed_init(), idle_processes_left_out():
                metrics_port = _start_ray(
                    state,
                    config.metrics.port,
                    windows[3],
                    address="local",
                    num_cpus=max(cores(), math.ceil(config.cpus)),
                    num_gpus=0 if config.device == "cpu" else None,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level="ERROR",
                    namespace="serve",
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=str(state / "ray"),
                )
            vital = {name: os.pidfd_open(pid) for name in _VITAL for pid in processes_of(state, name.encode())}
            for fd in vital.values():
                stack.callback(os.close, fd)
            yield PrivateCluster(metrics_port, vital)
        finally:
            with uninterrupted():
                report("Stopping: finishing the requests in flight")
                with haproxy_stopped(state, config.drain_s):
                    if (config.http.direct_port is not None or file is not None) and ray.is_initialized():
                        _leave_direct_port(config)
                with killed_after(state):
                    ray.shutdown()
                if file is not None:
                    file.left()  # its processes were ended before they could


@contextlib.contextmanager
def _state_folder() -> Iterator[Path]:
    """Of a cluster. It stays where its logs may say more than the error does."""
    state = Path(tempfile.mkdtemp(prefix=f"dpi-{os.getpid()}-", dir="/tmp"))
    keep_logs = False
    with held(state):
        try:
            yield state
        except Exception as error:
            keep_logs = not isinstance(error, DPIFrameError) or (isinstance(error, LaunchError) and error.logs_help)
            if keep_logs:
                error.add_note(f"logs: {state}/ray/session_latest/logs")
            raise
        finally:
            if not keep_logs:
                shutil.rmtree(state, ignore_errors=True)


@contextlib.contextmanager
def joined_cluster(config: DeploymentConfig, report: Report, address: str) -> Iterator[None]:
    """A cluster that runs already, joined for the block; the application is deleted after it.

    Raises:
        LaunchError: there is none. ConfigError: nobody listens there, or a node of it lacks one of `FLAGS`.
    """
    os.environ.update(dict.fromkeys(FLAGS, "1"))
    report(f"Joining the Ray cluster at {address}")
    require_listener(address)
    with interrupts_deferred():
        import ray
    try:
        with undisturbed_init():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="serve")
    except Exception as error:
        raise LaunchError(
            f"address: got {address!r} ({str(error).strip().splitlines()[0]}), expected a Ray cluster to join"
        ) from None
    try:
        _require_flags()
        yield
    finally:
        with uninterrupted():
            report("Stopping: finishing the requests in flight")
            # Of a controller that is away, for it was on a node that is, Serve would wait for its answer forever.
            deleting = threading.Thread(target=_deleted, args=(config.application,), daemon=True)
            deleting.start()
            deleting.join(3 * config.drain_s + _DELETE_S)
            if deleting.is_alive():
                report("The Serve controller does not answer: the application stays on the cluster")
            ray.shutdown()


def _deleted(application: str) -> None:
    from ray import serve

    with contextlib.suppress(Exception):
        serve.delete(application)


def _leave_direct_port(config: DeploymentConfig) -> None:
    import ray

    from deployments.direct.shared_port import leave
    from deployments.fanin.handshake import meeting_place

    leave(meeting_place(config.application, ray.get_runtime_context().get_node_id()), config.drain_s)


def _require_flags() -> None:
    """The flags count where Ray was started: read them from the environment of a fresh worker on each node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0)(_flags_here)
    for node in (n for n in ray.nodes() if n["Alive"]):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for name, value in ray.get(task.options(scheduling_strategy=there).remote()).items():
            if value != "1":
                where = f"{name} on node {node['NodeManagerAddress']}"
                raise ConfigError(f"{where}: got {value or 'nothing'}, expected '1' in the environment in which Ray is started")


def _flags_here() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in FLAGS}
