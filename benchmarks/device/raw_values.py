"""Suite `raw`: a request of raw values through `Engine.score` beside the module that the model came from, called eagerly with
ids that are ready. Both by the time of the calling thread, so that what else a machine does is in neither.

Of models that came through `compile`; a small one shows what a call costs, whatever its products.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.records.record import Record, record
from benchmarks.systems.cells import BATCHES_IN_ROTATION, check
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.systems import golden
from benchmarks.timing import interleaved
from benchmarks.workloads.blocks import wide_ids
from benchmarks.workloads.compiled import compiled_model
from benchmarks.workloads.models import workload
from benchmarks.workloads.modules import Mlp
from benchmarks.workloads.workload import Form, Workload
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions

TINY = "mlp-2"  # two fields of dim 16, and layers 32-1
_SIZES = 1000, 500


def made(name: str, device: torch.device, **size: Any) -> Workload:
    """A model of `workload`, or the tiny one."""
    if name == TINY:
        return compiled_model(name, device, **{**size, "sizes": _SIZES, "module": Mlp(len(_SIZES), 16)})
    return workload(name, device, **size)


def run(sweep: ModelSweep) -> Iterator[Record]:
    """Yields a record a model, batch and system: `eager` on ready ids, `dpiframe` on a ready block, `dpiframe-raw` on lists."""
    for w in sweep.workloads():
        engine, module = Engine(w.bundle(golden(w)), "cpu", "fp32", EngineOptions()), _OfColumns(w).eval()
        engine.warmup()
        for rows in sweep.batches:
            try:
                yield from _cell(sweep, w, engine, module, rows)
            except Exception as error:
                sweep.failed(f"raw {w.name} B={rows}", error)
        engine.close()


class _OfColumns(nn.Module):
    """The model as its users call it: a tensor of ids a field, a table each."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding.from_pretrained(table) for table in w.embedding_tables)
        self.dense = w.module(Form(stacked=False)).dense

    def forward(self, columns: Sequence[torch.Tensor]) -> torch.Tensor:
        fields = [table(ids) for table, ids in zip(self.tables, columns, strict=True)]
        return torch.sigmoid(self.dense(torch.stack(fields, 1)))


def _cell(sweep: ModelSweep, w: Workload, engine: Engine, module: nn.Module, rows: int) -> Iterator[Record]:
    blocks, names = sweep.blocks(w, rows), [f.name for f in w.schema.features]
    ids = [[torch.from_numpy(column.copy()) for column in wide_ids(block).T] for block in blocks]
    lists = [dict(zip(names, (column.tolist() for column in own), strict=True)) for own in ids]

    def eager(i: int) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = module(ids[i]).numpy()
        return found

    ways: dict[str, Callable[[int], np.ndarray]] = {
        "eager": eager,
        "dpiframe": lambda i: engine.submit(blocks[i]),
        "dpiframe-raw": lambda i: engine.score(lists[i]),
    }
    worst = {}
    for name, way in ways.items():
        worst[name] = max(check(way(i), eager(i), "fp32", f"{name} {w.name} B={rows}") for i in range(len(blocks)))
    times = interleaved({name: _by_thread_time(way) for name, way in ways.items()}, sweep.seconds)
    cell = sweep.cell(w) | {"threads": torch.get_num_threads()}
    for name in ways:
        yield record(
            "raw", name, model=w.name, batch=rows, precision="fp32", cell=cell, times=times[name], max_abs_err=worst[name]
        )


def _by_thread_time(way: Callable[[int], object]) -> Callable[[int], float]:
    def timed(i: int) -> float:
        start = time.thread_time()
        way(i % BATCHES_IN_ROTATION)
        return time.thread_time() - start

    return timed
