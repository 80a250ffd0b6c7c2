"""The engine process of the fan-in as a Serve replica: the engines of a deployment's models, and who lets ingresses in to them.

It answers no HTTP: the ingress replicas of its node find its abstract socket and share memory with it. Those of other nodes
call it through Serve, while they have no engine of their own.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from deployments.batching.lost_device import end_when_lost
from deployments.config import DeploymentConfig
from deployments.fanin.far import FarAnswer, FarAsk, answer
from deployments.fanin.handshake import Welcome, meeting_place
from deployments.fanin.scorer import FanInScorer
from deployments.lifecycle.actor import follower_of
from deployments.lifecycle.desired import Desired
from deployments.lifecycle.release import Key, Release
from deployments.processes import end_without_raylet
from deployments.remote_rows.row_shard import finders
from deployments.serve.loaded_models import LoadedModels
from deployments.serve.ray_metrics import RayMetrics
from deployments.telemetry.log_form import log_to_stderr
from kernels.runtime.gc_pause import gc_settled

if TYPE_CHECKING:
    from deployments.fanin.acceptor import Acceptor
    from deployments.fanin.batcher import FanInBatcher


class EngineReplica:
    """Serves every model of one application to the ingresses of its node, on one whole GPU or on the CPU. A `Host`."""

    _acceptor: "Acceptor | None" = None

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: DeploymentConfig, rows: Mapping[int, Sequence[Any]] | None = None
    ) -> None:
        """rows: handles of `RowShard`, see `row_shards`."""
        from deployments.fanin.acceptor import Acceptor

        self._config = config
        self._loaded = LoadedModels(config)
        self._metrics = RayMetrics()
        self._metrics.holds(self._loaded.pool_bytes)
        self._batchers: dict[str, FanInBatcher] = {}
        log_to_stderr(config.log_level, config.log_format)
        end_without_raylet()
        self._scorers: dict[str, FanInScorer] = {}
        await self._loaded.find_rows(finders(rows))
        self._follower, _ = await follower_of(self, config, scores=True, answers=False)
        await self._follower.start()
        self._place = meeting_place(config.application, ray.get_runtime_context().get_node_id())
        self._acceptor = Acceptor(self._place, self._batchers)
        gc_settled()

    async def load(self, release: Release) -> None:
        """As `Host.load`."""
        from deployments.fanin.batcher import FanInBatcher

        engine = await self._loaded.load(release)
        batcher = FanInBatcher.of(
            engine, self._config.batching.most_queued(engine.device), self._metrics.batch_of(*release.key)
        )
        self._loaded.meter(release.key, batcher.dispatcher)
        end_when_lost(batcher.dispatcher, engine.check_device, self._config.batching.max_run_s, batcher.fail)
        self._metrics.watch(*release.key, batcher.dispatcher)
        self._metrics.reads_tables(*release.key, engine)
        self._batchers[release.label] = batcher  # whoever asks for it is let in from now on

    def route(self, desired: Desired) -> None:
        """As `Host.route`: an engine scores for whoever is let in."""

    async def unload(self, key: Key) -> None:
        """As `Host.unload`. The ingresses have left it before."""
        label = "/".join(key)
        if (scorer := self._scorers.pop(label, None)) is not None:
            await scorer.close()
        batcher = self._batchers[label]
        if self._acceptor is None:
            del self._batchers[label]
        else:
            await asyncio.to_thread(self._acceptor.remove, label)
        await asyncio.to_thread(batcher.close, self._config.drain_s)
        await self._loaded.unload(key)
        self._metrics.forget(*key)

    # What ingresses of other nodes call. A model is named as both ends of the fan-in know it, with its version.

    async def greet(self, model: str, fingerprint: str) -> Welcome:
        batcher = self._batchers.get(model)
        if batcher is None or batcher.fingerprint != fingerprint:
            return Welcome(refused=f"got {model!r} of bundle {fingerprint[:16]}, expected what this application serves")
        return batcher.welcome

    async def answer(self, ask: FarAsk) -> FarAnswer:
        """Goes the way of this node's own ingresses from here on: through the shared memory, to whichever engine has room."""
        batcher = self._batchers.get(ask.model)
        if batcher is None or batcher.fingerprint != ask.fingerprint:
            return FarAnswer("unavailable", f"engine: got a request for {ask.model!r} of another bundle, expected its own")
        scorer = self._scorers.get(ask.model)
        if scorer is None:
            config = self._config
            self._scorers[ask.model] = scorer = FanInScorer(
                self._place,
                ask.model,
                ask.fingerprint,
                batcher.layout,
                batcher.tasks,
                most_rows=config.batching.most_queued(config.device) + config.limits.max_rows_per_request,
            )
        await scorer.found(1)
        return await answer(ask, scorer, batcher.layout, time.monotonic)

    def check_health(self) -> None:
        """Asked by Serve; raising has this replica replaced: a failed CUDA context does not recover, nor a lost acceptor."""
        self._loaded.check()
        self._follower.check()
        if self._acceptor is not None:
            self._acceptor.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve, on the event loop, five times a look-back period; only where autoscaling is on."""
        return self._loaded.load_figures()

    async def __del__(self) -> None:
        await self._follower.stop()
        for scorer in self._scorers.values():  # Serve has waited for the calls of other nodes
            await scorer.close()
        if self._acceptor is not None:
            # Longer than an ingress takes to stop: when both are told to at once, its last requests still find this engine.
            await asyncio.to_thread(self._acceptor.close, 2 * self._config.drain_s)
        await self._loaded.close()
        self._metrics.close()
