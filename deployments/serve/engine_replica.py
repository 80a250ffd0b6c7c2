"""The engine process of the fan-in as a Serve replica: the engines of a deployment's models, and the door to their batchers.

It answers no HTTP: the ingress replicas of its node find its abstract socket and share memory with it.
"""

import asyncio
from typing import TYPE_CHECKING

import ray

from deployments.config import DeploymentConfig
from deployments.fanin.handshake import meeting_place
from deployments.serve.load_meter import LoadMeter
from deployments.serve.loaded_models import load_engine
from deployments.serve.ray_metrics import RayMetrics
from deployments.serve.replica_app import require_new, set_log_level
from deployments.serve.serve_policy import reported

if TYPE_CHECKING:
    from deployments.fanin.acceptor import Doorkeeper
    from dpiframe_core.engine.engine import Engine


class EngineReplica:
    """Serves every model of one configuration to the ingresses of its node, on one whole GPU or on the CPU."""

    _door: "Doorkeeper | None" = None

    async def __init__(self, config: DeploymentConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        from deployments.fanin.acceptor import Doorkeeper
        from deployments.fanin.batcher import FanInEngine

        self._config = config
        self._engines: list[Engine] = []
        self._served: dict[str, FanInEngine] = {}
        self._metrics = RayMetrics()
        self._meter = LoadMeter()
        set_log_level(config)
        for ref in config.models:
            # Off the event loop: a load may take minutes, and a blocked loop cannot be told to stop.
            engine = await asyncio.to_thread(load_engine, config, ref)
            self._engines.append(engine)
            name = ref.name or engine.manifest.name
            require_new(name, self._served)
            self._served[name] = served = FanInEngine(
                engine.run_batch,
                engine.schema.block_layout,
                len(engine.manifest.tasks),
                engine.bundle.fingerprint,
                max_batch_rows=engine.max_batch_rows,
                lanes=engine.lanes,
                max_queued_rows=config.batching.max_queued_rows,
                device=engine.device,
                precision=engine.precision,
                buckets=engine.buckets,
                on_batch=self._metrics.batch_of(name),
            )
            self._metrics.watch(name, served)
        self._door = Doorkeeper(meeting_place(config.application, ray.get_runtime_context().get_node_id()), self._served)

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced: neither a CUDA context that failed nor a lost door recovers."""
        for engine in self._engines:
            engine.check()
        if self._door is not None:
            self._door.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return reported(self._meter.read(list(self._served.values())))

    async def __del__(self) -> None:
        if self._door is not None:
            # Longer than an ingress takes to stop: when both are told to at once, its last requests still find this engine.
            await asyncio.to_thread(self._door.close, 2 * self._config.drain_s)
        for engine in self._engines:
            await asyncio.to_thread(engine.close)
        self._metrics.close()
