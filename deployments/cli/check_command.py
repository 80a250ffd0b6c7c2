"""`dpiframe check-config`: what is wrong with configuration files, and with the files that they name."""

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.terminal import err, stdout


def check_config(
    files: Annotated[list[Path], typer.Argument(help="Deployment YAML files.")],
    no_files: Annotated[
        bool, typer.Option("--no-files", help="Do not look at bundles, tokens, certificates: the service runs elsewhere.")
    ] = False,
) -> None:
    """Check configuration files, and what they name on this machine, without starting anything."""
    from deployments.config import read_config
    from deployments.preflight.named_files import faults_of_files
    from dpiframe_core.errors import ConfigError

    lines: list[str] = []
    for file in files:
        try:
            config = read_config(file)
            faults = [] if no_files else [f"{file}: {fault}" for fault in faults_of_files(config)]
        except ConfigError as error:
            faults = [str(error)]
        lines += faults
        if not faults:
            stdout.print(f"{file}: ok" + ", without its files" * no_files, soft_wrap=True)
    for line in lines:
        err.print(line, markup=False, soft_wrap=True)
    if lines:
        raise typer.Exit(1)
