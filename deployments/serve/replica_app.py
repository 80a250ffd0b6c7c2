"""The app of a replica, as Serve mounts it: one request id an answer, scoring in front of Serve, gRPC from the same models.

Knows no Ray, but for the header that Serve adds.
"""

import asyncio
import logging
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from deployments.access.gate import Gate
from deployments.config import DeploymentConfig
from deployments.direct.direct_server import DirectServer
from deployments.direct.request_head import DIRECT
from deployments.direct.shared_port import SharedPort, open_port
from deployments.fanin.handshake import meeting_place
from deployments.host_sockets.accepting import Accepting
from deployments.host_sockets.listening import Place, Port, SocketFile
from deployments.http_api.request_body import Route
from deployments.http_api.serve_bypass import ServeBypass
from deployments.protocol.grpc_service import GrpcMethods
from deployments.telemetry.node_metrics import NodeMetrics
from dpiframe_core.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.lifecycle.control import Control
    from deployments.scoring.catalog import Catalog
    from deployments.scoring.watchers import Watchers
    from deployments.serve.ray_metrics import RayMetrics

log = logging.getLogger(__name__)


class OneRequestId:
    """Serve appends an X-Request-ID of its own to every answer, the one we were sent: with ours it would stand there twice."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if DIRECT in scope.get("extensions", ()):
            await self._app(scope, receive, send)
            return

        async def send_without(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [h for h in message["headers"] if h[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, send_without)


def replica_app(
    replica: GrpcMethods,
    config: DeploymentConfig,
    models: "Catalog",
    metrics: "RayMetrics",
    control: "Control",
    watchers: "Watchers | None" = None,
) -> "tuple[FastAPI, ServeBypass]":
    """The app for Serve, on whose event loop this is called, and what answers scoring requests in front of it, installed.

    The replica owns both; its gRPC methods answer from the same models.
    """
    from deployments.lifecycle.routes import lifecycle_routes
    from deployments.scoring.watchers import Watchers
    from deployments.serve.http_app import build_app

    gate = Gate.of(config.access)
    page = NodeMetrics(config.application, metrics.endpoints).page
    routes, watchers = lifecycle_routes(control, config, gate, models), watchers or Watchers()
    app = build_app(models, config.limits, metrics.request, gate, page, config.profiles, watchers, metrics.shadow, routes)
    app.add_middleware(OneRequestId)
    prefix, answers = config.route_prefix.rstrip("/"), partial(_serves_port, config, app)
    bypass = ServeBypass(app.state.score, app.state.infer, prefix, asyncio.get_running_loop(), answers=answers)
    bypass.install()
    replica.inference = app.state.inference
    replica.gate = gate
    replica.loopback_only = config.http.host == "127.0.0.1"
    return app, bypass


def _serves_port(
    config: DeploymentConfig, app: "FastAPI", front: Route, root: str, listening: socket.socket
) -> Accepting | None:
    """Answers at the port of Serve's server; None if the listener in C cannot be had."""
    try:
        return Accepting(_server(config, app, front, 2 if _places(config) else 1, root), listening)
    except (ConfigError, OSError) as error:
        log.warning("HTTP is read by uvicorn: %s", error)
        return None


def _server(config: DeploymentConfig, app: "FastAPI", behind: Route, listeners: int, root: str | None = None) -> DirectServer:
    routes = app.state
    return DirectServer(behind, routes.score, routes.infer, config.limits, config.route_prefix.rstrip("/"), listeners, root)


def _places(config: DeploymentConfig) -> list[Place]:
    """Of the direct port."""
    http = config.http
    places: list[Place] = [] if http.direct_port is None else [Port(http.host, http.direct_port)]
    return [*places, SocketFile(http.direct_socket, http.direct_socket_group)] if http.direct_socket is not None else places


async def direct_port(config: DeploymentConfig, app: "FastAPI", node: str) -> SharedPort | None:
    """The direct port of this process, open, at its port, its socket file, or both; None if the configuration has neither.

    Raises:
        ConfigError: it cannot be had.
    """
    places = _places(config)
    if not places:
        return None
    server = _server(config, app, app, 2)  # with that in front of Serve
    return await open_port(server, meeting_place(config.application, node), places)
