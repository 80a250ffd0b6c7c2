"""The end of a private cluster is bounded in time: whatever of it is left after its patience is killed; nor outlives a process
the one that started it.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray

from deployments import processes
from deployments.direct import listener
from deployments.processes import end_without_raylet, gc_seldom, killed_after, processes_of, proxy_threads
from deployments.serve import cluster


def sleeper(state: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; sys.stdout.write('.'); sys.stdout.flush(); time.sleep(600)"],
        env={**os.environ, "STATE": f"{state}/ray"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # its environment is in place
    process.stdout.close()
    return process


def test_what_a_block_waits_for_is_killed_once_its_patience_has_ended(tmp_path):
    process, other = sleeper(tmp_path / "ours"), sleeper(tmp_path / "other")
    with killed_after(tmp_path / "ours", 0.1):
        assert process.wait(60) < 0
    assert other.poll() is None
    other.kill()
    other.wait()


def test_what_has_a_title_of_ray_in_place_of_its_environment_is_known_by_its_files(tmp_path):
    """Ray's agents have, at some starts. Somebody who follows a log is not one of them."""
    with (tmp_path / "agent.log").open("w") as log:
        started = {
            title: subprocess.Popen([title, "600"], executable="sleep", env={}, stdout=log) for title in ("ray::Agent", "tail")
        }
    try:
        for process in started.values():
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes():  # it has not become its program yet
                time.sleep(0.01)
        assert processes_of(tmp_path) == [started["ray::Agent"].pid]
        assert processes_of(tmp_path / "other") == []
        with killed_after(tmp_path):
            pass
        assert started["ray::Agent"].wait(60) < 0
        assert started["tail"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_short_block_leaves_running_is_killed_at_its_end(tmp_path, fails):
    process = sleeper(tmp_path)
    try:
        with killed_after(tmp_path, 600):
            assert process.poll() is None
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert process.wait(60) < 0


def test_a_ray_that_does_not_start_is_ended_and_started_once_more(tmp_path, monkeypatch):
    begun = []

    def init(**settings: str) -> None:
        begun.append((sleeper(tmp_path), settings))
        if len(begun) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    port = cluster._start_ray(tmp_path, None, 20_000, address="local")
    (first, taken), (second, settings) = begun
    assert (first.wait(60) < 0, second.poll(), taken["_metrics_export_port"] != port) == (True, None, True)
    assert settings == {"address": "local", "_metrics_export_port": port}
    monkeypatch.setattr(ray, "init", lambda **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cluster._start_ray(tmp_path, 9, 20_000, address="local")
    assert second.wait(60) < 0


def test_a_worker_whose_raylet_is_killed_ends_a_while_later_and_not_before(tmp_path):
    (tmp_path / "raylet").symlink_to(sys.executable)  # a program is called as its file
    child = "import os, time; from deployments import processes; processes._ORPHAN_S = 0.5; processes.end_without_raylet();"
    child += "print(os.getpid(), flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    raylet = subprocess.Popen([tmp_path / "raylet", "-c", parent], stdout=subprocess.PIPE)
    assert raylet.stdout is not None
    pid = int(raylet.stdout.readline())
    time.sleep(1.5)
    assert Path(f"/proc/{pid}").exists()
    killed = time.monotonic()
    raylet.kill()
    raylet.wait()
    assert raylet.stdout.read() == b""  # to its end, which is the worker's: it has the pipe
    assert time.monotonic() - killed >= 0.5
    raylet.stdout.close()


def test_a_process_that_no_raylet_has_started_watches_nobody():
    before = {*threading.enumerate()}  # of which some may just end
    end_without_raylet()
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (16, 6), (64, 24), (192, 64)])
def test_haproxy_has_three_threads_for_eight_cores_but_not_more_than_it_takes(cores: int, threads: int) -> None:
    assert proxy_threads(cores) == threads


ROOM = """
import resource, subprocess, sys
from deployments.processes import make_room_for_descriptors
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
make_room_for_descriptors()
make_room_for_descriptors()  # it has it already
places = lambda status: int(status.partition("FDSize:")[2].split()[0])
child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
print(places(open("/proc/self/status").read()), places(child), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [10_000, 1_000])
def test_a_process_and_what_it_starts_have_places_for_all_their_connections_at_once(hard):
    """FDSize: of the kernel's table. A host may allow fewer."""
    said = subprocess.run([sys.executable, "-c", ROOM, str(hard)], capture_output=True, text=True, check=True).stdout
    own, child, soft, left = map(int, said.split())
    assert min(own, child) >= min(hard, 8_704)
    assert (soft, left) == (64, hard)  # a limit is the user's


def test_there_are_places_for_the_connections_of_both_listeners_of_a_process():
    assert processes._DESCRIPTORS >= 2 * listener._MOST_CONNECTIONS + listener._OTHER_DESCRIPTORS


def test_a_process_that_begins_looks_for_garbage_seldom_but_it_does():
    before = gc.get_threshold()
    try:
        gc_seldom()
        assert gc.isenabled()
        assert all(now > own > 0 for now, own in zip(gc.get_threshold(), (700, 10, 10), strict=True))
    finally:
        gc.set_threshold(*before)
