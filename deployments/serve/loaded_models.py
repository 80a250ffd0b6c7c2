"""The models of a replica that has a device: loaded and warm one after the other, and what Serve asks of all of them together.

Knows no Ray; torch is imported only when something is loaded.
"""

import asyncio
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from typing import TYPE_CHECKING

from deployments.access.models_root import check_models_root
from deployments.config import DeploymentConfig, ModelRef
from deployments.metrics import Gauged
from deployments.serve.load_meter import LoadMeter
from deployments.serve.serve_policy import reported
from dpiframe_core.errors import ConfigError

if TYPE_CHECKING:
    from deployments.remote_rows.remote_rows import Find
    from dpiframe_core.engine.engine import Engine

_SHARDS_S = 120.0  # for processes that read the same bundle meanwhile


class LoadedModels:
    """Owns the engines of one process. Make it on the event loop: the meter counts that thread's time."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._gauged: list[Gauged] = []
        self._meter = LoadMeter()

    async def load(
        self, config: DeploymentConfig, rows: "Mapping[int, Sequence[Find]] | None" = None
    ) -> "AsyncIterator[tuple[str, ModelRef, Engine]]":
        """Each of the configuration's models, with the name to serve it under, as soon as it is warm.

        rows: by a model's number, how to find the shards that answer for rows of its files.

        Raises:
            BundleError, InputError: as `load_engine`. ConfigError: two have one name, or one leaves `models_root`.
        """
        check_models_root(config)
        for i, ref in enumerate(config.models):
            # Off the event loop: a load may take minutes, and a blocked loop cannot be told to stop.
            engine = await asyncio.to_thread(load_engine, config, ref, (rows or {}).get(i, ()))
            name = ref.name or engine.manifest.name
            require_new(name, self._engines)
            self._engines[name] = engine
            yield name, ref, engine

    def meter(self, gauged: Gauged) -> None:
        """Has what a model's rows wait in count for `load_figures`."""
        self._gauged.append(gauged)

    def check(self) -> None:
        """Raises if an engine has failed."""
        for engine in self._engines.values():
            engine.check()

    def load_figures(self) -> dict[str, float]:
        """This replica's load since the last call, over all models, in the form of `record_autoscaling_stats`."""
        return reported(self._meter.read(self._gauged))

    async def close(self) -> None:
        """Releases the engines, in which nothing may run any more."""
        for engine in self._engines.values():
            await asyncio.to_thread(engine.close)


def load_engine(config: DeploymentConfig, ref: ModelRef, rows: "Sequence[Find]" = ()) -> "Engine":
    """Takes seconds to minutes: the bundle is verified, every bucket captured, the golden rows checked.

    rows: how to find the shards that answer for rows of its files; (): they are read here.

    Raises:
        BundleError, InputError: as `read_bundle`, `Engine` and `Engine.warmup`.
    """
    from deployments.remote_rows.remote_rows import RemoteRows
    from dpiframe_core.bundle.bundle import read_bundle
    from dpiframe_core.embedding.home import home_of
    from dpiframe_core.engine.engine import Engine
    from dpiframe_core.engine.options import EngineOptions

    batching = config.batching
    options = EngineOptions(max_batch_rows=batching.max_batch_rows, lanes=batching.lanes or 0, buckets=batching.buckets)
    bundle, t = read_bundle(ref.path), ref.tables
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
    engine.warmup()
    return engine


def require_new(name: str, models: Container[str]) -> None:
    """Raises ConfigError if a model of this name is there already."""
    if name in models:
        raise ConfigError(f"models: got {name!r} twice, expected distinct names (give one of them another `name`)")
