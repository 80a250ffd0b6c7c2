"""The command of suite `serving_stages`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.records.run import Append, Device, Names, Out, Run, Seconds, names_in, numbers_in
from dpiframe_core.engine.options import DEFAULT_PRECISION
from kernels.runtime.cores import usable_cores

app = typer.Typer()


@app.command()
def serving_stages(
    bundle: Path = Path("models/demo"),
    system: Annotated[str, typer.Option(help="dpiframe or dpiframe-fanin")] = "dpiframe-fanin",
    forms: Names = "binary,bytes,columns,arrow",
    candidates: Names = "32,100,270,1000",
    connections: Annotated[str, typer.Option(help="closed loop: clients at once, one after the other")] = "128",
    ways: Names = "haproxy,direct",
    ingress: Annotated[int, typer.Option(help="ingress replicas; 0: half the cores")] = 0,
    perf: Annotated[str, typer.Option(help="Linux's perf")] = "perf",
    load_processes: int = 1,
    device: Device = "auto",
    seconds: Seconds = 2.0,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """CPU time a request by stage, user and system apart: needs Linux's perf, and Python 3.12."""
    from benchmarks.serving import request_budget
    from benchmarks.serving.stages import stages

    run = Run("serving_stages", device, seed, out, append)
    plan = request_budget.Plan(
        bundle=bundle, device=run.device.type, precision=DEFAULT_PRECISION[run.device.type], system=system,
        ingress=ingress or max(2, usable_cores() // 2), forms=names_in(forms), candidates=numbers_in(candidates),
        connections=numbers_in(connections), offered=(), ways=names_in(ways),
        load_processes=load_processes, seconds=seconds, seed=seed,
    )  # fmt: skip
    run.finish(stages.run(plan, perf, typer.echo))
