"""Kills what a test run has left running. As a program, `run_guard.py PID RUN SESSION`, when that process, the run, has ended.

Ray's and HAProxy's processes leave the group of who started them, and may outlive it, but they hand its environment on: it has
the mark of the run, and pytest's name of the test. Some of Ray's write their title over it; they are children of others, or in
a session with them.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "DPIFRAME_TEST_RUN"  # the runs that a process belongs to, with a space between: a test may itself start pytest
_STATES = Path("/tmp")  # where a cluster that process P has started keeps its files, in dpi-P-*
_ROUNDS = 100  # of killing: a process may be forked while others are looked up


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    session: int
    environment: Sequence[str]

    def belongs_to(self, run: str, variable: str) -> bool:
        runs = next((v.partition("=")[2].split() for v in self.environment if v.startswith(f"{MARK}=")), [])
        return run in runs and (not variable or variable in self.environment)


def processes() -> list[Process]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            _, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            environment = os.fsdecode((folder / "environ").read_bytes()).split("\0")
            found.append(Process(int(folder.name), int(parent), int(session), environment))
    return found


def kill_started(run: str, own_session: int, variable: str = "") -> None:
    """Kills the processes of a run that is in that session; with a variable, NAME=VALUE, those alone that have it too."""

    def started() -> set[int]:
        running = processes()
        marked = [p for p in running if p.belongs_to(run, variable)]
        # A session is left by nobody but who begins another, so that all in it come from this run if one does.
        sessions = {p.session for p in marked} - {own_session}
        found = {p.pid for p in running if p in marked or p.session in sessions}
        while children := {p.pid for p in running if p.parent in found} - found:
            found |= children
        return found - {os.getpid()}

    kill_all(started)


def kill_all(running: Callable[[], set[int]]) -> None:
    """Kills those that are running until there are none, and removes their clusters' files."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        if not (found := running()):
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        time.sleep(0.01)
    for pid in killed:
        for state in _STATES.glob(f"dpi-{pid}-*"):
            shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    watched, name, its_session = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(watched)], [], [])
    kill_started(name, its_session)
