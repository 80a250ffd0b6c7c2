"""One Serve replica: the engines of a deployment's models, a batcher before each, and the FastAPI app in front of them.

Serve calls it started only when every model is loaded, verified and warm, since from then on HAProxy sends it requests.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from deployments.batching.lost_device import end_when_lost
from deployments.config import DeploymentConfig
from deployments.lifecycle.actor import follower_of, reconfigure
from deployments.lifecycle.control import Control
from deployments.lifecycle.desired import Desired
from deployments.lifecycle.follower import Follower
from deployments.lifecycle.release import Key, Release
from deployments.lifecycle.serving import route
from deployments.metrics import BatchSeen
from deployments.processes import end_without_raylet
from deployments.protocol.grpc_service import GrpcMethods
from deployments.remote_rows.row_shard import finders
from deployments.scoring.catalog import Catalog
from deployments.serve.loaded_models import LoadedModels
from deployments.serve.ray_metrics import RayMetrics
from deployments.serve.replica_app import direct_port, replica_app
from deployments.telemetry.log_form import log_to_stderr
from kernels.runtime.gc_pause import gc_settled

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.batching.batcher import RowBatcher
    from deployments.batching.scorer import Scorer
    from deployments.direct.shared_port import SharedPort
    from deployments.fanin.own_engine import OwnEngine
    from deployments.http_api.serve_bypass import ServeBypass
    from deployments.serve.observers import Observers
    from dpiframe_core.engine.engine import Engine

# Everything that imports torch is imported where it is used: the launcher needs this module, but not the seconds that takes.


# The app depends on the schemas of the models, so Serve fetches it from `__serve_build_asgi_app__`, once the replica exists.
# Given a plain function, `serve.ingress` would call it as a builder, before any replica does.
@serve.ingress()
class Replica(GrpcMethods):
    """Serves every model of one application from one process, on one whole GPU or on the CPU. A `Host` of its follower."""

    def __init__(self, config: DeploymentConfig, rows: Mapping[int, Sequence[Any]] | None = None) -> None:
        """rows: handles of `RowShard`, see `row_shards`."""
        self._config = config
        self._rows = rows
        self._catalog = Catalog()
        self._batchers: dict[Key, RowBatcher | OwnEngine] = {}
        self._loaded = LoadedModels(config)
        self._metrics = RayMetrics()
        self._metrics.holds(self._loaded.pool_bytes)
        self._observers: Observers | None = None
        self._bypass: ServeBypass | None = None
        self._direct: SharedPort | None = None
        self._follower: Follower | None = None
        self._control: Control | None = None
        log_to_stderr(config.log_level, config.log_format)
        end_without_raylet()

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.serve.observers import Observers

        config = self._config
        await self._loaded.find_rows(finders(self._rows))
        self._follower, self._control = await follower_of(self, config, scores=True, answers=True)
        await self._follower.start()
        self._observers = Observers.of(config, self._metrics.unlogged)
        watchers = self._observers.watchers
        app, self._bypass = replica_app(self, config, self._catalog, self._metrics, self._control, watchers)
        self._direct = await direct_port(config, app, ray.get_runtime_context().get_node_id())
        gc_settled()
        return app

    async def reconfigure(self, said: dict[str, Any]) -> None:
        """Asked by Serve when `user_config` has changed, at no other replica's cost."""
        await reconfigure(self._control, self._config, said)

    async def load(self, release: Release) -> None:
        """As `Host.load`."""
        from deployments.scoring.served_model import ServedModel

        config, (name, version) = self._config, release.key
        engine = await self._loaded.load(release)
        try:
            batcher, scorer = await batched(config, release, engine, self._metrics.batch_of(name, version))
        except BaseException:
            await self._loaded.unload(release.key)
            raise
        self._batchers[release.key] = batcher
        self._loaded.meter(release.key, batcher.dispatcher)
        end_when_lost(batcher.dispatcher, engine.check_device, config.batching.max_run_s, batcher.fail)
        self._metrics.watch(name, version, batcher.dispatcher)
        self._metrics.reads_tables(name, version, engine)
        example = engine.bundle.example
        served = ServedModel.of(engine, scorer, config.limits, name=name, version=version, example=example)
        self._metrics.serves(served.info, partial(getattr, scorer, "accepting"))
        self._catalog.add(served)

    def route(self, desired: Desired) -> None:
        """As `Host.route`."""
        route(self._catalog, desired)

    async def unload(self, key: Key) -> None:
        """As `Host.unload`."""
        await self._catalog.remove(*key).in_use.over()
        await self._batchers.pop(key).close(self._config.drain_s)
        await self._loaded.unload(key)
        self._metrics.forget(*key)

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced, for a process whose CUDA context failed never recovers."""
        self._loaded.check()
        if self._follower is not None:
            self._follower.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return self._loaded.load_figures()

    async def __del__(self) -> None:
        if self._follower is not None:
            await self._follower.stop()
        drain_s = self._config.drain_s
        await asyncio.gather(*(part.close(drain_s) for part in (self._bypass, self._direct) if part is not None))
        for batcher in self._batchers.values():
            await batcher.close(drain_s)
        await self._loaded.close()
        if self._observers is not None:
            await asyncio.to_thread(self._observers.close)
        self._metrics.close()


async def batched(
    config: DeploymentConfig, release: Release, engine: "Engine", on_batch: Callable[[BatchSeen], None]
) -> "tuple[RowBatcher | OwnEngine, Scorer]":
    """What batches an engine's rows, and what scores through it."""
    from deployments.batching.batcher import RowBatcher
    from deployments.batching.leasing_scorer import ahead_of
    from deployments.fanin.batcher import FanInBatcher
    from deployments.fanin.own_engine import OwnEngine
    from deployments.fanin.shared_memory import ordered_stores

    most = config.batching.most_queued(engine.device)
    if ordered_stores() and not engine.reads_ahead:  # else requests wait for rows, each as long as it may
        own = await OwnEngine.met(
            FanInBatcher.of(engine, most, on_batch), release.label, most + config.limits.max_rows_per_request
        )
        return own, own.scorer
    batcher = RowBatcher(
        engine.run_batch, max_batch_rows=engine.max_batch_rows, lanes=engine.lanes, max_queued_rows=most, on_batch=on_batch
    )
    return batcher, ahead_of(batcher, engine, release.tables)
