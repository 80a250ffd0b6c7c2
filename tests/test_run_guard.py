"""What a test has started does not outlive it when it fails, nor the run however that ends; a test of a GPU says where there
is none; of a covering test enough is run. Most cases are runs of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import taken
from tests.deployments.server_process import IGNORING_SIGINT
from tests.docs.test_readme import ROOT

pytestmark = pytest.mark.bulk

# A stand-in for a server: a process in a session of its own, as Ray's are, whose parent has ended; and its state directory.
STAND_IN = """
import os, pathlib, signal, subprocess, sys, time

def start():
    code = "sleep 600 >/dev/null & echo $!"
    pid = int(subprocess.check_output(["setsid", "--fork", "--wait", "sh", "-c", code]))
    pathlib.Path(f"/tmp/dpi-{pid}-guarded").mkdir()
    pathlib.Path("pid").write_text(str(pid))
    return pid
"""
FAILS = "start(); assert False"
TIMES_OUT = "start(); signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(600)"  # pytest-timeout's own timer, brought forward
# The way of each end, the body of the test, and how pytest then ends.
ENDS = {
    "fails": (FAILS, 1),
    "times-out": (TIMES_OUT, 1),
    "passes": ("start()", 0),
    "calls-exit": ("start(); os._exit(3)", 3),
    "is-killed": ("start(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "is-told-to-end": ("start(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)", -signal.SIGTERM),
    "is-interrupted": ("start(); os.kill(os.getpid(), signal.SIGINT); time.sleep(600)", 2),
}


def run(folder: Path, code: str, *options: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """pytest over that code, in `folder`."""
    (folder / "test_it.py").write_text(code)
    plugins = [option for name in ("tests.run_plugin", "pytest_timeout", "xdist.plugin") for option in ("-p", name)]
    command = [*before, sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", str(folder), *options, "test_it.py"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False)


def wait_gone(folder: Path) -> None:
    """For the stand-in and its state directory: after a run that was killed, its guard still has to do its work."""
    pid = (folder / "pid").read_text()
    give_up = time.monotonic() + 30
    while is_running(pid) or Path(f"/tmp/dpi-{pid}-guarded").exists():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def is_running(pid: str) -> bool:
    """As what has ended but nobody asked for has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


@pytest.mark.parametrize("how", ENDS)
def test_what_a_test_started_does_not_outlive_its_run(tmp_path: Path, how: str) -> None:
    body, code = ENDS[how]
    done = run(tmp_path, f"{STAND_IN}\ndef test_it():\n    {body}\n", "-o", "timeout=300")
    assert done.returncode == code, done.stdout + done.stderr
    wait_gone(tmp_path)


@pytest.mark.parametrize("body", [FAILS, TIMES_OUT])
def test_what_a_failed_test_started_ends_before_the_next_one_and_its_modules_server_does_not(tmp_path: Path, body: str) -> None:
    code = f"""{STAND_IN}
import pytest

@pytest.fixture(scope="module")
def server():
    return start()

def test_first(server):
    {body}

def test_second(server):
    own = pathlib.Path("pid").read_text()
    assert int(own) != server
    assert not pathlib.Path(f"/tmp/dpi-{{own}}-guarded").exists()
    assert pathlib.Path(f"/tmp/dpi-{{server}}-guarded").exists()
    assert "sleep" in pathlib.Path(f"/proc/{{server}}/cmdline").read_text()
"""
    done = run(tmp_path, code, "-o", "timeout=300")
    assert re.search(r"^1 failed, 1 passed", done.stdout, re.MULTILINE), done.stdout


def test_workers_of_a_run_that_is_killed_and_what_they_started_end_with_it(tmp_path: Path) -> None:
    body = "start(); os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
    done = run(tmp_path, f"{STAND_IN}\ndef test_it():\n    {body}\n", "-n", "1")
    assert done.returncode == -signal.SIGKILL
    wait_gone(tmp_path)


