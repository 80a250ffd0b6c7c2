"""An engine in its ingress's own process: it scores, fails and ends as one beside it, and leaves nothing behind."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from deployments.fanin import own_engine
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.own_engine import OwnEngine
from dpiframe_core.errors import Unavailable
from tests.deployments.fanin.doubles import FINGERPRINT, rows_of
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers, until


def batcher_of(device: FakeDevice) -> FanInBatcher:
    return FanInBatcher(device, LAYOUT, 1, FINGERPRINT, max_batch_rows=10, lanes=1, max_queued_rows=1000)


def with_own(device: FakeDevice, test: Callable[[OwnEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        own = await OwnEngine.met(batcher_of(device), "m/1", 2000)
        try:
            async with asyncio.timeout(60):
                await test(own)
        finally:
            await own.close(0)

    asyncio.run(main())


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def here() -> tuple[int, set[threading.Thread]]:
    """Files and threads, those that other tests have left among them."""
    return files(), {*threading.enumerate()}


def check_left(before: tuple[int, set[threading.Thread]]) -> None:
    """Fails if there are more files than before, or other threads; a lane ends a moment after it was told to."""
    most, threads = before
    more = lambda: {t.name for t in {*threading.enumerate()} - threads} & {"lane-0", "fanin-acceptor"}  # noqa: E731
    give_up = time.monotonic() + 20
    while (more() or (len(os.listdir("/proc/self/fd")) > most and files() > most)) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not more()
    assert files() <= most


def test_requests_of_any_size_are_scored_and_nothing_is_left_afterwards() -> None:
    before = here()

    async def test(own: OwnEngine) -> None:
        assert own.scorer.accepting
        scored = await asyncio.gather(*(own.scorer.submit(numbered(i, rows)) for i, rows in enumerate((1, 7, 33))))
        assert [rows_of(one) for one in scored] == [numbers(i, rows) for i, rows in enumerate((1, 7, 33))]

    with_own(FakeDevice(), test)
    check_left(before)


def test_two_of_a_process_do_not_meet_each_other() -> None:
    first, second = FakeDevice(), FakeDevice()

    async def test(own: OwnEngine) -> None:
        other = await OwnEngine.met(batcher_of(second), "m/1", 2000)
        await own.scorer.submit(numbered(1, 2))
        await other.scorer.submit(numbered(2, 2))
        await asyncio.sleep(0.3)  # some looks for engines
        assert len(own.scorer.connections) == len(other.scorer.connections) == 1
        await other.close(0)

    with_own(first, test)
    assert (first.batches, second.batches) == ([numbers(1, 2)], [numbers(2, 2)])


def test_after_a_failure_all_are_told_that_wait_and_all_that_come() -> None:
    device = FakeDevice(open_=False)

    async def test(own: OwnEngine) -> None:
        waits = asyncio.create_task(own.scorer.submit(numbered(1, 3)))
        await until(lambda: own.dispatcher.inflight_rows == 3)
        await asyncio.to_thread(own.fail, "the device failed")  # as the watchdog does
        with pytest.raises(Unavailable, match="got its end with this request there"):
            await waits
        with pytest.raises(Unavailable, match="got none on this node"):
            await own.scorer.submit(numbered(2, 3))
        assert not own.scorer.accepting
        await asyncio.sleep(0.3)
        assert not own.scorer.connections  # it looks for none any more
        device.release()

    with_own(device, test)


def test_a_failure_after_the_end_is_no_failure_of_who_tells_it() -> None:
    async def main() -> OwnEngine:
        own = await OwnEngine.met(batcher_of(FakeDevice()), "m/1", 2000)
        await own.close(0)
        return own

    asyncio.run(main()).fail("the device failed")


def test_a_close_waits_for_what_is_open_and_then_no_longer() -> None:
    device = FakeDevice(open_=False)

    async def test(own: OwnEngine) -> None:
        waits = asyncio.create_task(own.scorer.submit(numbered(1, 3)))
        await until(lambda: own.dispatcher.inflight_rows == 3)
        closing = asyncio.create_task(own.close(60))
        await asyncio.sleep(0.05)
        assert not closing.done()
        device.release()
        await closing
        assert rows_of(await waits) == numbers(1, 3)

    async def late(own: OwnEngine) -> None:
        waits = asyncio.create_task(own.scorer.submit(numbered(1, 3)))
        await until(lambda: own.dispatcher.inflight_rows == 3)
        await own.close(0.05)
        with pytest.raises(Unavailable, match="got its end with this request there"):
            await waits
        device.release()

    async def main(test: Callable[[OwnEngine], Awaitable[None]]) -> None:
        await test(await OwnEngine.met(batcher_of(device), "m/1", 2000))

    for each in (test, late):
        asyncio.run(main(each))


def test_ends_that_do_not_meet_are_said_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = here()
    monkeypatch.setattr(own_engine, "_MEETS_S", 0.2)

    async def main() -> None:
        batcher = batcher_of(FakeDevice())
        monkeypatch.setattr(own_engine.Acceptor, "_let_in", lambda _, selector: None)
        with pytest.raises(Unavailable, match=r"engine: got none of this process within 0\.2 s, expected its own"):
            await OwnEngine.met(batcher, "m/1", 2000)

    asyncio.run(main())
    check_left(before)
