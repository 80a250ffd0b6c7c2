"""The engines of a replica that has a device: loaded and warm one after the other, and what Serve asks of all of them together.

Knows no Ray; torch is imported only when something is loaded.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from deployments.access.models_root import check_below
from deployments.config import DeploymentConfig
from deployments.config_models import ModelRef
from deployments.config_tables import TablesHome
from deployments.lifecycle.release import Key, Release
from deployments.metrics import Gauged
from deployments.serve.autoscaling import ReplicaLoad
from deployments.serve.serve_policy import reported
from dpiframe_core.errors import Unavailable

if TYPE_CHECKING:
    from deployments.remote_rows.remote_rows import Find
    from dpiframe_core.bundle.bundle import Bundle
    from dpiframe_core.engine.engine import Engine
    from dpiframe_core.engine.options import WarmupReport

_SHARDS_S = 120.0  # for processes that read the same bundle meanwhile


class LoadMeter:
    """A replica's load, as shares of the time since the last reading. Call `read` on the event loop, whose CPU time is counted.

    Models of one replica share its device, so their shares are added up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._at = clock()
        self._cpu_s = cpu_clock()
        self._device_s = 0.0

    def read(self, models: Sequence[Gauged]) -> ReplicaLoad:
        now, cpu_s = self._clock(), self._cpu_clock()
        device_s = sum(model.busy_s for model in models)
        passed = max(now - self._at, 1e-6)
        load = ReplicaLoad(
            queued_rows=sum(model.queued_rows for model in models),
            device_share=min(max(0.0, device_s - self._device_s) / passed, 1.0),
            loop_share=min(max(0.0, cpu_s - self._cpu_s) / passed, 1.0),
        )
        self._at, self._cpu_s, self._device_s = now, cpu_s, device_s
        return load


class LoadedModels:
    """Owns the engines of one process. Make it on the event loop: the meter counts that thread's time."""

    def __init__(self, config: DeploymentConfig) -> None:
        self._config = config
        self._engines: dict[Key, Engine] = {}
        self._gauged: dict[Key, Gauged] = {}
        self._meter = LoadMeter()
        self._finds: list[tuple[Release, Sequence[Find]]] = []
        self._working_bytes = 0  # of buffers and graphs, the most that an engine here has taken

    async def find_rows(self, shards: "Mapping[int, Sequence[Find]]") -> None:
        """How the configuration's models, by their number, find the shards that answer for rows of their files.

        Other releases, and other bundles that come to lie in the same place, read their own files.
        """
        for i, finds in shards.items():
            self._finds.append((await asyncio.to_thread(Release.of, self._config.models[i]), finds))

    async def load(self, release: Release) -> "Engine":
        """A release's engine, warm.

        Raises:
            BundleError, InputError, Unavailable: as `read_bundle`, `require_room` and `warm_engine`; or the directory holds
                another bundle by now. ConfigError: it leaves `models_root`.
        """
        check_below(self._config.models_root, release.path, release.tables, f"{release.label}.")
        # Off the event loop: a load may take minutes, and a blocked loop cannot be told to stop.
        engine, report = await asyncio.to_thread(self._warm, release)
        self._working_bytes = max(self._working_bytes, report.buffer_bytes + report.captured_bytes)
        self._engines[release.key] = engine
        return engine

    def _warm(self, release: Release) -> "tuple[Engine, WarmupReport]":
        from dpiframe_core.bundle.bundle import read_bundle

        bundle, tables = read_bundle(release.path), release.tables
        release.check_fingerprint(bundle.fingerprint)
        hot = None if tables is None or tables.hbm_gib is None else int(tables.hbm_gib * 2**30)
        require_room(bundle, self._config.device, self._working_bytes, hot)
        finds = next((finds for of, finds in self._finds if of == release), ())
        return warm_engine(self._config, bundle, tables, finds)

    async def unload(self, key: Key) -> None:
        """Releases an engine, in which nothing may run any more."""
        self._gauged.pop(key, None)
        await asyncio.to_thread(self._engines.pop(key).close)

    def meter(self, key: Key, gauged: Gauged) -> None:
        """Has what a release's rows wait in count for `load_figures`."""
        self._gauged[key] = gauged

    def check(self) -> None:
        """Raises if an engine has failed."""
        for engine in self._engines.values():
            engine.check()

    def pool_bytes(self) -> int | None:
        """What torch's pool holds of the device; None before there is one, and of a CPU."""
        if not self._engines or not self._config.device.startswith("cuda"):
            return None
        import torch

        return torch.cuda.memory_reserved(self._config.device)

    def load_figures(self) -> dict[str, float]:
        """This replica's load since the last call, over all models, in the form of `record_autoscaling_stats`."""
        return reported(self._meter.read(list(self._gauged.values())))

    async def close(self) -> None:
        """Releases the engines, in which nothing may run any more."""
        for key in list(self._engines):
            await self.unload(key)


