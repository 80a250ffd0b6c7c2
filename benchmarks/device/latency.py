"""Suite `latency`: models x precisions x batches x systems, host to host, each held against the strict float32 source model."""

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.device.floor import Machine, floor_record
from benchmarks.record import Record, record
from benchmarks.systems import systems as known
from benchmarks.systems.cells import BATCHES_IN_ROTATION, Failed, check, offered
from benchmarks.systems.names import is_compiled
from benchmarks.systems.workload import Workload, id_blocks, workload
from benchmarks.timing import interleaved
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision


def run(
    models: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[int],
    systems: Sequence[str],
    device: torch.device,
    failed: Failed,
    *,
    seconds: float,
    skew: str,
    seed: int,
    buckets: str = "exact",
    machine: Machine | None = None,
    make: Callable[..., Workload] = workload,
) -> Iterator[Record]:
    """Yields a record a measurement, a cell (model, precision, batch) at a time, its systems interleaved.

    A system that fails is reported through `failed`, and the others are measured all the same. `machine`: its limits, to yield
    our records of suite `floor` too.
    """
    for model in models:
        w = make(model, device, seed=seed)
        for precision in offered(precisions, device):
            for rows in batches:
                blocks = id_blocks(w.schema, rows, BATCHES_IN_ROTATION, skew=skew, seed=seed + rows)
                cell = {"ids": skew, "buckets": buckets}
                with matmul_precision(precision):
                    yield from _cell(w, precision, rows, blocks, systems, device, failed, seconds, cell, machine)
        del w
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _cell(
    w: Workload,
    precision: str,
    rows: int,
    blocks: Sequence[RowBlock],
    names: Sequence[str],
    device: torch.device,
    failed: Failed,
    seconds: float,
    cell: dict[str, str],
    machine: Machine | None,
) -> Iterator[Record]:
    if any(map(is_compiled, names)):
        known.forget_compiled()
    expected = [known.reference_scores(w, b) for b in blocks]
    built: dict[str, known.System] = {}
    worst: dict[str, float] = {}
    for name in names:
        what = f"{name} {w.name} {precision} B={rows}"
        try:
            system = known.build(name, w, rows, precision, device, buckets=cell["buckets"])
            with torch.inference_mode():
                worst[name] = max(check(system.score(b), e, precision, what) for b, e in zip(blocks, expected, strict=True))
        except Exception as error:
            failed(what, error)
            continue
        built[name] = system
    count = len(blocks)
    with torch.inference_mode():
        calls = {name: lambda i, s=system: s.score(blocks[i % count]) for name, system in built.items()}
        times = interleaved(calls, seconds)
        device_us = {name: system.device_us(blocks[0]) for name, system in built.items()}
    for name, system in built.items():
        system.close()
        own = {"times": times[name], "device_us": device_us[name], "max_abs_err": worst[name], **system.notes}
        yield record("latency", name, model=w.name, batch=rows, precision=precision, cell=cell, **own)
        if machine and name == "dpiframe":
            yield floor_record(w, blocks, precision, machine, cell, own)
