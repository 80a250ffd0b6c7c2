"""Suite `latency`: models x precisions x batches x systems, host to host, each held against the strict float32 source model."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from benchmarks.device.floor import Machine, floor_record
from benchmarks.host_cores import on_quickest_core
from benchmarks.records.record import Record, record
from benchmarks.systems import systems as known
from benchmarks.systems.cells import check
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.names import PAPER_MODELS, is_compiled
from benchmarks.systems.system import System
from benchmarks.timing import interleaved
from benchmarks.workloads.workload import Workload
from kernels.dense.linear import matmul_precision


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the suite: a batch of `rows` rows of `contexts` contexts."""

    w: Workload
    precision: str
    rows: int
    contexts: int

    def of(self, system: str) -> str:
        """A system in the cell, as failures name it."""
        contexts = f" contexts={self.contexts}" if self.w.has_contexts else ""
        return f"{system} {self.w.name} {self.precision} B={self.rows}{contexts}"


def run(
    sweep: ModelSweep, systems: Sequence[str], *, buckets: str = "exact", machine: Machine | None = None
) -> Iterator[Record]:
    """Yields a record a measurement, a cell (model, precision, batch) at a time, its systems interleaved.

    machine: its limits, to yield our records of suite `floor` too, of the models that it counts.
    """
    for w in sweep.workloads():
        for precision in sweep.offered:
            for rows, contexts in sweep.sizes(w):
                with matmul_precision(precision):
                    yield from _cell(sweep, Cell(w, precision, rows, contexts), systems, buckets, machine)
        del w  # its tables go before those of the next model come


def _cell(sweep: ModelSweep, at: Cell, names: Sequence[str], buckets: str, machine: Machine | None) -> Iterator[Record]:
    if any(map(is_compiled, names)):
        known.forget_compiled()
    w, precision, rows = at.w, at.precision, at.rows
    blocks = sweep.blocks(w, rows, at.contexts)
    expected = known.reference_scores(w, blocks)
    built: dict[str, System] = {}
    worst: dict[str, float] = {}
    for name in names:
        try:
            system = known.build(name, w, rows, precision, sweep.device, contexts=at.contexts, buckets=buckets)
            with torch.inference_mode():
                scores = zip(map(system.score, blocks), expected, strict=True)
                worst[name] = max(check(s, e, precision, at.of(name)) for s, e in scores)
        except Exception as error:
            sweep.failed(at.of(name), error)
            continue
        built[name] = system
    count = len(blocks)
    with torch.inference_mode():
        calls = {name: lambda i, s=system: s.score(blocks[i % count]) for name, system in built.items()}
        around = on_quickest_core if sweep.device.type == "cuda" else nullcontext  # CPU kernels have threads of their own
        times = interleaved(calls, sweep.seconds, around=around)
        device_us = {name: system.device_us(blocks[0]) for name, system in built.items()}
    cell = sweep.cell(w, at.contexts) | {"buckets": buckets}
    for name, system in built.items():
        system.close()
        own = {"times": times[name], "device_us": device_us[name], "max_abs_err": worst[name], **system.notes}
        yield record("latency", name, model=w.name, batch=rows, precision=precision, cell=cell, **own, **w.facts)
        if machine and name == "dpiframe" and w.name in PAPER_MODELS:
            yield floor_record(w, blocks, precision, machine, cell, own)