def load_engine(config: DeploymentConfig, ref: ModelRef, rows: "Sequence[Find]" = ()) -> "Engine":
    """An engine for a model of the configuration. `rows`: as `warm_engine`."""
    from dpiframe_core.bundle.bundle import read_bundle

    return warm_engine(config, read_bundle(ref.path), ref.tables, rows)[0]


def warm_engine(
    config: DeploymentConfig, bundle: "Bundle", t: TablesHome | None, rows: "Sequence[Find]" = ()
) -> "tuple[Engine, WarmupReport]":
    """Takes seconds to minutes: every bucket is captured, the golden rows are checked.

    rows: how to find the shards that answer for rows of its files; (): they are read here.

    Raises:
        BundleError, InputError: as `Engine` and `Engine.warmup`; nothing is left of it then.
    """
    from deployments.remote_rows.remote_rows import RemoteRows
    from dpiframe_core.embedding.home import home_of
    from dpiframe_core.engine.engine import Engine
    from dpiframe_core.engine.options import EngineOptions

    batching = config.batching
    options = EngineOptions(max_batch_rows=batching.max_batch_rows, lanes=batching.lanes, buckets=batching.buckets)
    home = None
    if t is not None:
        schema, name = bundle.manifest.feature_schema, bundle.fingerprint[:16]
        source = None
        if t.remote is not None and rows:
            source = RemoteRows(
                rows, [bundle.tables[s.name] for s in schema.tables], bundle.fingerprint, t.remote.timeout_ms / 1e3
            )
            source.await_all(_SHARDS_S)
        home = home_of(
            schema,
            name,
            hbm_gib=t.hbm_gib,
            placement=t.placement,
            folder=t.host_folder,
            host_gib=t.host_gib,
            ahead_mib=t.ahead_mib,
            source=source,
            replan_s=t.replan_s,
            replan_mib=t.replan_mib,
        )
    engine = Engine(bundle, config.device, config.precision, options, home)
    try:
        return engine, engine.warmup()
    except BaseException:
        engine.close()  # another one may serve beside it, and need the memory
        raise


def require_room(bundle: "Bundle", device: str, working_bytes: int, hot_bytes: int | None = None) -> None:
    """Whether a device's memory holds one more model, before anything is put there: another one serves from it meanwhile.

    Counts tables and weights; buffers and graphs are taken to be as large as those of the models before.

    Args:
        working_bytes: of those. hot_bytes: what the tables may take of the device, if that does not hold them whole.

    Raises:
        Unavailable: it does not.
    """
    import torch

    target = torch.device(device)
    if target.type != "cuda":
        return
    tables = sum(t.nbytes for t in bundle.tables.values())
    needed = (tables if hot_bytes is None else min(tables, hot_bytes)) + sum(t.nbytes for t in bundle.dense.values())
    needed += working_bytes
    # What torch holds of models before it gives to the next one.
    free = torch.cuda.mem_get_info(target)[0] + torch.cuda.memory_reserved(target) - torch.cuda.memory_allocated(target)
    if free < needed:
        rule = "unload a version that gets no requests, or have tables lie in host memory (`tables`)"
        raise Unavailable(f"{bundle.path}: got {free:,} bytes free on {target}, expected the {needed:,} it needs: {rule}")
