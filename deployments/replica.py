"""One Serve replica: the engines of a deployment's models, a row batcher before each, and the FastAPI app in front of them.

Serve calls it started only when every model is loaded, verified and warm, since from then on HAProxy sends it requests.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve

from deployments.config import DeploymentConfig
from deployments.infer_grpc import GrpcMethods
from deployments.load_meter import LoadMeter
from deployments.loading import load_engine
from deployments.ray_metrics import RayMetrics
from deployments.serve_policy import reported
from dpiframe_core.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.batching import RowBatcher
    from dpiframe_core.engine import Engine

# Everything that imports torch is imported where it is used: the launcher needs this module, but not the seconds that takes.


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    engine: "Engine"
    batcher: "RowBatcher"


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


# The app depends on the schemas of the models, so Serve fetches it from `__serve_build_asgi_app__`, once the replica exists.
# Given a plain function, `serve.ingress` would call it as a builder, before any replica does.
@serve.ingress()
class Replica(GrpcMethods):
    """Serves every model of one configuration from one process, on one whole GPU or on the CPU."""

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        self._running: list[_Running] = []
        self._metrics = RayMetrics()
        self._meter = LoadMeter()
        for package in ("deployments", "dpiframe_core"):
            logging.getLogger(package).setLevel(config.log_level.upper())

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.batching import RowBatcher
        from deployments.ingress import build_app
        from deployments.served import Served

        limits = self._config.limits
        models: dict[str, Served] = {}
        for ref in self._config.models:
            # Off the event loop: a load may take minutes, and a blocked loop cannot be told to stop.
            engine = await asyncio.to_thread(load_engine, self._config, ref)
            name = ref.name or engine.manifest.name
            if name in models:
                raise ConfigError(f"models: got {name!r} twice, expected distinct names (give one of them another `name`)")
            batcher = RowBatcher(
                engine.run_batch,
                max_batch_rows=engine.max_batch_rows,
                lanes=engine.lanes,
                max_queued_rows=self._config.batching.max_queued_rows,
                on_batch=self._metrics.batch_of(name),
            )
            self._running.append(_Running(engine, batcher))
            models[name] = Served.of(engine, batcher, limits, name=name, version=ref.version, example=engine.bundle.example)
        app = build_app(models, limits, self._metrics)
        app.add_middleware(OneRequestId)
        self.inference = app.state.inference
        self.loopback_only = self._config.http.host == "127.0.0.1"
        return app

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced, for a process whose CUDA context failed never recovers."""
        for running in self._running:
            running.engine.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return reported(self._meter.read([running.batcher for running in self._running]))

    async def __del__(self) -> None:
        for running in self._running:
            await running.batcher.close(self._config.drain_s)
            await asyncio.to_thread(running.engine.close)
        self._metrics.close()
