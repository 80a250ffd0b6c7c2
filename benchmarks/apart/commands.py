"""The commands that measure with a process a model."""

import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.apart import imported as imported_suite
from benchmarks.apart import latency_apart as apart_suite
from benchmarks.records.run import Append, Device, Names, Out, Run, Seconds, names_in, numbers_in
from benchmarks.systems.names import BATCHES, CONTEXTS
from benchmarks.workloads.imported import SETTINGS
from benchmarks.workloads.imported_specs import SPECS
from benchmarks.workloads.models import MODELS

app = typer.Typer()
_MODELS, _IMPORTED = ",".join(MODELS), ",".join((*SETTINGS, *SPECS))
_BATCHES, _CONTEXTS = (",".join(map(str, sizes)) for sizes in (BATCHES, CONTEXTS))


@app.command()
def latency_apart(
    models: Names = _MODELS,
    precisions: Names = "bf16,tf32",
    batches: Names = _BATCHES,
    contexts: Names = _CONTEXTS,
    search: Annotated[float, typer.Option(help="seconds from now after which no search of Inductor's begins")] = 200,
    timed: Annotated[float, typer.Option(help="seconds from now after which cells are timed, whoever is not ready")] = 230,
    late: Annotated[float, typer.Option(help="seconds from now after which who is not ready leaves its other cells out")] = 265,
    limit: Annotated[float, typer.Option(help="seconds from now after which what still runs is ended")] = 330,
    seconds: Seconds = 0.12,
    compiled: Annotated[bool, typer.Option(help="compile peers; without, those of earlier runs stand")] = True,
    eager: Annotated[bool, typer.Option(help="time eager PyTorch too")] = True,
    descent: Annotated[bool, typer.Option(help="coordinate descent, a part of Inductor's max-autotune")] = True,
    lacking: Annotated[
        Path | None,
        typer.Option(
            help="folder of results: leave out cells with a peer of a whole search there, and begin with those that have none"
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="of this host, over which models are spread to be compiled")] = 1,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Whole models, host to host, beside eager and both captured peers: compiled side by side, timed one after the other."""
    now = time.time()
    run = Run("latency", "cuda", seed, out, append)
    todo = apart_suite.jobs(
        names_in(models), names_in(precisions), numbers_in(batches), numbers_in(contexts),
        seconds=seconds, seed=seed, search_until=now + search, prepare_until=now + late, compiled=compiled,
        eager=eager, descent=descent,
        peers=apart_suite.peers_in(lacking) if lacking else None, gpus=gpus,
    )  # fmt: skip
    run.finish(apart_suite.run(todo, run.failed, timed_from=now + timed, end=now + limit))


@app.command()
def imported(
    models: Names = _IMPORTED,
    precisions: Names = "default",
    batches: Names = "256,1024",
    processes: Annotated[int, typer.Option(help="models that are prepared side by side")] = 8,
    limit: Annotated[float, typer.Option(help="seconds from now after which no model begins")] = 400,
    seconds: Seconds = 0.12,
    device: Device = "auto",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Models of the libraries, each as `dpiframe import` makes it: its time host to host and what it runs as."""
    run = Run("imported", device, seed, out, append)
    run.finish(imported_suite.run(
        names_in(models), names_in(precisions), numbers_in(batches), run.device, run.failed,
        seconds=seconds, seed=seed, processes=processes, limit_s=limit,
    ))  # fmt: skip
