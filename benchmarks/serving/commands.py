"""The commands of the suites that start whole servers."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.records.run import Append, Device, Names, Out, Run, Seconds, names_in, numbers_in, shares_in
from dpiframe_core.engine.options import DEFAULT_PRECISION
from kernels.runtime.cores import usable_cores

app = typer.Typer()
_OURS = "dpiframe,dpiframe-fanin,dpiframe-direct,dpiframe-fanin-direct,dpiframe-unix"


@app.command()
def serving(
    bundle: Path = Path("models/demo"),
    hidden: Annotated[str, typer.Option(help="widths of random dense layers in place of the bundle's, to load a GPU")] = "",
    systems: Names = f"{_OURS},ray-serve,uvicorn,mosec,mosec-2,litserve,bentoml,triton",
    forms: Names = "binary,columns,rows",
    candidates: Names = "32,100,270,1000",
    connections: Annotated[str, typer.Option(help="closed loop: clients at once, one after the other")] = "1,16,64",
    offered: Annotated[str, typer.Option(help="open loop: shares of the best closed-loop rate")] = "0.25,0.5,0.75,0.9",
    rates: Annotated[str, typer.Option(help="open loop: requests a second besides")] = "",
    gpus: Annotated[str, typer.Option(help="replicas of ours, one run each; a GPU each on a GPU machine")] = "1",
    ingress: Annotated[int, typer.Option(help="fan-in: ingress replicas for each engine; 0: half the cores a GPU")] = 0,
    cores_a_gpu: Annotated[int, typer.Option(help="that a GPU's server and load have; 0: all, however many GPUs run")] = 0,
    load_processes: Annotated[int, typer.Option(help="of the load generator; 0: one for each eight cores")] = 0,
    peer_python: Annotated[str, typer.Option(help="PATH,NAME=PATH: interpreters that have the peers, or one of them")] = "",
    stages: Annotated[bool, typer.Option(help="where a request's time goes, first")] = True,
    turns: Annotated[int, typer.Option(help="how often each system is measured, all in turn; the middle one is kept")] = 1,
    device: Device = "auto",
    seconds: Seconds = 2.0,
    budget: Annotated[float, typer.Option(help="seconds after which nothing new is begun")] = 3600,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Whole servers, client to client: ours in both topologies, and those of others over the same model and requests."""
    from benchmarks.serving import lone_request
    from benchmarks.serving import serving as serving_suite

    run = Run("serving", device, seed, out, append)
    here, counts = usable_cores(), numbers_in(gpus)
    plan = serving_suite.Plan(
        bundle=bundle, hidden=numbers_in(hidden), device=run.device.type, precision=DEFAULT_PRECISION[run.device.type],
        systems=names_in(systems), forms=names_in(forms), candidates=numbers_in(candidates),
        connections=numbers_in(connections), offered=shares_in(offered),
        rates=[float(x) for x in names_in(rates)], gpus=counts,
        ingress=ingress or max(2, here // 2 // max(counts)), cores=cores_a_gpu,
        load_processes=load_processes or max(1, here // 8),
        peer_python=peer_python, seconds=seconds, budget_s=budget, seed=seed, turns=turns,
    )  # fmt: skip
    profile = lone_request.run(bundle, plan.device, plan.forms, plan.candidates, seed) if stages and not hidden else ()
    run.finish(chain(profile, serving_suite.run(plan, run.failed, typer.echo)))


@app.command()
def request_budget(
    bundle: Path = Path("models/demo"),
    system: Annotated[str, typer.Option(help="dpiframe or dpiframe-fanin")] = "dpiframe-fanin",
    forms: Names = "binary,bytes,columns,arrow",
    candidates: Names = "32,100,270,1000",
    connections: Annotated[str, typer.Option(help="closed loop: clients at once, one after the other")] = "16,64",
    offered: Annotated[str, typer.Option(help="open loop: shares of the best closed-loop rate")] = "",
    ways: Names = "haproxy,direct",
    ingress: Annotated[int, typer.Option(help="ingress replicas; 0: half the cores")] = 0,
    load_processes: int = 1,
    device: Device = "auto",
    seconds: Seconds = 3.0,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """CPU time a request of each of our processes, by HAProxy and by the direct port; and what clients see under load."""
    from benchmarks.serving import request_budget as budget

    run = Run("request_budget", device, seed, out, append)
    plan = budget.Plan(
        bundle=bundle, device=run.device.type, precision=DEFAULT_PRECISION[run.device.type], system=system,
        ingress=ingress or max(2, usable_cores() // 2), forms=names_in(forms), candidates=numbers_in(candidates),
        connections=numbers_in(connections), offered=shares_in(offered), ways=names_in(ways),
        load_processes=load_processes, seconds=seconds, seed=seed,
    )  # fmt: skip
    run.finish(budget.run(plan, typer.echo))


@app.command()
def autoscaling(
    bundle: Path = Path("models/demo"),
    topology: Annotated[str, typer.Option(help="colocated or fanin")] = "colocated",
    most: Annotated[int, typer.Option(help="replicas; on a GPU machine at most its GPUs")] = 2,
    ingress: Annotated[int, typer.Option(help="fan-in: ingress replicas in all")] = 4,
    candidates: int = 1000,
    rates: Annotated[
        str, typer.Option(help="offered requests a second, low and high; 0: 0.1 and 0.6 of what one replica does")
    ] = "0",
    target_busy: Annotated[float, typer.Option(help="of the policy; low, so that little load is enough to show it")] = 0.3,
    seconds: Annotated[float, typer.Option(help="of each of the three phases: low, high, low")] = 40.0,
    down_after: Annotated[float, typer.Option(help="seconds without need until replicas go")] = 10.0,
    load_processes: int = 1,
    device: Device = "auto",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Replicas under an offered load that rises and falls: how many there are, and what clients see meanwhile."""
    from benchmarks.serving import scaling

    run = Run("autoscaling", device, seed, out, append)
    plan = scaling.Plan(
        bundle=bundle, device=run.device.type, topology=topology, most=most, ingress=ingress, candidates=candidates,
        rates=[float(rate) for rate in names_in(rates)], target_busy=target_busy, seconds=seconds, down_after_s=down_after,
        load_processes=load_processes, seed=seed,
    )  # fmt: skip
    run.finish(scaling.run(plan, typer.echo))


@app.command()
def soak(
    bundle: Path = Path("models/demo"),
    topology: Annotated[str, typer.Option(help="colocated or fanin")] = "colocated",
    replicas: int = 1,
    ingress: Annotated[int, typer.Option(help="fan-in: ingress replicas for each engine")] = 2,
    direct: Annotated[bool, typer.Option(help="past HAProxy, on the direct port")] = False,
    candidates: int = 100,
    minutes: float = 20.0,
    load: Annotated[float, typer.Option(help="share of the most that it answers")] = 0.7,
    load_processes: int = 1,
    device: Device = "auto",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """A service under steady load: fails if what any process holds grows, or a request fails. Writes its record each minute."""
    from benchmarks.serving import soak as soak_suite

    run = Run("soak", device, seed, out, append)
    plan = soak_suite.Plan(
        bundle=bundle, device=device, topology=topology, replicas=replicas, ingress=ingress, candidates=candidates,
        minutes=minutes, share=load, load_processes=load_processes, direct=direct, seed=seed,
    )  # fmt: skip
    findings: list[str] = []
    for record in soak_suite.run(plan, typer.echo):
        run.add(record)
        findings = record["findings"]
        typer.echo(f"{record['answered']} answered, {record['failed'] or 'none'} failed, passed: {record['passed']}")
    for finding in findings:
        typer.echo(f"FAILED {finding}", err=True)
    if findings:
        raise typer.Exit(1)


@app.command()
def http(
    bundle: Path = Path("models/demo"),
    rows: int = 100,
    clients: Names = "1,16",
    seconds: float = 8.0,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """The endpoint against uvicorn + FastAPI with the eager model, client to client."""
    from benchmarks.serving import http as http_suite

    run = Run("http", "auto", seed, out, append)
    run.finish(http_suite.run(bundle, rows, numbers_in(clients), seconds, seed))


@app.command()
def score(
    dims: Names = "8,16",
    rows: int = 2_000_000,
    repeats: int = 3,
    device: Device = "auto",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Offline: Parquet of encoded ids to Parquet of scores, through all of `dpiframe score`."""
    from benchmarks.serving import offline_scoring as score_suite

    run = Run("score", device, seed, out, append)
    run.finish(score_suite.run(numbers_in(dims), rows, run.device, run.failed, repeats=repeats, seed=seed))
