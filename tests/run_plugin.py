"""What every run of pytest does here: it ends what its tests leave running, and has SIGINT as a terminal would.

A failed test's own processes are killed at once; those of its fixtures are theirs to end. All that is left is killed after the
run, by run_guard.py if the run itself was.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator

import pytest

from tests import run_guard

_RUN = pytest.StashKey[str]()
_GUARD = pytest.StashKey["subprocess.Popen[bytes]"]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RUN] = run = f"{os.getpid()}-{secrets.token_hex(4)}"
    # It starts without this run's mark, as it outlives the run, and in a session of its own, as Ctrl-C is for the run alone.
    config.stash[_GUARD] = subprocess.Popen(
        [sys.executable, "-S", "-E", run_guard.__file__, str(os.getpid()), run, str(os.getsid(0))],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.environ[run_guard.MARK] = f"{os.environ.get(run_guard.MARK, '')} {run}"
    # What nohup or a script's & has started ignores SIGINT and hands that on to what it starts; a handler it does not.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and report.failed:
        run_guard.kill_started(item.config.stash[_RUN], os.getsid(0), f"PYTEST_CURRENT_TEST={item.nodeid} (call)")
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    run_guard.kill_started(config.stash[_RUN], os.getsid(0))
    config.stash[_GUARD].kill()
    config.stash[_GUARD].wait()
