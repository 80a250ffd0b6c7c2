"""Suite `latency` with a process a model: all of them compile their peers side by side, then one after the other is timed.

What Inductor compiles takes minutes of a CPU a model. On a machine that is lent by the minute sixteen cores do that at once,
while each kernel that Inductor or our warm-up times has its GPU to itself (`GpuTurn`), of which there may be several. Cells are
timed when the compilers are done, one of all at a time.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import typer

from benchmarks.apart.latency_job import At, Job, work
from benchmarks.records.earlier_peers import of_file
from benchmarks.records.record import Record
from benchmarks.systems.cells import Failed
from benchmarks.systems.names import WITH_CONTEXTS

_VISIBLE = "CUDA_VISIBLE_DEVICES"
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
    compiled: bool = True,
    eager: bool = True,
    descent: bool = True,
    peers: Mapping[tuple[str, At], bool] | None = None,
    gpus: int = 1,
) -> list[Job]:
    """One a model; one a number of contexts where rows share features.

    Args:
        gpus: of the host, over which jobs are spread.
        peers: by model, of cells that have a compiled peer: whether Inductor's whole search found it. Those are left out.
    """
    found: list[Job] = []
    job = partial(
        Job, seconds=seconds, seed=seed, search_until=search_until, prepare_until=prepare_until, compiled=compiled, eager=eager,
        descent=descent,
    )  # fmt: skip
    for model in models:
        had = {at: searched for (name, at), searched in (peers or {}).items() if name == model}
        for n in contexts if model in WITH_CONTEXTS else (1,):
            rows = [b for b in sorted(batches, key=lambda b: ORDER.index(b) if b in ORDER else len(ORDER)) if n <= b]
            cells = tuple(at for b in rows for p in precisions if not had.get(at := (p, b, n), False))
            if cells:
                found.append(job(model, cells, known=frozenset(had), gpu=len(found) % gpus if gpus > 1 else None))
    return found


def peers_in(folder: Path) -> dict[tuple[str, At], bool]:
    """What `jobs` takes as `peers`, by the result files of a folder."""
    found: dict[tuple[str, At], bool] = {}
    for file in folder.glob("latency*.json"):
        for r in [r for run in of_file(json.loads(file.read_text())) for r in run["records"]]:
            key = r["model"], (r["precision"], r["batch"], r["cell"].get("contexts", 1))
            found[key] = found.get(key, False) or not r.get("products")
    return found


def run(todo: Sequence[Job], failed: Failed, *, timed_from: float, end: float) -> Iterator[Record]:
    """Yields records as they come. timed_from, end: seconds of the epoch; who is not ready at the first is timed when it is,
    who is not done at the second is ended.
    """
    # Each job's Inductor compiles in processes of its own, as many as the host has cores if it is not told.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, 3 * (os.cpu_count() or 1) // max(1, len(todo)))))
    context = get_context("spawn")
    said, go = context.Queue(), context.Event()
    with TemporaryDirectory(prefix="dpiframe-turn-") as folder:
        processes = [context.Process(target=work, args=(job, Path(folder), said, go), name=job.name) for job in todo]
        for job, p in zip(todo, processes, strict=True):
            with patch.dict(os.environ, seen(job.gpu)):
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


def seen(gpu: int | None) -> dict[str, str]:
    """The environment of who is to see this one alone of the GPUs that this process does; None: all of them."""
    if gpu is None:
        return {}
    given = os.environ.get(_VISIBLE)
    return {_VISIBLE: given.split(",")[gpu] if given else str(gpu)}


def _next(said: Any) -> tuple[str, Any]:
    try:
        kind, value = said.get(timeout=1)
    except Empty:
        return "", None
    return kind, value
