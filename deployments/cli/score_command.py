"""The `dpiframe score` command: its options, and a progress bar on stderr."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from deployments.cli.terminal import BundlePath, Device, Precision, Splitter, by_feature, err, one_line_errors, stdout
from deployments.signals import interrupted_by_sigterm


def score(
    bundle: BundlePath,
    rows: Annotated[Path, typer.Argument(metavar="INPUT", help="A .csv, .tsv, .parquet or .jsonl file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The Parquet file to write.")],
    label: Annotated[list[str] | None, typer.Option(help="A column of 0 and 1, for AUC and log-loss; once a task.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A column to write beside the scores, once each; else all.")] = None,
    splitter: Splitter = None,
    encoded: Annotated[bool, typer.Option("--encoded", help="The Parquet columns hold ids, not raw values.")] = False,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="This process, or Ray Data on a cluster.")] = "local",
    workers: Annotated[int | None, typer.Option(min=1, max=1000, help="Of the ray engine.")] = None,
    address: Annotated[str | None, typer.Option(help="Of an existing Ray cluster; else a private one.")] = None,
    device: Device = None,
    precision: Precision = None,
) -> None:
    """Score a file of rows into a Parquet file."""
    if engine != "ray" and (workers or address):
        raise typer.BadParameter("--workers and --address belong to --engine ray")
    separators = by_feature(splitter)
    # Before torch is imported: its threads would spin between layers, on the cores that read and write.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with one_line_errors(), interrupted_by_sigterm():
        from deployments.offline.score_job import ScoreJob

        kept = None if keep is None else tuple(keep)
        job = ScoreJob(bundle, rows, out, kept, tuple(label or ()), separators, encoded, device or "auto", precision)
        with _progress_bar() as progress:
            if engine == "ray":
                from deployments.offline.ray_scoring import score_on_cluster

                report = score_on_cluster(job, progress, workers or 1, address)
            else:
                from deployments.offline.file_scoring import score_file

                report = score_file(job, progress)
        stdout.print(report.text(), markup=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[float | None, int], None]]:
    """A bar on stderr while the block runs, if that is a terminal; to be told the part that is done and the rows so far."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(),
        TextColumn("{task.fields[rows]:,} rows, {task.fields[rate]:,.0f} a second"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("Loading", total=None, rows=0, rate=0.0)

        def show(done: float | None, rows: int) -> None:
            if not bar.tasks[task].fields["rows"]:
                bar.reset(task, description="Scoring", total=None if done is None else 1.0)
            rate = rows / max(bar.tasks[task].elapsed or 0.0, 1e-3)
            bar.update(task, completed=done, rows=rows, rate=rate)

        yield show
