"""Runs that do not end are noticed, and nothing else is."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from deployments.batching.batcher import RowBatcher
from deployments.batching.watchdog import Watchdog
from dpiframe_core.errors import Unavailable
from tests.deployments.serving_doubles import FakeDevice, numbered, until


class Turns:
    """The watchdog's turns by hand: each `wait` of its event is one, until the last."""

    def __init__(self, runs: list[int | None]) -> None:
        self.runs, self.waited = runs, []  # type: ignore[var-annotated]

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return len(self.waited) > len(self.runs)

    @property
    def oldest_run(self) -> int | None:
        return self.runs[len(self.waited) - 1]


def said_of(runs: list[int | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Turns]:
    """What a watchdog says that sees those runs, one a turn."""
    turns, said = Turns(runs), []  # type: ignore[var-annotated]
    monkeypatch.setattr(threading, "Event", lambda: turns)
    monkeypatch.setattr(threading.Thread, "start", lambda self: self.run())
    Watchdog(turns, lambda: None, 10, said.append)
    return said, turns


def test_a_run_that_is_there_for_longer_than_its_bound_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, turns = said_of([None, None, *[5] * 60], monkeypatch)
    assert said == ["device: got a run that has lasted 10 s, expected its end (batching.max_run_s)"]
    seen = sum(turns.waited[3:])  # behind the turn that saw it first
    assert seen + 1e-9 > 10
    assert seen <= 10.5 + 1e-9


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([None] * 100, id="none"),
        pytest.param(list(range(100)), id="another each time"),
        pytest.param([i // 20 for i in range(200)], id="each just as long as it may be"),
        pytest.param([*[1] * 20, None] * 5, id="ends at the last moment"),
    ],
)
def test_what_ends_in_time_is_not_told(runs: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    said, turns = said_of(runs, monkeypatch)
    assert said == []
    assert len(turns.waited) == len(runs) + 1


def test_a_hung_lane_is_noticed_behind_another_one_that_runs_on() -> None:
    """Of two lanes one hangs, and the other one's runs come and go."""
    hung: list[str] = []

    async def main() -> None:
        release = threading.Event()

        def run(blocks):  # type: ignore[no-untyped-def]
            if int(blocks[0].wide_ids("candidate_ids")[0, 0]) == 1000:
                assert release.wait(30)
            return FakeDevice()(blocks)

        batcher = RowBatcher(run, max_batch_rows=4, lanes=2, max_queued_rows=100)
        stuck = asyncio.create_task(batcher.submit(numbered(1, 2)))
        await until(lambda: batcher.dispatcher.oldest_run is not None)
        watchdog = Watchdog(batcher.dispatcher, lambda: None, 0.1, hung.append)
        give_up = time.monotonic() + 20
        while not hung:
            assert time.monotonic() < give_up
            await batcher.submit(numbered(2, 2))
            await asyncio.sleep(0.001)
        watchdog.close()
        release.set()
        await stuck
        assert batcher.dispatcher.oldest_run is None
        await batcher.close(5)

    asyncio.run(main())
    assert len(hung) == 1


def test_a_failed_batcher_answers_who_waits_and_who_comes_with_the_reason() -> None:
    async def main() -> None:
        device = FakeDevice(open_=False)
        batcher = RowBatcher(device, max_batch_rows=4, lanes=1, max_queued_rows=100)
        bound = asyncio.create_task(batcher.submit(numbered(1, 4)))
        await until(lambda: device.batches != [])
        waiting = asyncio.create_task(batcher.submit(numbered(2, 4)))
        await until(lambda: batcher.dispatcher.queued_rows == 4)
        await asyncio.to_thread(batcher.fail, "device: hangs")
        for task in (bound, waiting):
            with pytest.raises(Unavailable, match="device: hangs"):
                await task
        assert not batcher.accepting
        with pytest.raises(Unavailable):
            await batcher.submit(numbered(3, 1))
        device.release(1)
        await batcher.close(5)
        assert len(device.batches) == 1

    asyncio.run(main())


def test_a_replica_with_a_hung_model_is_unhealthy_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.serve import loaded_models

    ended, told = threading.Event(), []  # type: ignore[var-annotated]
    monkeypatch.setattr(loaded_models, "end_soon", lambda seconds: ended.set())
    loaded = loaded_models.LoadedModels()
    loaded.check()
    runs = SimpleNamespace(oldest_run=3, queued_rows=0, inflight_rows=4, busy_s=0.0)
    loaded.runs_in(runs, lambda: None, 0.1, told.append)
    assert ended.wait(20)
    assert told == ["device: got a run that has lasted 0.1 s, expected its end (batching.max_run_s)"]
    with pytest.raises(Unavailable, match="a run that has lasted"):
        loaded.check()
    asyncio.run(loaded.close())


def test_a_device_that_failed_ends_its_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.serve import loaded_models

    ended, told = threading.Event(), []  # type: ignore[var-annotated]
    monkeypatch.setattr(loaded_models, "end_soon", lambda seconds: ended.set())
    loaded = loaded_models.LoadedModels()
    runs = SimpleNamespace(oldest_run=None, queued_rows=0, inflight_rows=0, busy_s=0.0)
    failed = threading.Event()

    def check() -> None:
        if failed.is_set():
            raise Unavailable("engine: device cuda:0 failed: an illegal memory access")

    loaded.runs_in(runs, check, 0.1, told.append)
    assert not ended.wait(0.3)
    failed.set()
    assert ended.wait(20)
    assert told == ["engine: device cuda:0 failed: an illegal memory access"]
    asyncio.run(loaded.close())


@pytest.mark.bulk
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_whose_device_hangs_answers_says_where_it_is_and_ends(device: str) -> None:
    command = [sys.executable, "-m", "tests.deployments.batching.hung", device, "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == -signal.SIGKILL
    why = "device: got a run that has lasted 1 s, expected its end (batching.max_run_s)"
    assert ended.stdout.splitlines() == ["scored", why]
    assert f"{why}: this process ends, and Serve starts another one" in ended.stderr
    assert "in spin" in ended.stderr or "in run" in ended.stderr


@pytest.mark.bulk
def test_a_process_that_was_stopped_for_longer_than_a_run_may_last_goes_on() -> None:
    """While nothing of it runs, no time counts: neither a debugger nor a suspended host is a device that hangs."""
    command = [sys.executable, "-m", "tests.deployments.batching.hung", "cpu", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "scored\n"
        time.sleep(0.4)  # the run that hangs is under way
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.2)
        process.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert process.wait(60) == -signal.SIGKILL  # it does hang
