"""What a killed launcher has left is ended by the next one; what another one holds, or knows no lock, is not."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deployments.serve import host


@contextmanager
def of(state: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process whose environment names a file of that state."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, "SOCKET": f"{state}/haproxy/a"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_processes_of_a_state_that_nobody_holds_are_killed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_STATES", tmp_path)
    with ExitStack() as stack:
        left, kept, unknown = (tmp_path / f"dpi-{name}" for name in ("1-left", "2-kept", "3-unknown"))
        running = {}
        for state in (left, kept, unknown):
            state.mkdir()
            running[state] = stack.enter_context(of(state))
        with host.held(left):
            host.end_leftovers()
            assert [process.poll() for process in running.values()] == [None] * 3
        stack.enter_context(host.held(kept))
        host.end_leftovers()
        assert running[left].wait(10) == -9
        assert [running[state].poll() for state in (kept, unknown)] == [None] * 2
        assert left.exists()


HOLDS = """
import socket, sys, time
held = bytearray(200 << 20)
held[::4096] = b"x" * (len(held) // 4096)
with socket.create_server(("127.0.0.1", 0)) as port:
    print(port.getsockname()[1], flush=True)
    time.sleep(60)
"""


def test_the_ports_of_what_was_left_are_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees a killed process's memory before its sockets, and forgets its environment before either."""
    monkeypatch.setattr(host, "_STATES", tmp_path)
    left = tmp_path / "dpi-1-left"
    left.mkdir()
    with host.held(left):
        pass
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", HOLDS], env={**os.environ, "SOCKET": f"{left}/a"}, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            host.end_leftovers()
            with socket.create_server(("127.0.0.1", port)):
                pass
