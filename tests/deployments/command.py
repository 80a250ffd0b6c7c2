"""`dpiframe` within the test's process, which has torch already: that import is most of what a short command costs.

The tests of the README and of some pages (tests/docs) start commands as a user does.
"""

import contextlib
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from deployments.cli.main import app


def dpiframe_here(*args: str, cwd: Path = Path()) -> "subprocess.CompletedProcess[str]":
    """Status and streams, as of a process in `cwd`; what is no error of the command's is raised."""
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, args)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(args, done.exit_code, done.stdout, done.stderr)
