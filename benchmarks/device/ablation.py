"""Suites `ablation` (host to host, a component added at a time) and `first_op` (from the first operator's launch on)."""

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.record import Record, record
from benchmarks.systems import stages as known
from benchmarks.systems.cells import BATCHES_IN_ROTATION, Failed, check, offered
from benchmarks.systems.stages import STAGES, Running, Stage
from benchmarks.systems.systems import reference_scores
from benchmarks.systems.workload import Workload, id_blocks, workload
from benchmarks.timing import interleaved
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision


def run(
    suites: Sequence[str],
    models: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[int],
    device: torch.device,
    failed: Failed,
    *,
    seconds: float,
    seed: int,
    skew: str = "zipf",
    make: Callable[..., Workload] = workload,
) -> Iterator[Record]:
    """Yields a record a stage and cell for each of the suites ("ablation", "first_op"), which share what they run.

    The stages of a model run side by side, in interleaved rounds.
    """
    stages = [s for s in STAGES if "ablation" in suites or s.first_op]
    for model in models:
        w = make(model, device, seed=seed)
        for precision in offered(precisions, device):
            with matmul_precision(precision):
                running = dict(_started(stages, w, batches, precision, device, failed))
                for rows in batches:
                    blocks = id_blocks(w.schema, rows, BATCHES_IN_ROTATION, skew=skew, seed=seed + rows)
                    for suite in suites:
                        names = {s: s.name if suite == "ablation" else s.first_op for s in running}
                        own = {name: running[s][rows] for s, name in names.items() if name}
                        yield from _cell(suite, w, precision, blocks, own, seconds, {"ids": skew})
                for built in running.values():
                    for r in built.values():
                        r.close()


def _started(
    stages: Sequence[Stage], w: Workload, batches: Sequence[int], precision: str, device: torch.device, failed: Failed
) -> Iterator[tuple[Stage, dict[int, Running]]]:
    for stage in stages:
        try:
            yield stage, known.start(stage, w, batches, precision, device)
        except Exception as error:
            failed(f"{stage.name} {w.name} {precision}", error)


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
    expected = [reference_scores(w, b) for b in blocks]
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
