"""One Serve replica: the engines of a deployment's models, a row batcher before each, and the FastAPI app in front of them.

Serve calls it started only when every model is loaded, verified and warm, since from then on HAProxy sends it requests.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from deployments.batching.lost_device import end_when_lost
from deployments.config import DeploymentConfig
from deployments.protocol.grpc_service import GrpcMethods
from deployments.remote_rows.row_shard import finders
from deployments.serve.loaded_models import LoadedModels
from deployments.serve.ray_metrics import RayMetrics
from deployments.serve.replica_app import direct_port, replica_app
from deployments.telemetry.log_form import log_to_stderr
from kernels.runtime.gc_pause import gc_settled

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.batching.batcher import RowBatcher
    from deployments.direct.shared_port import SharedPort
    from deployments.http_api.serve_bypass import ServeBypass
    from deployments.serve.observers import Observers

# Everything that imports torch is imported where it is used: the launcher needs this module, but not the seconds that takes.


# The app depends on the schemas of the models, so Serve fetches it from `__serve_build_asgi_app__`, once the replica exists.
# Given a plain function, `serve.ingress` would call it as a builder, before any replica does.
@serve.ingress()
class Replica(GrpcMethods):
    """Serves every model of one configuration from one process, on one whole GPU or on the CPU."""

    def __init__(self, config: DeploymentConfig, rows: Mapping[int, Sequence[Any]] | None = None) -> None:
        """rows: handles of `RowShard`, see `row_shards`."""
        self._config = config
        self._rows = rows
        self._batchers: list[RowBatcher] = []
        self._loaded = LoadedModels()
        self._metrics = RayMetrics()
        self._observers: Observers | None = None
        self._bypass: ServeBypass | None = None
        self._direct: SharedPort | None = None
        log_to_stderr(config.log_level, config.log_format)

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.batching.batcher import RowBatcher
        from deployments.batching.leasing_scorer import ahead_of
        from deployments.scoring.served_model import ServedModel
        from deployments.serve.observers import Observers

        config = self._config
        models: dict[str, ServedModel] = {}
        async for name, ref, engine in self._loaded.load(config, finders(self._rows)):
            version = ref.version or engine.manifest.version
            batcher = RowBatcher(
                engine.run_batch,
                max_batch_rows=engine.max_batch_rows,
                lanes=engine.lanes,
                max_queued_rows=config.batching.max_queued_rows,
                on_batch=self._metrics.batch_of(name, version),
            )
            self._batchers.append(batcher)
            self._loaded.meter(batcher.dispatcher)
            end_when_lost(batcher.dispatcher, engine.check_device, config.batching.max_run_s, batcher.fail)
            self._metrics.watch(name, version, batcher.dispatcher)
            self._metrics.reads_tables(name, version, partial(getattr, engine, "table_reads"))
            scorer = ahead_of(batcher, engine, ref.tables)
            models[name] = ServedModel.of(
                engine, scorer, config.limits, name=name, version=version, example=engine.bundle.example
            )
        self._observers = Observers.of(config)
        app, self._bypass = replica_app(self, config, models, self._metrics, self._observers.watchers)
        self._direct = await direct_port(config, app, ray.get_runtime_context().get_node_id())
        gc_settled()
        return app

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced, for a process whose CUDA context failed never recovers."""
        self._loaded.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return self._loaded.load_figures()

    async def __del__(self) -> None:
        drain_s = self._config.drain_s
        parts = [part.close(drain_s) for part in (self._bypass, self._direct) if part is not None]
        await asyncio.gather(*parts)
        for batcher in self._batchers:
            await batcher.close(self._config.drain_s)
        await self._loaded.close()
        if self._observers is not None:
            await asyncio.to_thread(self._observers.close)
        self._metrics.close()
