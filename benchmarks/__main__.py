"""`python -m benchmarks SUITE`: measures side by side and writes `benchmarks/results/<machine>/<suite>.json`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.apart.commands import app as apart_app
from benchmarks.device.commands import app as device_app
from benchmarks.gpus.commands import app as gpus_app
from benchmarks.serving.commands import app as serving_app
from benchmarks.serving.stages.commands import app as stages_app
from benchmarks.serving.stalls.commands import app as stalls_app
from deployments.signals import interrupted_by_sigterm

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(device_app)  # their commands stand beside `report`
app.add_typer(apart_app)
app.add_typer(gpus_app)
app.add_typer(serving_app)
app.add_typer(stages_app)
app.add_typer(stalls_app)


@app.command()
def report(
    folder: Annotated[
        Path | None, typer.Argument(help="a machine's results; default: of every machine, and both pages")
    ] = None,
) -> None:
    """Writes each machine's RESULTS.md and plots, README's table and picture, docs/performance*.md, and the figures of
    `dpiframe capacity`, from the JSON alone."""
    from benchmarks.records import capacity_figures
    from benchmarks.report import pages, results_page

    if folder:
        typer.echo(results_page.write(folder))
        return
    for page in pages.write():
        typer.echo(page)
    capacity_figures.write()


if __name__ == "__main__":
    with interrupted_by_sigterm():  # whoever ends this one ends the services that it has started
        app()
