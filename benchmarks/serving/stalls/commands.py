"""The command of suite `stalls`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.records.run import Append, Device, Names, Out, Run, Seconds, names_in, shares_in
from dpiframe_core.engine.options import DEFAULT_PRECISION
from kernels.runtime.cores import usable_cores

app = typer.Typer()


@app.command()
def stalls(
    bundle: Path = Path("models/demo"),
    system: Annotated[str, typer.Option(help="dpiframe or dpiframe-fanin")] = "dpiframe-fanin",
    candidates: int = 100,
    connections: Annotated[int, typer.Option(help="that the load is spread over")] = 128,
    offered: Annotated[str, typer.Option(help="open loop: shares of the highest closed-loop rate")] = "0.25,0.5,0.75,0.9",
    ways: Names = "haproxy,direct",
    beside: Annotated[str, typer.Option(help="comma-separated: what goes on beside it; all but `load ahead` by default")] = "",
    ingress: Annotated[int, typer.Option(help="ingress replicas; 0: a quarter of the cores")] = 0,
    turns: Annotated[int, typer.Option(help="how often each is measured, all in turn; the middle one is kept")] = 3,
    load_processes: int = 1,
    device: Device = "auto",
    seconds: Seconds = 4.0,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """What the slowest requests wait for: offered load with and without the collector, Ray's processes, reloads, and more."""
    from benchmarks.serving.stalls import stalls as stalls_suite

    run = Run("stalls", device, seed, out, append)
    plan = stalls_suite.Plan(
        bundle=bundle, device=run.device.type, precision=DEFAULT_PRECISION[run.device.type], system=system,
        ingress=ingress or max(1, usable_cores() // 4), candidates=candidates, connections=connections,
        offered=shares_in(offered), ways=names_in(ways), beside=stalls_suite.known(names_in(beside)), turns=turns,
        load_processes=load_processes,
        seconds=seconds, seed=seed,
    )  # fmt: skip
    run.finish(stalls_suite.run(plan, typer.echo))
