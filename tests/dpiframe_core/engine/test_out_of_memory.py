"""A device without room for a model: one error that names the bytes, and an engine that serves nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine import engine as module
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import Unavailable


def full(error: BaseException) -> Callable[..., None]:
    def raises(*_: object) -> None:
        raise error

    return raises


LACKS = [
    pytest.param(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB."), id="torch"),
    pytest.param(MemoryError(), id="CuPy, or the host"),
    pytest.param(RuntimeError("CUDA error: out of memory"), id="CUDA"),
    pytest.param(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), id="cuBLAS"),
]


@pytest.mark.parametrize("lack", LACKS)
def test_a_warm_up_without_room_names_the_bytes_and_the_engine_serves_nothing(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, lack: BaseException
) -> None:
    engine = Engine.load(demo_bundle, "cpu", max_batch_rows=512)
    bundle = engine.bundle
    tables = sum(t.rows * t.dim * 4 for t in bundle.manifest.feature_schema.tables)
    monkeypatch.setattr(CpuLane, "prepare", full(lack))
    with pytest.raises(Unavailable) as caught:
        engine.warmup()
    held = "the dense layers and buffers of 2 lanes for 512 rows each"
    message = f"device cpu: got a host when memory ran out, expected room for {held} beside tables of {tables:,} bytes; "
    assert str(caught.value).startswith(message)
    with pytest.raises(Unavailable, match="the warm-up failed: device cpu"):
        engine.check()
    engine.close()


def test_tables_without_room_are_named_by_their_bytes(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = read_bundle(demo_bundle)
    tables = sum(t.rows * t.dim * 4 for t in bundle.manifest.feature_schema.tables)
    monkeypatch.setattr(module, "EmbeddingStore", full(MemoryError()))
    with pytest.raises(Unavailable, match=f"expected room for tables of {tables:,} bytes;"):
        Engine(bundle, "cpu")


def test_another_fault_stays_what_it_is(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuLane, "prepare", full(RuntimeError("an illegal memory access was encountered")))
    engine = Engine.load(demo_bundle, "cpu")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.warmup()
    engine.close()


@pytest.mark.gpu
def test_a_gpu_that_is_full_says_what_was_free_and_serves_again_once_there_is_room(demo_bundle: Path) -> None:
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free - 96 * 2**20), dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    rest = [torch.empty(2**20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    with pytest.raises(Unavailable) as caught:
        Engine(read_bundle(demo_bundle), "cuda", options=EngineOptions(max_batch_rows=65536, lanes=8)).warmup()
    assert f"bytes free of {total:,} when memory ran out, expected room for" in str(caught.value)
    del taken, rest
    torch.cuda.empty_cache()
    engine = Engine.load(demo_bundle, "cuda", max_batch_rows=256)
    engine.warmup()
    engine.check()
    engine.close()


def test_a_device_that_failed_is_told_apart_from_an_engine_that_is_cold_or_closed(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(demo_bundle, "cpu")
    engine.check_device()
    engine.warmup()
    block = engine.encoder.encode(engine.bundle.example["candidates"], engine.bundle.example["context"])  # type: ignore[index]
    monkeypatch.setattr(CpuLane, "run", full(RuntimeError("an illegal memory access was encountered")))
    engine.check_device()
    with pytest.raises(Unavailable):
        engine.run_batch((block,))
    engine.close()
    with pytest.raises(Unavailable, match="device cpu failed: an illegal memory access"):
        engine.check_device()
    other = Engine.load(demo_bundle, "cpu")
    other.close()
    other.check_device()
