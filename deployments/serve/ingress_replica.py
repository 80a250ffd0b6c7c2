"""An ingress of the fan-in as a Serve replica: HTTP, validation and encoding; the scores come from engine processes beside it.

Neither the weights nor torch are loaded here.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from deployments.access.models_root import check_models_root
from deployments.config import DeploymentConfig, ModelRef
from deployments.fanin.far_engines import HandleEngines
from deployments.fanin.handshake import meeting_place
from deployments.protocol.grpc_service import GrpcMethods
from deployments.serve.loaded_models import require_new
from deployments.serve.ray_metrics import RayMetrics
from deployments.serve.replica_app import direct_port, replica_app
from deployments.telemetry.log_form import log_to_stderr
from kernels.runtime.gc_pause import gc_settled

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deployments.direct.shared_port import SharedPort
    from deployments.fanin.scorer import FanInScorer
    from deployments.http_api.serve_bypass import ServeBypass
    from deployments.scoring.served_model import ServedModel
    from deployments.serve.observers import Observers


@serve.ingress()
class IngressReplica(GrpcMethods):
    """Answers HTTP for every model of one configuration.

    `engine` is a handle: it puts both deployments into one application, and reaches engines of other nodes.
    """

    def __init__(self, config: DeploymentConfig, engine: Any) -> None:
        self._config = config
        self._engine = engine
        self._scorers: list[FanInScorer] = []
        self._metrics = RayMetrics()  # of requests, and of what is served: the engine reports batches and what waits
        self._observers: Observers | None = None
        self._bypass: ServeBypass | None = None
        self._direct: SharedPort | None = None
        log_to_stderr(config.log_level, config.log_format)

    async def __serve_build_asgi_app__(self) -> "FastAPI":
        from deployments.serve.observers import Observers

        check_models_root(self._config)
        models: dict[str, ServedModel] = {}
        node = ray.get_runtime_context().get_node_id()
        engines = expected_engines(self._config, ray.nodes(), node)
        for ref in self._config.models:
            name, served = await self._served(ref, node, engines)
            require_new(name, models)
            models[name] = served
        self._observers = Observers.of(self._config)
        app, self._bypass = replica_app(self, self._config, models, self._metrics, self._observers.watchers)
        self._direct = await direct_port(self._config, app, node)
        gc_settled()
        return app

    async def _served(self, ref: ModelRef, node: str, engines: int) -> "tuple[str, ServedModel]":
        """A model, once as many engines of this node serve it as will, or one of another node does."""
        from deployments.fanin.remote_engine import RemoteEngine
        from deployments.fanin.scorer import FanInScorer
        from deployments.scoring.served_model import ServedModel
        from dpiframe_core.bundle.encoding_files import read_encoding
        from dpiframe_core.features.encoder import Encoder

        config = self._config
        read = await asyncio.to_thread(read_encoding, ref.path)
        manifest = read.manifest
        name = ref.name or manifest.name
        schema = manifest.feature_schema
        scorer = FanInScorer(
            meeting_place(config.application, node),
            name,
            read.fingerprint,
            schema.block_layout,
            len(manifest.tasks),
            most_rows=config.batching.max_queued_rows + config.limits.max_rows_per_request,
            far=HandleEngines(self._engine, name, read.fingerprint) if config.nodes > 1 else None,
        )
        self._scorers.append(scorer)
        encoder = await asyncio.to_thread(Encoder, schema, read.vocabularies)
        await scorer.found(engines)
        remote = RemoteEngine(manifest, encoder, scorer)
        return name, ServedModel.of(remote, scorer, config.limits, name=name, version=ref.version, example=read.example)

    async def __del__(self) -> None:
        drain_s = self._config.drain_s
        parts = [part.close(drain_s) for part in (self._bypass, self._direct) if part is not None]
        await asyncio.gather(*parts)
        for scorer in self._scorers:
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
