"""One Serve replica: the engines of a deployment's models, a row batcher before each, and the FastAPI app in front of them.

Serve calls it started only when every model is loaded, verified and warm, since from then on HAProxy sends it requests.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray import serve

from deployments.config import DeploymentConfig
from deployments.http_api.serve_bypass import answered
from deployments.protocol.grpc_service import GrpcMethods
from deployments.serve.load_meter import LoadMeter
from deployments.serve.loaded_models import load_engine
from deployments.serve.ray_metrics import RayMetrics
from deployments.serve.replica_app import app_of, require_new, set_log_level
from deployments.serve.serve_policy import reported

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.batching.batcher import RowBatcher
    from dpiframe_core.engine.engine import Engine

# Everything that imports torch is imported where it is used: the launcher needs this module, but not the seconds that takes.


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    engine: "Engine"
    batcher: "RowBatcher"


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
        set_log_level(config)

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.batching.batcher import RowBatcher
        from deployments.scoring.served_model import Served

        models: dict[str, Served] = {}
        for ref in self._config.models:
            # Off the event loop: a load may take minutes, and a blocked loop cannot be told to stop.
            engine = await asyncio.to_thread(load_engine, self._config, ref)
            name = ref.name or engine.manifest.name
            require_new(name, models)
            batcher = RowBatcher(
                engine.run_batch,
                max_batch_rows=engine.max_batch_rows,
                lanes=engine.lanes,
                max_queued_rows=self._config.batching.max_queued_rows,
                on_batch=self._metrics.batch_of(name),
            )
            self._running.append(_Running(engine, batcher))
            models[name] = Served.of(
                engine, batcher, self._config.limits, name=name, version=ref.version, example=engine.bundle.example
            )
        return app_of(self, self._config, models, self._metrics)

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced, for a process whose CUDA context failed never recovers."""
        for running in self._running:
            running.engine.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return reported(self._meter.read([running.batcher for running in self._running]))

    async def __del__(self) -> None:
        await answered(self._config.drain_s)
        for running in self._running:
            await running.batcher.close(self._config.drain_s)
            await asyncio.to_thread(running.engine.close)
        self._metrics.close()
