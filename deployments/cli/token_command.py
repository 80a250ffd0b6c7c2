"""The `dpiframe token` command: a token for whoever is to have it, and its line for the service's file."""

from typing import Annotated

import typer

from deployments.cli.terminal import err, one_line_errors, stdout


def token(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    scope: Annotated[list[str], typer.Option(help="What it may do: score, admin or metrics; once for each.")],
) -> None:
    """Make a token: it is shown once, on stderr; the line for the file of `access.tokens` goes to stdout."""
    with one_line_errors():
        from deployments.access.tokens import new_token

        secret, line = new_token(name, scope)
        stdout.print(line.line(), markup=False, soft_wrap=True)
        err.print(f"The token, which is kept nowhere: {secret}", markup=False, soft_wrap=True)
