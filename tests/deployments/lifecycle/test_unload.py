"""What a replica with engines holds after versions came and went: nothing of those that went, and all of those that serve."""

import asyncio
import gc
import platform
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.batching.batcher import RowBatcher
from deployments.batching.leasing_scorer import LeasingScorer
from deployments.config import parse_config
from deployments.fanin.scorer import FanInScorer
from deployments.lifecycle.desired import desired_of
from deployments.lifecycle.release import Key, Release
from deployments.scoring.catalog import Catalog
from dpiframe_core.errors import BundleError, Unavailable
from tests.deployments.lifecycle.versions import write_moved
from tests.deployments.serving_doubles import until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import


class Replica:
    """What a replica loads and unloads with, without Serve and Ray's metrics."""

    def __init__(self, config: Any) -> None:
        from deployments.serve import replica
        from deployments.serve.loaded_models import LoadedModels

        self._kind: Any = replica.Replica.__mro__[1]  # [0] is Serve's wrapper
        self._config, self._catalog, self._loaded = config, Catalog(), LoadedModels(config)
        self._batchers: dict[Key, Any] = {}
        nothing = lambda *_: None  # noqa: E731
        self._metrics = SimpleNamespace(
            batch_of=lambda *_: nothing, watch=nothing, serves=nothing, forget=nothing, reads_tables=nothing
        )

    async def load(self, release: Release) -> None:
        await self._kind.load(self, release)

    async def unload(self, key: Key) -> None:
        await self._kind.unload(self, key)


def test_an_unloaded_version_leaves_its_memory_without_the_help_of_a_collection(demo_bundle: Path) -> None:
    config = parse_config({"models": [{"path": str(demo_bundle)}], "device": "cpu"}, "test")
    (release,) = desired_of(config.models).releases.values()

    async def main() -> None:
        replica = Replica(config)
        await replica.load(release)
        engine = weakref.ref(replica._loaded._engines[release.key])
        served = replica._catalog.loaded(*release.key)
        example = served.example
        with served.in_use:
            scored = await served.scorer.submit(served.encode(example["candidates"], example["context"]))
        assert len(scored.scores) == len(next(iter(example["candidates"].values())))
        threads = replica._batchers[release.key].dispatcher.threads
        del served, scored
        await replica.unload(release.key)
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        assert list(replica._catalog) == []
        assert replica._loaded._engines == {}
        await until(lambda: engine() is None)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_version_whose_golden_rows_do_not_come_out_leaves_nothing(demo_bundle: Path, tmp_path: Path) -> None:
    write_moved(demo_bundle, tmp_path / "bad", "2", 1.0, sound=False)
    config = parse_config({"models": [{"path": str(tmp_path / "bad")}], "device": "cpu"}, "test")
    (release,) = desired_of(config.models).releases.values()

    async def main() -> None:
        replica = Replica(config)
        with pytest.raises(
            BundleError, match=r"bad: golden rows: got scores off by 0\.\d+ at fp32 on cpu, expected at most 1e-05"
        ):
            await replica.load(release)
        assert (list(replica._catalog), replica._batchers, replica._loaded._engines) == ([], {}, {})
        with pytest.raises(BundleError, match="got a bundle with fingerprint"):
            await replica.load(release.model_copy(update={"fingerprint": "0" * 64}))

    asyncio.run(main())


def test_a_device_without_room_for_a_version_refuses_it_with_the_bytes(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from deployments.serve.loaded_models import require_room
    from dpiframe_core.bundle.bundle import read_bundle

    bundle = read_bundle(demo_bundle)
    tables = sum(t.nbytes for t in bundle.tables.values())
    weights = sum(t.nbytes for t in bundle.dense.values())
    held = {"free": 0, "reserved": 3000, "allocated": 1000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (held["free"], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["allocated"])
    held["free"] = tables + weights + 500 - 2000
    require_room(bundle, "cuda", 500)
    held["free"] -= 1
    why = rf"small: got {tables + weights + 499:,} bytes free on cuda, expected the {tables + weights + 500:,} it needs: unload"
    with pytest.raises(Unavailable, match=why):
        require_room(bundle, "cuda", 500)
    require_room(bundle, "cuda", 500, hot_bytes=tables - 1)
    held["free"] = 0
    require_room(bundle, "cpu", 500)


@pytest.mark.parametrize(
    ("machine", "files", "kind"),
    [("x86_64", False, FanInScorer), ("aarch64", False, RowBatcher), ("x86_64", True, LeasingScorer)],
)
def test_requests_take_the_rings_to_an_engine_of_their_own_process_where_they_can(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, machine: str, files: bool, kind: type
) -> None:
    tables = {"hbm_gib": 1e-4, "host_gib": 1e-4, "ahead_mib": 1} if files else None
    model, batching = {"path": str(demo_bundle), "tables": tables}, {"max_run_s": 2}
    config = parse_config({"models": [model], "batching": batching, "device": "cpu"}, "test")
    (release,) = desired_of(config.models).releases.values()
    monkeypatch.setattr(platform, "machine", lambda: machine)

    before = {*threading.enumerate()}  # those of other tests may go on

    async def main() -> None:
        replica = Replica(config)
        await replica.load(release)
        served = replica._catalog.loaded(*release.key)
        assert type(served.scorer) is kind
        example = served.example
        with served.in_use:
            scored = await served.scorer.submit(served.encode(example["candidates"], example["context"]))
        assert np.isfinite(scored.scores).all()
        await replica.unload(release.key)
        await until(lambda: not {"watchdog", "lane-0"} & {t.name for t in {*threading.enumerate()} - before})

    asyncio.run(main())
