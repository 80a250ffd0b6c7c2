"""Suite `latency`: models x precisions x batches x systems, host to host, each held against the strict float32 source model."""

from collections.abc import Iterator, Sequence

import torch

from benchmarks.device.floor import Machine, floor_record
from benchmarks.records.record import Record, record
from benchmarks.systems import systems as known
from benchmarks.systems.cells import check
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.names import is_compiled
from benchmarks.systems.workload import Workload
from benchmarks.timing import interleaved
from kernels.dense.linear import matmul_precision


def run(
    sweep: ModelSweep, systems: Sequence[str], *, buckets: str = "exact", machine: Machine | None = None
) -> Iterator[Record]:
    """Yields a record a measurement, a cell (model, precision, batch) at a time, its systems interleaved.

    machine: its limits, to yield our records of suite `floor` too.
    """
    for w in sweep.workloads():
        for precision in sweep.offered:
            for rows in sweep.batches:
                with matmul_precision(precision):
                    yield from _cell(sweep, w, precision, rows, systems, buckets, machine)
        del w  # its tables go before those of the next model come


def _cell(
    sweep: ModelSweep, w: Workload, precision: str, rows: int, names: Sequence[str], buckets: str, machine: Machine | None
) -> Iterator[Record]:
    if any(map(is_compiled, names)):
        known.forget_compiled()
    blocks = sweep.blocks(w, rows)
    expected = [known.reference_scores(w, b) for b in blocks]
    built: dict[str, known.System] = {}
    worst: dict[str, float] = {}
    for name in names:
        what = f"{name} {w.name} {precision} B={rows}"
        try:
            system = known.build(name, w, rows, precision, sweep.device, buckets=buckets)
            with torch.inference_mode():
                worst[name] = max(check(system.score(b), e, precision, what) for b, e in zip(blocks, expected, strict=True))
        except Exception as error:
            sweep.failed(what, error)
            continue
        built[name] = system
    count = len(blocks)
    with torch.inference_mode():
        calls = {name: lambda i, s=system: s.score(blocks[i % count]) for name, system in built.items()}
        times = interleaved(calls, sweep.seconds)
        device_us = {name: system.device_us(blocks[0]) for name, system in built.items()}
    cell = {"ids": sweep.skew, "buckets": buckets}
    for name, system in built.items():
        system.close()
        own = {"times": times[name], "device_us": device_us[name], "max_abs_err": worst[name], **system.notes}
        yield record("latency", name, model=w.name, batch=rows, precision=precision, cell=cell, **own)
        if machine and name == "dpiframe":
            yield floor_record(w, blocks, precision, machine, cell, own)
