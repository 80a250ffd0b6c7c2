"""Runs that do not end are noticed, and nothing else is."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from deployments.batching.batcher import RowBatcher
from deployments.batching.watchdog import start_watching, watch
from dpiframe_core.errors import Unavailable
from tests.deployments.serving_doubles import FakeDevice, numbered, until


class Turns:
    """Runs by turns: each `sleep` is one, until the last. `failed_at`: the turn in which the device fails."""

    def __init__(self, runs: list[int | None], failed_at: int = 10**6) -> None:
        self.runs, self.failed_at = runs, failed_at
        self.slept: list[float] = []

    @property
    def oldest_run(self) -> int | None:
        return self.runs[len(self.slept) - 1]

    @property
    def over(self) -> bool:
        return len(self.slept) == len(self.runs)

    def check(self) -> None:
        if len(self.slept) >= self.failed_at:
            raise Unavailable("engine: device cuda:0 failed: an illegal memory access")

    def said(self) -> list[str]:
        """What a watchdog says of them."""
        said: list[str] = []
        watch(self, self.check, 10, said.append, self.slept.append)
        return said


def test_a_run_that_is_there_for_longer_than_its_bound_is_told_once() -> None:
    turns = Turns([None, None, *[5] * 60])
    assert turns.said() == ["device: got a run that has lasted 10 s, expected its end (batching.max_run_s)"]
    seen = sum(turns.slept[3:])  # behind the turn that saw it first
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
def test_what_ends_in_time_is_not_told(runs: list[int | None]) -> None:
    turns = Turns(runs)
    assert turns.said() == []
    assert turns.over


def test_a_device_that_failed_is_told_with_its_reason() -> None:
    turns = Turns([None] * 9, failed_at=4)
    assert turns.said() == ["engine: device cuda:0 failed: an illegal memory access"]
    assert len(turns.slept) == 4


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
        start_watching(batcher.dispatcher, lambda: None, 0.1, hung.append)
        give_up = time.monotonic() + 20
        while not hung:
            assert time.monotonic() < give_up
            await batcher.submit(numbered(2, 2))
            await asyncio.sleep(0.001)
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


def test_watching_ends_with_the_batcher() -> None:
    async def main() -> None:
        batcher = RowBatcher(FakeDevice(), max_batch_rows=4, lanes=1, max_queued_rows=100)
        watching = threading.Thread(target=watch, args=(batcher.dispatcher, lambda: None, 2.0, print))
        watching.start()
        await batcher.submit(numbered(1, 1))
        assert watching.is_alive()
        await batcher.close(5)
        await asyncio.to_thread(watching.join, 20)
        assert not watching.is_alive()

    asyncio.run(main())


@pytest.mark.bulk
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_whose_device_hangs_answers_says_where_it_is_and_ends(device: str) -> None:
    command = [sys.executable, "-m", "tests.deployments.batching.hung", device, "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == -signal.SIGKILL
    why = "device: got a run that has lasted 1 s, expected its end (batching.max_run_s)"
    scored, *rest = ended.stdout.splitlines()
    assert (scored.split()[0], rest) == ("scored", [why])
    assert f"{why}: this process ends, and Serve starts another one" in ended.stderr
    assert "in spin" in ended.stderr or "in run" in ended.stderr


@pytest.mark.bulk
def test_a_process_that_was_stopped_for_longer_than_a_run_may_last_goes_on() -> None:
    """While nothing of it runs, no time counts: neither a debugger nor a suspended host is a device that hangs."""
    command = [sys.executable, "-m", "tests.deployments.batching.hung", "cpu", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        said, begun = process.stdout.readline().split()
        assert said == "scored"
        time.sleep(0.4)  # the run that hangs is under way
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.2)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == -signal.SIGKILL  # it does hang
        assert time.monotonic() - float(begun) > 3 + 3.2 - 0.3  # one turn of a twentieth may end while it is stopped
