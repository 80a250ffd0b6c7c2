"""Suites `utilisation` and `mlperf`: rows a second, and how busy the GPU is, when as many threads call as there are lanes,
without a pause. `mlperf` is that of MLPerf's shape, where a row is a pair of a user and an item, and says how scores rank:
against the source model, and clicks that are drawn by its probabilities.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.device.activity import GpuCounters, kernel_shares
from benchmarks.device.precision import compared
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import check
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.names import is_compiled
from benchmarks.systems.system import System
from benchmarks.systems.systems import build, dpiframe, forget_compiled, reference_scores
from benchmarks.timing import Times, times_of
from benchmarks.workloads.workload import Workload
from dpiframe_core.features.row_block import RowBlock
from kernels.dense.linear import matmul_precision

LANES = (1, 2, 4)
_SETTLE_S = 0.2  # before the counters' first sample


def run(
    sweep: ModelSweep, systems: Sequence[str], *, lanes: Sequence[int] = LANES, suite: str = "utilisation"
) -> Iterator[Record]:
    """Yields a record a system (ours: a number of lanes) and cell. A peer has one caller: its buffers hold one batch."""
    for w in sweep.workloads():
        for precision in sweep.offered:
            for rows, contexts in sweep.sizes(w):
                if any(map(is_compiled, systems)):
                    forget_compiled()
                blocks = sweep.blocks(w, rows, contexts)
                expected = reference_scores(w, blocks)
                for name in systems:
                    for n in lanes if name == "dpiframe" else (1,):
                        what = f"{name} {w.name} {precision} B={rows} lanes={n}"
                        try:
                            with matmul_precision(precision):
                                system = _built(name, w, rows, contexts, precision, sweep.device, n)
                            found = _measured(sweep, system, precision, blocks, expected, n, what)
                            if suite == "mlperf":
                                found |= _ranking(system, precision, blocks, expected, sweep)
                            cell = sweep.cell(w, contexts) | {"lanes": n}
                            named = {"model": w.name, "batch": rows, "precision": precision, "cell": cell}
                            yield record(suite, name, **named, **found, **w.facts)
                            system.close()
                        except Exception as error:
                            sweep.failed(what, error)
        del w  # its tables go before those of the next model come


def _built(name: str, w: Workload, rows: int, contexts: int, precision: str, device: torch.device, lanes: int) -> System:
    if name == "dpiframe":
        return dpiframe(w, rows, precision, device, lanes=lanes)
    return build(name, w, rows, precision, device, contexts=contexts)


def _measured(
    sweep: ModelSweep,
    system: System,
    precision: str,
    blocks: Sequence[RowBlock],
    expected: Sequence[np.ndarray],
    lanes: int,
    what: str,
) -> dict[str, Any]:
    """What a record says of the saturated system."""
    rows, count = blocks[0].rows, len(blocks)
    with torch.inference_mode(), matmul_precision(precision):
        worst = max(check(system.score(b), e, precision, what) for b, e in zip(blocks, expected, strict=True))
        shares = kernel_shares(lambda i: system.score(blocks[i % count])) if sweep.device.type == "cuda" else None
        # torch's precision flags are the process's, so the threads below inherit them; its inference mode is a thread's own.
        times, wall, counters = saturated(lambda i: system.score(blocks[i % count]), lanes, sweep.seconds, sweep.device)
    return {
        "times": times, "rows_per_s": times.calls * rows / wall, "max_abs_err": worst, **counters.shares,
        "kernel_share": shares and round(shares[0], 4), "kernel_union": shares and round(shares[1], 4), **system.notes,
    }  # fmt: skip


def _ranking(
    system: System, precision: str, blocks: Sequence[RowBlock], expected: Sequence[np.ndarray], sweep: ModelSweep
) -> dict[str, float]:
    with torch.inference_mode(), matmul_precision(precision):
        scores, exact = np.concatenate([system.score(b) for b in blocks])[:, 0], np.concatenate(expected)[:, 0]
    clicks = np.random.default_rng(sweep.seed).random(len(exact)) < exact
    return compared(scores, exact, clicks, sweep.device)


def saturated(
    call: Callable[[int], object], threads: int, seconds: float, device: torch.device
) -> tuple[Times, float, GpuCounters]:
    """(times of single calls, wall seconds, counters) of threads that call without a pause."""
    spent: list[list[float]] = [[] for _ in range(threads)]
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(own: list[float]) -> None:
        i = 0
        try:
            with torch.inference_mode():
                while not stop.is_set():
                    start = time.perf_counter()
                    call(i)
                    own.append(time.perf_counter() - start)
                    i += 1
        except BaseException as error:
            errors.append(error)
            stop.set()

    workers = [threading.Thread(target=work, args=(own,)) for own in spent]
    counters = GpuCounters(device)
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    stop.wait(min(_SETTLE_S, seconds / 2))
    with counters:
        stop.wait(seconds)
    stop.set()
    for worker in workers:
        worker.join()
    wall = time.perf_counter() - begin
    if errors:
        raise errors[0]
    return times_of([t for own in spent for t in own]), wall, counters
