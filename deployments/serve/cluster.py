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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.config import DeploymentConfig
from deployments.host_sockets.listening import SocketFile
from deployments.preflight.named_files import require_files
from deployments.private_ray import idle_processes_left_out, undisturbed_init
from deployments.processes import killed_after, processes_of
from deployments.serve.host import (
    end_leftovers,
    free_ports,
    haproxy_stopped,
    held,
    port_windows,
    require_free_port,
    require_listener,
)
from deployments.serve.serve_settings import FLAGS, serve_settings
from deployments.signals import interrupts_deferred, uninterrupted
from dpiframe_core.errors import ConfigError, DPIFrameError
from kernels.runtime.cores import usable_cores

_LOOPBACK = "127.0.0.2"  # Ray swaps 127.0.0.1 for the host's outer address; this one it leaves alone
_OBJECT_STORE_BYTES = 80 * 2**20  # requests never touch it; Ray refuses less than 75 MiB
_DELETE_S = 15.0  # beyond the time that an engine has to end
_VITAL = ("gcs_server", "raylet")

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
                    num_cpus=max(usable_cores(), math.ceil(config.cpus)),
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
