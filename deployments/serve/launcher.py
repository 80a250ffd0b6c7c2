"""Starts and stops a deployment on this host: a cluster, Serve with HAProxy and throughput mode, one application.

Serve reads its settings from the environment when its modules are imported, in every one of its processes, so Ray is imported
only after they are set. Nothing here knows models or requests.
"""

import asyncio
import contextlib
import csv
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deployments.config import DeploymentConfig
from deployments.serve.cluster import LaunchError, Report, joined_cluster, private_cluster
from deployments.signals import interrupted_by_sigterm, interrupts_deferred
from deployments.tls.front import tls_front
from dpiframe_core.errors import ConfigError

_GRPC_SERVICE = "deployments.infer_grpc.add_to_server"
_POLL_S = 0.1
_READY_S = 30  # for HAProxy to take its configuration over: a second, on a busy host many


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running service. Filled by `running`; `metrics_url` is empty on a cluster that somebody else started.

    Attributes:
        check: raises LaunchError once the private cluster is lost.
    """

    url: str
    metrics_url: str
    config: DeploymentConfig
    check: Callable[[], None] = lambda: None


@contextlib.contextmanager
def running(config: DeploymentConfig, report: Report, *, address: str | None = None) -> Iterator[Endpoint]:
    """The service of `config`, ready for requests within the block and stopped after it. Once in a process, in its main thread.

    Args:
        report: told of each step of starting and stopping, when it begins.
        address: of an existing Ray cluster with both flags active; without it a private one is started and stopped.

    Raises:
        ConfigError, LaunchError: and nothing is left running.
    """
    if "ray.serve" in sys.modules:
        raise LaunchError("launcher: got a process that has imported Ray Serve before, expected its settings to come first")
    config = config.with_absolute_paths()
    with interrupted_by_sigterm(), contextlib.ExitStack() as stack:
        if address is None:
            cluster = stack.enter_context(private_cluster(config, report))
            endpoint = _deploy(config, report, f"http://127.0.0.1:{cluster.metrics_port}/metrics")
            endpoint = replace(endpoint, check=cluster.check)
        else:
            stack.enter_context(joined_cluster(config, report, address))
            endpoint = _deploy(config, report, "")
        stack.enter_context(tls_front(endpoint.config))
        yield endpoint


def reload(config: DeploymentConfig) -> None:
    """Has the service that runs here serve the models of its changed configuration.

    Raises:
        DPIFrameError: it does not, and serves as before.
    """
    from deployments.lifecycle.actor import RayLink, serve_configured

    if config.models_root is None:
        raise ConfigError("models_root: got none, expected the folder below which models may change while the service runs")
    config = config.with_absolute_paths()
    asyncio.run(serve_configured(RayLink(config.application), config, again=True))


def _deploy(config: DeploymentConfig, report: Report, metrics_url: str) -> Endpoint:
    with interrupts_deferred():
        import ray
        from ray import serve
        from ray.serve.context import _get_global_client

        from deployments.serve.application import application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    config = config.placed(int(ray.cluster_resources().get("GPU", 0)))
    report("Starting HAProxy and the Serve controller")
    http = {"host": config.http.host, "port": config.http.port}
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    # Reflection would look for the protocol among the messages that the process has registered; ours are their own.
    functions = {"grpc_servicer_functions": [_GRPC_SERVICE], "enable_reflection": False}
    grpc = None if config.grpc is None else {"port": config.grpc.port, **functions}
    serve.start(http_options=http, grpc_options=grpc, proxy_location="HeadOnly", logging_config=quiet)
    # Which ones a service goes on with, is in a file on the nodes of its replicas.
    names = "models" if config.models_state else ", ".join(Path(m.path).name for m in config.models)
    report(f"Loading {names} on {config.device} and warming up")
    app = application(config, constructor_tries=1)
    serve.run_many(
        [serve.RunTarget(app, name=config.application, route_prefix=config.route_prefix)], wait_for_applications_running=False
    )
    asked = _get_global_client()  # `serve.status` makes every deployment's configuration of what it hears, 10 ms or more
    while (status := asked.get_serve_status(config.application)).app_status.status != "RUNNING":
        if status.app_status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise _cause("\n".join(d.message for d in status.deployment_statuses))
        time.sleep(_POLL_S)
    url = f"http://127.0.0.1:{config.http.port}{config.route_prefix.rstrip('/')}"
    _wait_ready(url, f"http://127.0.0.1:{os.environ['RAY_SERVE_HAPROXY_STATS_PORT']}/stats;csv" if metrics_url else None)
    return Endpoint(url, metrics_url, config)


def _wait_ready(url: str, front: str | None) -> None:
    """Serve calls an application running a moment before HAProxy has its new configuration; at `front` it says what it has."""
    import httpx

    give_up = time.monotonic() + _READY_S
    while True:
        late = time.monotonic() > give_up
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5)
            if answer.status_code == 200 and (late or front is None or _has_replica(httpx.get(front, timeout=5).text)):
                return
            seen = f"status {answer.status_code}"
        except httpx.HTTPError as error:
            seen = str(error)
        if late:
            raise LaunchError(f"{url}/readyz: got {seen}, expected status 200 within {_READY_S} s")
        time.sleep(_POLL_S)


def _has_replica(statistics: str) -> bool:
    """Whether HAProxy has more than its backup, a proxy of Serve, which answers for a service until then, and is slower."""
    servers = [row for row in csv.DictReader(statistics.splitlines()) if row["type"] == "2"]
    return any(row["act"] == "1" and row["status"].startswith("UP") for row in servers)


def _cause(message: str) -> LaunchError:
    """The error at the end of a Serve status message, which is a whole traceback: what follows its last indented line."""
    lines = message.strip().splitlines() or ["Serve gave no reason"]
    last = max((i for i, line in enumerate(lines) if line.startswith(" ")), default=-1)
    text = " ".join(lines[last + 1 :]) or lines[-1].strip()
    ours = re.fullmatch(r"dpiframe_core\.errors\.\w+: (.*)", text)
    return LaunchError(ours[1] if ours else text, logs_help=ours is None)
