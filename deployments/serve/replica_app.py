"""What replicas of both topologies have in common: log levels, distinct names of models, and the app over what they serve.

Knows no Ray, but for the header that Serve adds.
"""

import logging
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from deployments.config import DeploymentConfig
from deployments.http_api.serve_bypass import serve_directly
from deployments.metrics import Metrics
from deployments.protocol.grpc_service import GrpcMethods
from dpiframe_core.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.scoring.served_model import Served


class OneRequestId:
    """Serve appends an X-Request-ID of its own to every answer, the one we were sent: with ours it would stand there twice."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_without(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [h for h in message["headers"] if h[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, send_without)


def set_log_level(config: DeploymentConfig) -> None:
    """Of our own code, in this process."""
    for package in ("deployments", "dpiframe_core"):
        logging.getLogger(package).setLevel(config.log_level.upper())


def require_new(name: str, models: Container[str]) -> None:
    """Raises ConfigError if a model of this name is there already."""
    if name in models:
        raise ConfigError(f"models: got {name!r} twice, expected distinct names (give one of them another `name`)")


def app_of(replica: GrpcMethods, config: DeploymentConfig, models: "Mapping[str, Served]", metrics: Metrics) -> "FastAPI":
    """The app for Serve, on whose event loop this is called; the replica's gRPC methods answer from the same models."""
    from deployments.serve.http_app import build_app

    app = build_app(models, config.limits, metrics)
    app.add_middleware(OneRequestId)
    serve_directly(app.state.score, app.state.infer, config.route_prefix)
    replica.inference = app.state.inference
    replica.loopback_only = config.http.host == "127.0.0.1"
    return app
