"""The commands about a bundle's tables: `dpiframe compress` makes them smaller, `dpiframe plan` says where their rows go."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cli.terminal import BundlePath, Device, Splitter, by_feature, one_line_errors, stdout


def compress(
    bundle: BundlePath,
    out: Annotated[Path, typer.Option("-o", "--out", help="The directory of the new bundle.")],
    table_dtype: Annotated[
        Literal["int8", "float16", "bfloat16"] | None, typer.Option(help="What to store the tables in.")
    ] = None,
    prune: Annotated[float | None, typer.Option(help="The share of each table's rows to drop, those read least.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A table to change, once for each; all by default.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A file of raw rows, for --prune to count ids; else by their order.")
    ] = None,
    rows: Annotated[Path | None, typer.Option(help="A file of raw rows with labels, for AUC and log-loss.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="Its column of 0 and 1; once a task.")] = None,
    splitter: Splitter = None,
) -> None:
    """Write a copy of a bundle whose tables take fewer bytes; prints how far its scores are off."""
    if table_dtype is None and prune is None:
        raise typer.BadParameter("expected --table-dtype, --prune or both")
    if prune is not None and not 0 < prune < 1:
        raise typer.BadParameter(f"--prune: got {prune}, expected a share between 0 and 1")
    if trace is not None and prune is None:
        raise typer.BadParameter("--trace belongs to --prune")
    if (rows is None) != (not label):
        raise typer.BadParameter("expected both --rows and --label, or neither")
    separators = by_feature(splitter)
    with one_line_errors():
        from deployments.cli.tables.compress_command import CompressJob, write_compressed

        job = CompressJob(bundle, out, table_dtype, prune, tuple(only or ()), trace, rows, tuple(label or ()), separators)
        stdout.print(write_compressed(job).report(), markup=False, soft_wrap=True)


def plan(
    bundle: BundlePath,
    hbm_gib: Annotated[float, typer.Option(min=0, help="Of each GPU, for tables.")],
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="That read each other's memory.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="A file of rows, as `score` takes it, to count reads in.")] = None,
    zipf: Annotated[float | None, typer.Option(help="Or an exponent to estimate reads by.  [default: 1.05]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the lookup whose time is told.")] = 1000,
    links: Annotated[str | None, typer.Option(metavar="LOCAL,PEER,HOST", help="GB/s, or a measured file; else H200's.")] = None,
    host_gib: Annotated[float | None, typer.Option(min=0, help="Of the host, for other rows; else it holds all.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The directory to write the placement to.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also run the lookup, on the device at hand.")] = False,
    device: Device = None,
) -> None:
    """Plan which rows of the tables go to every GPU, to one, to host memory, or stay in files; prints the predicted time."""
    if trace is not None and zipf is not None:
        raise typer.BadParameter("expected --trace or --zipf, not both")
    if device and not measure:
        raise typer.BadParameter("--device says where to --measure, which was not asked for")
    with one_line_errors():
        from deployments.cli.tables.measured_links import parse_links
        from deployments.cli.tables.plan_command import write_plan

        made = write_plan(bundle, gpus, hbm_gib, trace, 1.05 if zipf is None else zipf, parse_links(links), out, host_gib)
        stdout.print(made.report(batch), markup=False, soft_wrap=True)
        if measure:
            from deployments.cli.tables.plan_measure import measured

            stdout.print(measured(made, bundle, trace, batch, device or "auto"), markup=False, soft_wrap=True)