@pytest.mark.parametrize("before", [(), IGNORING_SIGINT], ids=["plain", "ignoring"])
def test_what_a_test_starts_has_sigint_as_in_a_terminal(tmp_path: Path, before: tuple[str, ...]) -> None:
    """The mask of ignored signals, in hexadecimal, of a program that a test starts."""
    test = """
import signal, subprocess

def test_it():
    status = subprocess.check_output(["cat", "/proc/self/status"], text=True)
    (ignored,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:")]
    assert not ignored >> signal.SIGINT - 1 & 1
"""
    done = run(tmp_path, test, before=before)
    assert done.returncode == 0, done.stdout


OF_GPUS = """
import pytest

@pytest.mark.parametrize("each", range(3))
@pytest.mark.gpu
def test_one(each):
    pass

@pytest.mark.gpu2
def test_two():
    pass

def test_none():
    pass
"""


# In the place of torch, which would be most of each run.
NO_GPU = """
class cuda:
    is_available = staticmethod(lambda: False)

def set_num_threads(_):
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["alone", "workers"])
@pytest.mark.parametrize(
    ("option", "outcome"), [((), "1 skipped"), (("--whole",), "3 skipped"), (("--require-gpu",), "3 errors")]
)
def test_a_gpu_that_is_missing_is_told_by_the_tests_that_were_asked_for(
    tmp_path: Path, workers: tuple[str, ...], option: tuple[str, ...], outcome: str
) -> None:
    (tmp_path / "torch.py").write_text(NO_GPU)
    done = run(tmp_path, OF_GPUS, "-p", "tests.conftest", "-m", "not gpu2", "-W", "ignore", *option, *workers)
    assert re.search(f"^1 passed,.* {outcome}", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "needs 1 CUDA GPU(s) with CuPy, found 0" in done.stdout or "--require-gpu" not in option


@pytest.mark.ray
@pytest.mark.slow
def test_a_failed_test_leaves_nothing_of_dpiframe_serve(tmp_path: Path, demo_bundle: Path) -> None:
    test = f"""
from pathlib import Path
from tests.deployments.server_process import Server

def test_it():
    server = Server(Path({str(demo_bundle)!r})).wait_ready()
    Path("pid").write_text(str(server.process.pid))
    assert len(server.states()) == 1 and len(server.processes()) > 5
    assert False
"""
    done = run(tmp_path, test, "-W", "ignore")
    assert done.returncode == 1, done.stdout
    session = int((tmp_path / "pid").read_text())
    assert list(Path("/tmp").glob(f"dpi-{session}-*")) == []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert os.getsid(int(folder.name)) != session or not is_running(folder.name), (folder / "cmdline").read_text()
        except ProcessLookupError:  # it has just ended
            continue


class _Of(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(("at_once", "most"), [(1, 6), (2, 9 + 3)])
def test_of_a_covering_test_few_combinations_are_run_and_hold_every_value_or_pair(at_once: int, most: int) -> None:
    marks = [SimpleNamespace(args=(names,)) for names in ("c", ("a", "b"), "d")]
    grid = [
        dict(zip("abcd", (*ab, c, d), strict=True)) for ab, c, d in product([(1, 1), (1, 2), (2, 2)], [1, 2, 3], [False, True])
    ]
    items = [_Of(callspec=SimpleNamespace(params=one), iter_markers=lambda _: marks) for one in grid]
    run = [item.callspec.params for item in taken(items, at_once)]
    assert at_once * 3 <= len(run) <= most
    assert {(one["a"], one["b"]) for one in run} == {(1, 1), (1, 2), (2, 2)}
    assert {one["c"] for one in run} == {1, 2, 3}
    assert {one["d"] for one in run} == {False, True}
    if at_once == 2:
        assert len({(one["a"], one["b"], one["c"]) for one in run}) == 9
        assert len({(one["c"], one["d"]) for one in run}) == len({(one["a"], one["b"], one["d"]) for one in run}) == 6
