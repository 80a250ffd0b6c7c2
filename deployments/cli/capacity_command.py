"""The `dpiframe capacity` command: how many nodes, GPUs and ingresses a load needs."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.capacity import Form, Load, Topology, Way, plan
from deployments.cli.terminal import one_line_errors, stdout


def capacity(
    rows_per_s: Annotated[float, typer.Option(help="Candidates to score a second, of all requests, at the peak.")],
    candidates: Annotated[int, typer.Option(help="Of one request.")],
    deadline_ms: Annotated[float | None, typer.Option(help="That p99 must keep; else the most that was measured.")] = None,
    headroom: Annotated[float, typer.Option(help="The share of a measured load that no node is to be given.")] = 0.3,
    spare: Annotated[int, typer.Option(min=0, help="Nodes that may be gone.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 1,
    topology: Annotated[Topology | None, typer.Option(help="Else the one with fewer nodes.")] = None,
    form: Annotated[Form, typer.Option(help="Of the bodies: ids or raw values (binary, bytes), JSON, or Arrow.")] = "binary",
    way: Annotated[Way, typer.Option(help="Into the service: Ray Serve's HAProxy, or past it.")] = "haproxy",
    machine: Annotated[str, typer.Option(help="Whose figures: a folder of benchmarks/results.")] = "h200",
    record: Annotated[
        Path | None, typer.Option(help="Or those of your own run of `python -m benchmarks serving` or `request-budget`.")
    ] = None,
) -> None:
    """Plan how many nodes, GPUs and ingresses a load needs, from loads that were measured."""
    with one_line_errors():
        from deployments.cli.capacity_points import OURS, read_points
        from dpiframe_core.errors import InputError

        points = read_points(record or OURS)
        if record is None:
            machines = sorted({p.source.split("/")[2] for p in points})
            points = [p for p in points if p.source.split("/")[2] == machine]
            if not points:
                raise InputError("machine", machine, f"one of {', '.join(machines)}")
        load = Load(rows_per_s, candidates, deadline_ms, headroom, spare, gpus_per_node, topology, form, way)
        stdout.print(plan(load, points).report(), markup=False, soft_wrap=True)
