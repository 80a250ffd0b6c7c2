"""Suite `warmup`: from a loaded model to a ready engine with the buckets that serving captures, and the memory that takes.

Each start is a process of its own: `cold` with empty caches of kernels and choices, `again` with those that it left.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed, offered

STARTS = ("cold", "again")


def run(
    models: Sequence[str],
    precisions: Sequence[str],
    device: torch.device,
    failed: Failed,
    *,
    max_batch_rows: int,
    seed: int,
    sizes: Sequence[int] | None = None,
) -> Iterator[Record]:
    """Yields a record a model, precision and start. `sizes`: of the tables, by default Criteo Kaggle's."""
    for model in models:
        for precision in offered(precisions, device):
            with TemporaryDirectory(prefix="dpiframe-warmup-") as caches:
                for start in STARTS:
                    try:  # "spawn": nothing that this process compiled is there
                        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                            what = (model, precision, str(device), max_batch_rows, seed, sizes, caches)
                            found = pool.submit(_started, *what).result()
                    except Exception as error:
                        failed(f"warmup {model} {precision} {start}", error)
                        continue
                    yield record("warmup", "dpiframe", model=model, precision=precision, cell={"start": start}, **found)


def _started(
    model: str, precision: str, device: str, max_batch_rows: int, seed: int, sizes: Sequence[int] | None, caches: str
) -> dict[str, Any]:
    os.environ |= {"XDG_CACHE_HOME": caches, "CUPY_CACHE_DIR": f"{caches}/cupy", "TRITON_CACHE_DIR": f"{caches}/triton"}
    from benchmarks.systems.systems import golden
    from benchmarks.workloads.models import workload
    from dpiframe_core.engine.engine import Engine
    from dpiframe_core.engine.options import EngineOptions
    from kernels.dense.linear import matmul_precision

    w = workload(model, torch.device(device), seed=seed, **({"sizes": sizes} if sizes else {}))
    with matmul_precision("fp32"):
        rows = golden(w)
    engine = Engine(w.bundle(rows), device, precision, EngineOptions(max_batch_rows=max_batch_rows))
    report = engine.warmup()
    engine.close()
    return {
        "seconds": report.seconds,
        "buckets": len(report.buckets),
        "lanes": report.lanes,
        "recalled": report.recalled,
        "max_abs_err": report.golden_error,
        "table_bytes": report.table_bytes,
        "buffer_bytes": report.buffer_bytes,
        "captured_bytes": report.captured_bytes,
    }
