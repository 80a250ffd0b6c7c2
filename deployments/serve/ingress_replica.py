"""An ingress of the fan-in as a Serve replica: HTTP, validation and encoding; the scores come from engine processes beside it.

Neither the weights nor torch are loaded here.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from deployments.access.models_root import check_below
from deployments.config import DeploymentConfig
from deployments.fanin.far import HandleEngines
from deployments.fanin.handshake import meeting_place
from deployments.lifecycle.actor import follower_of, reconfigure
from deployments.lifecycle.control import Control
from deployments.lifecycle.desired import Desired
from deployments.lifecycle.follower import Follower
from deployments.lifecycle.release import Key, Release
from deployments.lifecycle.serving import route
from deployments.processes import end_without_raylet
from deployments.protocol.grpc_service import GrpcMethods
from deployments.scoring.catalog import Catalog
from deployments.serve.ray_metrics import RayMetrics
from deployments.serve.replica_app import direct_port, replica_app
from deployments.telemetry.log_form import log_to_stderr
from kernels.runtime.gc_pause import gc_settled

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.direct.shared_port import SharedPort
    from deployments.fanin.scorer import FanInScorer
    from deployments.http_api.serve_bypass import ServeBypass
    from deployments.serve.observers import Observers

_FOUND_S = 10.0  # for a version that comes while others serve: then one engine of it will do


@serve.ingress()
class IngressReplica(GrpcMethods):
    """Answers HTTP for every model of one application. A `Host` of its follower.

    `engine` is a handle: it puts both deployments into one application, and reaches engines of other nodes.
    """

    def __init__(self, config: DeploymentConfig, engine: Any) -> None:
        self._config = config
        self._engine = engine
        self._catalog = Catalog()
        self._scorers: dict[Key, FanInScorer] = {}
        self._metrics = RayMetrics()  # of requests, and of what is served: the engine reports batches and what waits
        self._observers: Observers | None = None
        self._bypass: ServeBypass | None = None
        self._direct: SharedPort | None = None
        self._follower: Follower | None = None
        self._control: Control | None = None
        self._engines = 1
        self._node = ray.get_runtime_context().get_node_id()
        log_to_stderr(config.log_level, config.log_format)
        end_without_raylet()

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.serve.observers import Observers

        config = self._config
        self._follower, self._control = await follower_of(self, config, scores=False, answers=True)
        self._engines = expected_engines(config, ray.nodes(), self._node)
        await self._follower.start()
        self._observers = Observers.of(config, self._metrics.unlogged)
        watchers = self._observers.watchers
        app, self._bypass = replica_app(self, config, self._catalog, self._metrics, self._control, watchers)
        self._direct = await direct_port(config, app, self._node)
        gc_settled()
        return app

    async def reconfigure(self, said: dict[str, Any]) -> None:
        """Asked by Serve when `user_config` has changed, at no other replica's cost."""
        await reconfigure(self._control, self._config, said)

    async def load(self, release: Release) -> None:
        """As `Host.load`, once engines have it: at the start as many of this node as will come, later one, or one elsewhere."""
        from deployments.fanin.remote_engine import RemoteEngine
        from deployments.fanin.scorer import FanInScorer
        from deployments.scoring.served_model import ServedModel
        from dpiframe_core.bundle.encoding_files import read_encoding
        from dpiframe_core.features.encoder import Encoder

        config, (name, version) = self._config, release.key
        check_below(config.models_root, release.path, release.tables, f"{release.label}.")
        read = await asyncio.to_thread(read_encoding, release.path)
        release.check_fingerprint(read.fingerprint)
        manifest = read.manifest
        schema = manifest.feature_schema
        encoder = await asyncio.to_thread(Encoder, schema, read.vocabularies)
        scorer = FanInScorer(
            meeting_place(config.application, self._node),
            release.label,
            read.fingerprint,
            schema.block_layout,
            len(manifest.tasks),
            most_rows=config.batching.most_queued(config.device) + config.limits.max_rows_per_request,
            far=HandleEngines(self._engine, release.label, read.fingerprint) if config.nodes > 1 else None,
        )
        try:
            await self._find_engines(scorer)
        except BaseException:
            await scorer.close()
            raise
        self._scorers[release.key] = scorer
        remote = RemoteEngine(manifest, encoder, scorer)
        served = ServedModel.of(remote, scorer, config.limits, name=name, version=version, example=read.example)
        self._metrics.serves(served.info, partial(getattr, scorer, "accepting"))
        self._catalog.add(served)

    async def _find_engines(self, scorer: "FanInScorer") -> None:
        known = max((len(other.connections) for other in self._scorers.values()), default=0)
        if self._bypass is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(scorer.found(known), _FOUND_S)
        await scorer.found(1 if self._bypass is not None else self._engines)

    def route(self, desired: Desired) -> None:
        """As `Host.route`."""
        route(self._catalog, desired)

    async def unload(self, key: Key) -> None:
        """As `Host.unload`."""
        await self._catalog.remove(*key).in_use.over()
        await self._scorers.pop(key).close()
        self._metrics.forget(*key)

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced."""
        if self._follower is not None:
            self._follower.check()

    async def __del__(self) -> None:
        if self._follower is not None:
            await self._follower.stop()
        drain_s = self._config.drain_s
        await asyncio.gather(*(part.close(drain_s) for part in (self._bypass, self._direct) if part is not None))
        for scorer in self._scorers.values():
            await scorer.close()
        if self._observers is not None:
            await asyncio.to_thread(self._observers.close)
        self._metrics.close()


def expected_engines(config: DeploymentConfig, nodes: Sequence[Mapping[str, Any]], node: str) -> int:
    """How many engines this node will have at first, as far as that is certain: on several nodes, one."""
    alive = [n for n in nodes if n["Alive"]]
    if len(alive) > 1:
        return 1
    if config.device == "cpu":
        return config.first_replicas
    gpus = next((int(n["Resources"].get("GPU", 0)) for n in alive if n["NodeID"] == node), 0)
    return max(1, min(config.first_replicas, gpus))
