"""Suite `latency`: models x precisions x batches x systems, host to host, each held against the strict float32 source model."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.record import latency_us
from benchmarks.systems import build, reference_scores
from benchmarks.workload import Workload, id_blocks, workload
from dpiframe_core.engine import GOLDEN_TOLERANCE
from kernels.dense import matmul_precision

BATCHES_IN_ROTATION = 8


def run(
    models: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[int],
    systems: Sequence[str],
    device: torch.device,
    *,
    seconds: float,
    skew: str,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yields a record a measurement; `speedup_vs` holds this system's speed-up over every other one of the same cell."""
    for model in models:
        w = workload(model, device, seed=seed)
        for precision in precisions:
            for rows in batches:
                cell = [_measure(w, name, rows, precision, device, seconds, skew, seed) for name in systems]
                p50 = {r["system"]: r["p50_us"] for r in cell}
                for record in cell:
                    others = {n: round(t / record["p50_us"], 3) for n, t in p50.items() if n != record["system"]}
                    yield {**record, "speedup_vs": others}
        del w
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    w: Workload, name: str, rows: int, precision: str, device: torch.device, seconds: float, skew: str, seed: int
) -> dict[str, Any]:
    blocks = id_blocks(w.schema, rows, BATCHES_IN_ROTATION, skew=skew, seed=seed + rows)
    with matmul_precision(precision):
        system = build(name, w, rows, precision, device)
        worst = max(float(np.abs(system.score(b) - reference_scores(w, b)).max()) for b in blocks)
        if not worst <= GOLDEN_TOLERANCE[precision]:
            raise AssertionError(
                f"{name} {w.name} {precision} B={rows}: got scores off by {worst}, expected the source model's"
            )
        p50, p99, calls = latency_us(lambda i: system.score(blocks[i % len(blocks)]), seconds=seconds)
    system.close()
    return {
        "suite": "latency", "system": name, "model": w.name, "batch": rows, "precision": precision, "ids": skew,
        "p50_us": round(p50, 2), "p99_us": round(p99, 2), "device_us": None, "rows_per_s": round(rows / p50 * 1e6),
        "max_abs_err": worst, "calls": calls,
    }  # fmt: skip
