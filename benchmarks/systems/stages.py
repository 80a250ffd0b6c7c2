"""The steps from eager PyTorch to what serving runs, as data, and how one is built: for suites `ablation` and `first_op`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.systems.systems import build, golden
from benchmarks.workloads.workload import Workload
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.fusion.passes import PASSES

_PLAIN = EngineOptions(fusion=(), policy="sequential", max_streams=1, capture=False)
_FUSED = replace(_PLAIN, fusion=tuple(PASSES))


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: our engine with these options (None: eager PyTorch). first_op: its name in that suite, if it has a part."""

    name: str
    options: EngineOptions | None
    first_op: str | None


# What each stage adds to the one before it. Up to breadth-first every operator is issued anew for each batch, as in the paper.
STAGES = (
    Stage("eager", None, "eager"),
    Stage("fused lookup", replace(_PLAIN, fusion=("lookup",)), None),
    Stage("intra-module fusion", _FUSED, "sequential"),
    Stage("streams, depth-first", replace(_FUSED, policy="depth_first", max_streams=4), "depth-first"),
    Stage("streams, breadth-first", replace(_FUSED, policy="breadth_first", max_streams=4), "breadth-first"),
    Stage("graph capture", EngineOptions(policy="breadth_first"), "captured"),
    Stage("waves", EngineOptions(policy="waves"), "waves"),
)


@dataclass(frozen=True, eq=False)
class Running:
    """A stage at work: host to host, and the seconds from its first operator's launch to the scores in host memory."""

    score: Callable[[RowBlock], np.ndarray]
    first_op_s: Callable[[RowBlock], float]
    close: Callable[[], None]


def start(stage: Stage, w: Workload, batches: Sequence[int], precision: str, device: torch.device) -> dict[int, Running]:
    """The stage for each batch size. The caller holds `matmul_precision(precision)`."""
    if stage.options is None:
        eager = {rows: build("eager", w, rows, precision, device) for rows in batches}
        return {rows: Running(s.score, s.first_op_s, s.close) for rows, s in eager.items() if s.first_op_s}
    most = max(64, *batches)  # the golden rows
    options = replace(stage.options, max_batch_rows=most, buckets=tuple(sorted({*batches, most})), lanes=1)
    engine = Engine(w.bundle(golden(w)), str(device), precision, options)
    engine.warmup()
    running = Running(engine.submit, lambda block: engine.run_batch((block,)).device_ms / 1e3, engine.close)
    return {rows: replace(running, close=lambda: None) if i else running for i, rows in enumerate(batches)}
