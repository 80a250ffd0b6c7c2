"""The engine process of the fan-in as a Serve replica: the engines of a deployment's models, and who lets ingresses in to them.

It answers no HTTP: the ingress replicas of its node find its abstract socket and share memory with it.
"""

import asyncio
from typing import TYPE_CHECKING

import ray

from deployments.config import DeploymentConfig
from deployments.fanin.handshake import meeting_place
from deployments.serve.loaded_models import LoadedModels
from deployments.serve.ray_metrics import RayMetrics
from deployments.telemetry.log_form import log_to_stderr
from kernels.runtime.gc_pause import gc_settled

if TYPE_CHECKING:
    from deployments.fanin.acceptor import Acceptor


class EngineReplica:
    """Serves every model of one configuration to the ingresses of its node, on one whole GPU or on the CPU."""

    _acceptor: "Acceptor | None" = None

    async def __init__(self, config: DeploymentConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        from deployments.fanin.acceptor import Acceptor
        from deployments.fanin.batcher import FanInBatcher

        self._config = config
        self._loaded = LoadedModels()
        self._metrics = RayMetrics()
        log_to_stderr(config.log_level, config.log_format)
        batchers: dict[str, FanInBatcher] = {}
        async for name, ref, engine in self._loaded.load(config):
            version = ref.version or engine.manifest.version
            batchers[name] = batcher = FanInBatcher(
                engine.run_batch,
                engine.schema.block_layout,
                len(engine.manifest.tasks),
                engine.bundle.fingerprint,
                max_batch_rows=engine.max_batch_rows,
                lanes=engine.lanes,
                max_queued_rows=config.batching.max_queued_rows,
                read_ahead=engine.read_ahead if engine.reads_ahead else None,
                device=engine.device,
                precision=engine.precision,
                buckets=engine.buckets,
                on_batch=self._metrics.batch_of(name, version),
            )
            self._loaded.meter(batcher.dispatcher)
            self._metrics.watch(name, version, batcher.dispatcher)
        place = meeting_place(config.application, ray.get_runtime_context().get_node_id())
        self._acceptor = Acceptor(place, batchers)
        gc_settled()

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced: a failed CUDA context does not recover, nor a lost acceptor."""
        self._loaded.check()
        if self._acceptor is not None:
            self._acceptor.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return self._loaded.load_figures()

    async def __del__(self) -> None:
        if self._acceptor is not None:
            # Longer than an ingress takes to stop: when both are told to at once, its last requests still find this engine.
            await asyncio.to_thread(self._acceptor.close, 2 * self._config.drain_s)
        await self._loaded.close()
        self._metrics.close()
