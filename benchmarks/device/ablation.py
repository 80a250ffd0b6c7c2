"""Suites `ablation` (host to host, a component added at a time) and `first_op` (from the first operator's launch on)."""

from collections.abc import Iterator, Sequence

import torch

from benchmarks.records.record import Record, record
from benchmarks.systems import stages as known
from benchmarks.systems.cells import check
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.stages import STAGES, Running, Stage
from benchmarks.systems.systems import reference_scores
from benchmarks.timing import interleaved
from benchmarks.workloads.workload import Workload
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision


def run(suites: Sequence[str], sweep: ModelSweep) -> Iterator[Record]:
    """Yields a record a stage and cell for each of the suites ("ablation", "first_op"), which share what they run.

    The stages of a model run side by side, in interleaved rounds.
    """
    stages = [s for s in STAGES if "ablation" in suites or s.first_op]
    for w in sweep.workloads():
        for precision in sweep.offered:
            with matmul_precision(precision):
                running = dict(_started(stages, sweep, w, precision))
                for rows in sweep.batches:
                    blocks = sweep.blocks(w, rows)
                    for suite in suites:
                        names = {s: s.name if suite == "ablation" else s.first_op for s in running}
                        own = {name: running[s][rows] for s, name in names.items() if name}
                        yield from _cell(suite, w, precision, blocks, own, sweep.seconds, {"ids": sweep.skew})
                for built in running.values():
                    for r in built.values():
                        r.close()


def _started(
    stages: Sequence[Stage], sweep: ModelSweep, w: Workload, precision: str
) -> Iterator[tuple[Stage, dict[int, Running]]]:
    for stage in stages:
        try:
            yield stage, known.start(stage, w, sweep.batches, precision, sweep.device)
        except Exception as error:
            sweep.failed(f"{stage.name} {w.name} {precision}", error)


def _cell(
    suite: str,
    w: Workload,
    precision: str,
    blocks: Sequence[RowBlock],
    running: dict[str, Running],
    seconds: float,
    cell: dict[str, str],
) -> Iterator[Record]:
    rows, count = blocks[0].rows, len(blocks)
    expected = reference_scores(w, blocks)
    worst, calls = {}, {}
    with torch.inference_mode():
        for name, r in running.items():
            what = f"{name} {w.name} {precision} B={rows}"
            worst[name] = max(check(r.score(b), e, precision, what) for b, e in zip(blocks, expected, strict=True))
            call = r.score if suite == "ablation" else r.first_op_s
            calls[name] = lambda i, call=call: call(blocks[i % count])
        times = interleaved(calls, seconds)
    for name in running:
        yield record(
            suite, name, model=w.name, batch=rows, precision=precision, cell=cell, times=times[name], max_abs_err=worst[name]
        )
