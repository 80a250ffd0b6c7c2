"""When a soak says that something grew."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.records import record as records
from benchmarks.serving import soak
from benchmarks.serving.load import Load
from benchmarks.serving.soak import Series, device_memory, growths, minutes, processes, sampled, thirds
from benchmarks.timing import times_of
from tests.deployments.client_load import wait_until


def series(
    figure: str, value: Callable[[float], float], begin: int = 0, end: int = 100, name: str = "replica"
) -> dict[str, Series]:
    one = Series(f"7 {name}")
    one.figures[figure] = [(float(t), value(t)) for t in range(begin, end)]
    return {"7": one}


@pytest.mark.parametrize(
    ("seen", "grows"),
    [
        (series("rss_mb", lambda t: 400.0), False),
        (series("rss_mb", lambda t: 400.0 + min(t, 25)), False),  # while it settles
        (series("rss_mb", lambda t: 400.0 + 30 * (t % 2)), False),
        (series("rss_mb", lambda t: 400.0 + 0.1 * t), False),  # 5 MB
        (series("rss_mb", lambda t: 400.0 + 0.5 * t), True),
        (series("rss_mb", lambda t: 2000.0 + 0.5 * t), False),  # 25 MB of 2,000
        (series("rss_mb", lambda t: 400.0 - t), False),
        (series("descriptors", lambda t: 50.0 + t // 5), True),
        (series("threads", lambda t: 9.0 + (t > 60) * 3), True),
        (series("gpu_mb", lambda t: 900.0 + t), True),
        (series("card_mb", lambda t: 900.0 + t), False),  # others may use the card
        (series("rss_mb", lambda t: 400.0, 50), True),  # it came later
        (series("rss_mb", lambda t: 400.0, 0, 60), True),  # it is gone
    ],
)
def test_growth_behind_the_time_to_settle_is_found(seen: dict[str, Series], grows: bool) -> None:
    lines, findings = growths(seen, 0.0, 100.0)
    assert len(lines) == 1
    assert bool(findings) == grows


def pool(t: float) -> float:
    """26 threads, and one more now and then until there are 32."""
    return min(26.0 + t // 12, 32.0)


@pytest.mark.parametrize("name", ["gcs_server", "raylet", "dashboard.py", "log_monitor.py", "ray::RuntimeEnvAgent"])
def test_a_bounded_pool_of_rays_own_passes_and_a_leak_of_it_does_not(name: str) -> None:
    for figure, value, grows in (
        ("threads", pool, False),
        ("rss_mb", lambda t: 60.0 + pool(t), False),
        ("descriptors", lambda t: 2 * pool(t), False),
        ("rss_mb", lambda t: 60.0 + t, True),
        ("descriptors", lambda t: 50.0 + t, True),
    ):
        lines, findings = growths(series(figure, value, name=name), 0.0, 100.0)
        assert bool(findings) == grows, (figure, findings)
        assert f"{figure} " in lines[0]  # shown in any case


@pytest.mark.parametrize(
    "name", ["dpiframe serve", "ray::ServeReplica:dpiframe", "ray::CoordinatorActor", "haproxy", "ray::ServeController"]
)
def test_the_same_pool_fails_a_process_that_runs_the_service(name: str) -> None:
    assert growths(series("threads", pool, name=name), 0.0, 100.0)[1]
    assert growths(series("rss_mb", lambda t: 100.0 + t, name=name), 0.0, 100.0)[1]


def test_the_thirds_are_those_of_what_is_left_behind_the_first_quarter() -> None:
    assert thirds([(float(t), float(t)) for t in range(100)], 0.0, 100.0) == (37.0, 87.0)
    assert thirds([(0.0, 1.0)], 0.0, 100.0) is None


def test_a_process_is_seen_with_what_it_holds() -> None:
    session = os.getsid(0)

    def mine() -> dict[str, float]:
        return next(figures for pid, _, figures in processes(session) if pid == str(os.getpid()))

    before = mine()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(30)]
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(30)]
    for thread in threads:
        thread.start()
    after = mine()
    assert after["descriptors"] >= before["descriptors"] + 15  # what earlier tests have left may just end
    assert after["threads"] >= before["threads"] + 15
    assert after["rss_mb"] > 10
    done.set()
    for thread in threads:
        thread.join()
    for fd in opened:
        os.close(fd)
    with sampled(session, "http://127.0.0.1:1", 0.01) as (seen, _):
        wait_until(lambda: len(seen.get(str(os.getpid()), Series("")).figures["rss_mb"]) > 2)


def test_a_minute_is_told_by_its_median() -> None:
    assert minutes([(0.0, 1.0), (30.0, 9.0), (59.9, 2.0), (60.0, 5.0), (185.0, 7.0)]) == [2.0, 5.0, 7.0]


CARD = [["0", "5000"]]
PAGE = """# TYPE ray_dpiframe_device_pool_bytes gauge
ray_dpiframe_device_pool_bytes{application="dpiframe",deployment="Replica",replica="r7"} 104857600.0
ray_dpiframe_model_ready{model="m",replica="r7"} 1.0
"""


@pytest.mark.parametrize(
    ("apps", "told"),
    [
        ([["7", "300"], ["8", "4000"]], {"7 on its GPU": {"gpu_mb": 300.0}}),  # 8 is somebody else's
        ([["8", "4000"]], {"pool of r7": {"gpu_mb": 100.0}}),  # the driver's process ids are another namespace's
        ([["7", "[N/A]"]], {"pool of r7": {"gpu_mb": 100.0}}),
        ([], {"pool of r7": {"gpu_mb": 100.0}}),
    ],
)
def test_gpu_memory_is_that_of_the_services_own_processes(
    monkeypatch: pytest.MonkeyPatch, apps: list[list[str]], told: dict[str, dict[str, float]]
) -> None:
    monkeypatch.setattr(soak.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(soak, "_listed", lambda what: apps if what.startswith("compute-apps") else CARD)
    monkeypatch.setattr(soak.httpx, "get", lambda *_, **__: SimpleNamespace(text=PAGE))
    found = {name: figures for _, name, figures in device_memory("http://x", {"7", "9"})}
    assert found == told | {"card 0, whoever uses it": {"card_mb": 5000.0}}


def soaked(monkeypatch: pytest.MonkeyPatch, loads: list[Load | Exception]) -> list[dict[str, Any]]:
    """The records of a soak whose load has these figures: at first the most that is answered, then part by part."""
    coming, now = iter(loads), 0.0

    def drive(*_: Any, seconds: float, **__: Any) -> Load:
        nonlocal now
        now += seconds
        load = next(coming)
        if isinstance(load, Exception):
            raise load
        return load

    @contextmanager
    def our_server(_: Any) -> Iterator[Any]:
        yield SimpleNamespace(process=SimpleNamespace(pid=7, poll=lambda: 1), port=1, last_words="killed")

    @contextmanager
    def sampled(*_: Any) -> Iterator[tuple[dict[str, Series], float]]:
        yield series("rss_mb", lambda t: 500.0, 0, 600), now

    body = SimpleNamespace(bodies=lambda _: ({}, [b"x"]))
    stand_ins = {
        "drive": drive, "our_server": our_server, "first_answer": lambda *_: None, "settle": lambda _: None,
        "read_bundle": lambda _: None, "Payloads": SimpleNamespace(draw=lambda *_: body), "our_config": lambda *_: {},
        "sampled": sampled, "time": SimpleNamespace(monotonic=lambda: now),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(soak, name, stand_in)
    plan = soak.Plan(Path("m"), "cpu", "colocated", 1, 2, 100, (len(loads) - 1) / 3, 0.5, 1)
    return list(soak.run(plan, lambda _: None))


def load(failed: dict[str, int] | None = None) -> Load:
    return Load(times_of([0.001]), 1.0, 1000.0, failed or {}, 2, 0.1, 1.0, 1000, 1.0, (1.0, 2.0, 3.0))


def test_a_record_is_told_while_it_runs_and_the_last_one_has_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    *told, last = soaked(monkeypatch, [load()] * 10)
    assert [(one["passed"], one["seconds"]) for one in told] == [(None, 60.0), (None, 120.0), (None, 180.0)]
    assert (last["passed"], last["findings"], last["failed"]) == (True, [], {})
    assert (last["most_per_s"], last["offered_per_s"]) == (1000, 500)
    assert (last["answered"], last["reconnects"], last["part_p99_us"]) == (180_000, 18, [1000] * 9)
    assert last["processes"] == {"7 replica": {"rss_mb": [500.0] * 10}}
    assert {records.identity(one) for one in told} == {records.identity(last)}  # each takes the place of the one before


def test_a_request_that_failed_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = soaked(monkeypatch, [load(), load(), load({"503": 3}), load(), load(), load()])
    assert (last["passed"], last["findings"]) == (False, ["requests: got {'503': 3} that failed, expected none"])


def test_a_service_that_ends_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = soaked(monkeypatch, [load(), load(), load(), RuntimeError("load: got no good answer"), load(), load()])
    assert not last["passed"]
    assert last["findings"][-1] == "service: load: got no good answer; it ended: killed"
