"""Suite `latency` with a process a model: all of them compile their peers side by side, then one after the other is timed.

What Inductor compiles takes minutes of a CPU a model. On a machine that is lent by the minute sixteen cores do that at once,
while each product that Inductor times, and each warm-up of ours, has the GPU to itself (`GpuTurn`). Cells are timed when the
compilers are done.
"""

import time
from collections.abc import Iterator, Sequence
from math import inf
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

import typer

from benchmarks.apart.latency_job import Job, work
from benchmarks.records.record import Record
from benchmarks.systems.cells import Failed
from benchmarks.systems.names import PAPER_MODELS, WITH_CONTEXTS, architecture_of

ORDER = (1024, 256, 4096, 64, 1)  # the cells that say most come first


def jobs(
    models: Sequence[str],
    precisions: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    seconds: float,
    seed: int,
    search_until: float,
    prepare_until: float = inf,
    eager: bool = True,
    descent: bool = True,
) -> list[Job]:
    """One a model; one a number of contexts where rows share features.

    Of jobs that have layers in common (the four's and DCN-V2's deep ones, DIN's at any number of contexts) the first searches
    at once, and the others find what it learned.
    """
    found: list[Job] = []
    leads: set[str] = set()
    for model in models:
        for n in contexts if model in WITH_CONTEXTS else (1,):
            rows = [b for b in sorted(batches, key=lambda b: ORDER.index(b) if b in ORDER else len(ORDER)) if n <= b]
            layers = "deep" if architecture_of(model) in PAPER_MODELS else model
            ahead = [(p, b, n) for p in precisions for b in rows[:2]]  # a precision's cells that are searched for
            cells = (*ahead, *((p, b, n) for b in rows[2:] for p in precisions))
            until = {"search_until": search_until, "prepare_until": prepare_until}
            how = {"plain_first": layers in leads, "eager": eager, "descent": descent}
            found.append(Job(model, cells, seconds, seed, **until, **how))
            leads.add(layers)
    return found


def run(todo: Sequence[Job], failed: Failed, *, timed_from: float, end: float) -> Iterator[Record]:
    """Yields records as they come. timed_from, end: seconds of the epoch; who is not ready at the first is timed when it is,
    who is not done at the second is ended.
    """
    context = get_context("spawn")
    said, go = context.Queue(), context.Event()
    with TemporaryDirectory(prefix="dpiframe-turn-") as folder:
        lock = Path(folder) / "gpu"
        processes = [context.Process(target=work, args=(job, lock, said, go), name=job.name) for job in todo]
        for p in processes:
            p.start()
        waiting, running = len(todo), {job.name for job in todo}
        try:
            while running and time.time() < end:
                if not waiting or time.time() > timed_from:
                    go.set()
                kind, value = _next(said)
                if kind == "ready":
                    waiting -= 1
                    typer.echo(f"{time.strftime('%X')} ready {value}")
                elif kind == "record":
                    yield value
                elif kind == "failed":
                    failed(value, RuntimeError(value))
                elif kind == "done":
                    running.remove(value)
                elif all(p.exitcode is not None for p in processes):
                    break
        finally:
            for p in processes:
                if p.name in running:
                    failed(p.name, TimeoutError(f"got exit code {p.exitcode}, expected it to be done in time"))
                    p.terminate()
            for p in processes:
                p.join(5)


def _next(said: Any) -> tuple[str, Any]:
    try:
        kind, value = said.get(timeout=1)
    except Empty:
        return "", None
    return kind, value
