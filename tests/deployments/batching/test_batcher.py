import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.batching.batcher import RowBatcher, Scored, _Reply
from deployments.batching.refusals import queue_full
from deployments.batching.row_queue import Ticket
from deployments.metrics import BatchSeen
from dpiframe_core.errors import DeadlineExceeded, InputError, Overloaded, TooLarge, Unavailable
from dpiframe_core.features.row_block import BatchResult, RowBlock
from tests.deployments.serving_doubles import FakeDevice, numbered, numbers, until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    device: Callable[[Sequence[RowBlock]], BatchResult],
    body: Callable[[RowBatcher], Awaitable[None]],
    *,
    max_batch_rows: int = 10,
    lanes: int = 1,
    max_queued_rows: int = 1000,
    **kwargs: Any,
) -> None:
    async def main() -> None:
        batcher = RowBatcher(device, max_batch_rows=max_batch_rows, lanes=lanes, max_queued_rows=max_queued_rows, **kwargs)
        try:
            await body(batcher)
        finally:
            if isinstance(device, FakeDevice):
                device.release(1000)
            await batcher.close(drain_s=20)
        await until(lambda: not any(thread.is_alive() for thread in batcher.dispatcher.threads))

    asyncio.run(main())


def rows_of(scored: Scored) -> list[int]:
    return [int(score) for score in scored.scores[:, 0]]


async def scored_by_a_lane(batcher: RowBatcher, rows: int) -> Scored:
    """The scores of request 0, once the only lane sleeps: what comes next is not its own find."""
    scored = await batcher.submit(numbered(0, rows))
    await until(lambda: batcher.dispatcher._idle == 1)
    return scored


async def occupy(batcher: RowBatcher, device: FakeDevice) -> asyncio.Task[Scored]:
    """Puts a one-row request on the only lane, so that what comes next waits."""
    runs = len(device.batches)
    task = asyncio.create_task(batcher.submit(numbered(999, 1)))
    await until(lambda: len(device.batches) > runs)
    return task


def test_an_idle_lane_takes_a_lone_request_at_once() -> None:
    device = FakeDevice()

    async def body(batcher: RowBatcher) -> None:
        scored = await batcher.submit(numbered(1, 4))
        assert rows_of(scored) == numbers(1, 4)
        assert scored.scores.dtype == np.float32
        assert scored.device_ms == 1.0
        assert scored.queue_ms >= 0.0

    run(device, body)
    assert device.batches == [numbers(1, 4)]


def test_what_waits_while_the_lane_is_busy_becomes_one_batch() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        first = await occupy(batcher, device)
        waiting = [asyncio.create_task(batcher.submit(numbered(i, 3))) for i in range(3)]
        await until(lambda: batcher.dispatcher.queued_rows == 9)
        assert batcher.dispatcher.inflight_rows == 1
        device.release(2)
        assert [rows_of(await task) for task in waiting] == [numbers(i, 3) for i in range(3)]
        await first
        assert batcher.dispatcher.queued_rows == batcher.dispatcher.inflight_rows == 0

    run(device, body)
    assert device.batches == [numbers(999, 1), [n for i in range(3) for n in numbers(i, 3)]]


def test_two_lanes_hold_two_batches_at_once() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        tasks = [asyncio.create_task(batcher.submit(numbered(i, 10))) for i in range(3)]
        await until(lambda: len(device.batches) == 2)
        assert (batcher.dispatcher.inflight_rows, batcher.dispatcher.queued_rows) == (20, 10)
        device.release(3)
        await asyncio.gather(*tasks)

    run(device, body, lanes=2)


def test_an_oversize_request_is_split_and_joined_in_order() -> None:
    device = FakeDevice()

    async def body(batcher: RowBatcher) -> None:
        scored = await batcher.submit(numbered(5, 37))
        assert rows_of(scored) == numbers(5, 37)
        assert scored.device_ms == 4.0

    run(device, body, lanes=2)
    assert sorted(map(len, device.batches)) == [7, 10, 10, 10]


def test_an_expired_request_never_reaches_the_device() -> None:
    device, clock = FakeDevice(open_=False), Clock()

    async def body(batcher: RowBatcher) -> None:
        first = await occupy(batcher, device)
        late = asyncio.create_task(batcher.submit(numbered(1, 2), deadline=clock.now + 60))
        fine = asyncio.create_task(batcher.submit(numbered(2, 2), deadline=clock.now + 120))
        await until(lambda: batcher.dispatcher.queued_rows == 4)
        clock.now += 60
        device.release(2)
        with pytest.raises(DeadlineExceeded, match="deadline: got past it in the queue, expected the scores before it"):
            await late
        assert rows_of(await fine) == numbers(2, 2)
        await first
        with pytest.raises(DeadlineExceeded, match="before it was queued"):
            await batcher.submit(numbered(3, 2), deadline=clock.now)

    run(device, body, clock=clock)
    assert device.batches == [numbers(999, 1), numbers(2, 2)]


def test_a_deadline_is_answered_while_the_device_is_still_busy() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        first = await occupy(batcher, device)
        soon = batcher._clock() + 0.1
        with pytest.raises(DeadlineExceeded, match="in the queue"):
            await batcher.submit(numbered(1, 2), deadline=soon)
        assert batcher.dispatcher.queued_rows == 0
        assert not first.done()

    run(device, body)


def test_a_full_queue_refuses_with_the_time_it_needs_to_drain() -> None:
    device, clock = FakeDevice(open_=False), Clock()

    async def body(batcher: RowBatcher) -> None:
        first = await occupy(batcher, device)
        clock.now += 0.5  # one row in half a second
        device.release(1)
        await first
        first = await occupy(batcher, device)
        kept = asyncio.create_task(batcher.submit(numbered(1, 8)))
        await until(lambda: batcher.dispatcher.queued_rows == 8)
        with pytest.raises(Overloaded, match=r"queue: got 8 rows waiting, expected at most 6; retry after 4\.000 s") as refused:
            await batcher.submit(numbered(2, 6))
        assert refused.value.retry_after_s == pytest.approx(4.0)
        also = asyncio.create_task(batcher.submit(numbered(3, 4)))  # exactly full
        await until(lambda: batcher.dispatcher.queued_rows == 12)
        device.release(10)
        await asyncio.gather(first, kept, also)

    run(device, body, max_queued_rows=12, clock=clock)


def test_a_request_that_could_never_be_queued_is_too_large_rather_than_overloaded() -> None:
    async def body(batcher: RowBatcher) -> None:
        with pytest.raises(TooLarge, match="rows: got 21, expected at most 20, all that may wait at once"):
            await batcher.submit(numbered(1, 21))
        with pytest.raises(InputError, match="rows: got 0, expected at least 1"):
            await batcher.submit(numbered(1, 0))

    run(FakeDevice(), body, max_queued_rows=20)


def test_a_cancelled_request_is_dropped_before_it_is_bound() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        first = await occupy(batcher, device)
        doomed = asyncio.create_task(batcher.submit(numbered(1, 5)))
        other = asyncio.create_task(batcher.submit(numbered(2, 2)))
        await until(lambda: batcher.dispatcher.queued_rows == 7)
        doomed.cancel()
        await until(lambda: batcher.dispatcher.queued_rows == 2)
        device.release(2)
        assert rows_of(await other) == numbers(2, 2)
        await first
        assert doomed.cancelled()

    run(device, body)
    assert device.batches == [numbers(999, 1), numbers(2, 2)]


def test_the_rest_of_a_split_request_is_dropped_when_it_is_cancelled_half_way() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        task = asyncio.create_task(batcher.submit(numbered(1, 30)))
        await until(lambda: len(device.batches) == 1)
        task.cancel()
        await until(lambda: batcher.dispatcher.queued_rows == 0)
        device.release(1)
        other = asyncio.create_task(batcher.submit(numbered(2, 3)))
        device.release(1)
        assert rows_of(await other) == numbers(2, 3)

    run(device, body)
    assert device.batches == [numbers(1, 10), numbers(2, 3)]


def test_a_failed_run_fails_only_its_own_requests_and_the_batcher_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(open_=False)
    device.fail_on = 2001

    async def body(batcher: RowBatcher) -> None:
        tasks = [asyncio.create_task(batcher.submit(numbered(i, 5))) for i in range(1, 6)]
        await until(lambda: batcher.dispatcher.queued_rows + batcher.dispatcher.inflight_rows == 25)
        device.release(10)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        failed = {i for i, result in enumerate(done, 1) if isinstance(result, Unavailable)}
        together = next(batch for batch in device.batches if 2001 in batch)
        assert failed == {row // 1000 for row in together}
        assert 2 in failed
        assert len(failed) < 5
        assert str(done[1]) == "device: got an error on this request's batch, expected scores"
        for i, result in enumerate(done, 1):
            if i not in failed:
                assert isinstance(result, Scored)
                assert rows_of(result) == numbers(i, 5)
        assert rows_of(await batcher.submit(numbered(7, 5))) == numbers(7, 5)

    with caplog.at_level(logging.ERROR):
        run(device, body)
    assert "the fake device failed" in caplog.text


def test_no_further_part_of_a_failed_request_reaches_the_device() -> None:
    device = FakeDevice(open_=False)
    device.fail_on = 1000

    async def body(batcher: RowBatcher) -> None:
        device.release(10)
        with pytest.raises(Unavailable):
            await batcher.submit(numbered(1, 50))
        assert rows_of(await batcher.submit(numbered(2, 10))) == numbers(2, 10)

    run(device, body)
    assert device.batches == [numbers(1, 10), numbers(2, 10)]


def test_scores_of_a_wrong_length_fail_the_batch_instead_of_shifting_rows() -> None:
    def short(blocks: Sequence[RowBlock]) -> BatchResult:
        return BatchResult(np.zeros((1, 1), np.float32), 0.1, 1)

    async def body(batcher: RowBatcher) -> None:
        with pytest.raises(Unavailable, match="device: got an error"):
            await batcher.submit(numbered(1, 3))

    run(short, body)


def test_closing_finishes_what_waits_and_then_refuses() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        tasks = [asyncio.create_task(batcher.submit(numbered(i, 10))) for i in range(3)]
        await until(lambda: batcher.dispatcher.queued_rows == 20)
        closing = asyncio.create_task(batcher.close(drain_s=20))
        await until(lambda: not batcher.accepting)
        with pytest.raises(Unavailable, match="batcher: got a request after it was closed, expected it at another replica"):
            await batcher.submit(numbered(9, 1))
        device.release(3)
        await closing
        assert [rows_of(await task) for task in tasks] == [numbers(i, 10) for i in range(3)]

    run(device, body)


def test_closing_does_not_wait_for_what_has_expired_meanwhile() -> None:
    device, clock = FakeDevice(open_=False), Clock()

    async def body(batcher: RowBatcher) -> None:
        first = await occupy(batcher, device)
        late = asyncio.create_task(batcher.submit(numbered(1, 2), deadline=clock.now + 600))
        await until(lambda: batcher.dispatcher.queued_rows == 2)
        closing = asyncio.create_task(batcher.close(drain_s=1000))
        await until(lambda: not batcher.accepting)
        clock.now += 600
        device.release()
        async with asyncio.timeout(20):
            await closing
        assert rows_of(await first) == numbers(999, 1)
        with pytest.raises(DeadlineExceeded, match="in the queue"):
            await late

    run(device, body, clock=clock)


def test_closing_answers_what_did_not_finish_in_time() -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        tasks = [asyncio.create_task(batcher.submit(numbered(i, 10))) for i in range(3)]
        await until(lambda: batcher.dispatcher.queued_rows == 20)
        await batcher.close(drain_s=0)
        for task in tasks:
            with pytest.raises(Unavailable, match="still open 0 s into closing"):
                await task

    run(device, body)
    assert device.batches == [numbers(0, 10)]


def test_each_batch_is_observed_and_a_broken_observer_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[BatchSeen] = []

    def observe(batch: BatchSeen) -> None:
        seen.append(batch)
        raise ValueError("observer")

    async def body(batcher: RowBatcher) -> None:
        await batcher.submit(numbered(1, 4))
        await batcher.submit(numbered(2, 10))

    run(FakeDevice(bucket=12), body, on_batch=observe)
    seen.sort(key=lambda batch: batch.rows)  # a lane tells after it has answered: the next lane may be sooner
    assert seen == [BatchSeen(4, 12, 1, 0.4, 1.0, failed=False), BatchSeen(10, 12, 1, 1.0, 1.0, failed=False)]
    assert "observing a batch failed" in caplog.text


class Timed(FakeDevice):
    """Each run takes `seconds` on the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.seconds = clock, 0.0
        self.loops = threading.get_ident()

    def __call__(self, blocks: Sequence[RowBlock]) -> BatchResult:
        self.clock.now += self.seconds
        return super().__call__(blocks)

    @property
    def on_the_loop(self) -> list[bool]:
        return [thread == self.loops for thread in self.threads]


def test_the_event_loop_runs_what_is_short_itself_once_a_lane_has_shown_it_to_be() -> None:
    clock = Clock()
    device, seen = Timed(clock), list[BatchSeen]()

    async def body(batcher: RowBatcher) -> None:
        device.seconds = 0.0001
        for i in range(3):
            busy = batcher.dispatcher.busy_s
            scored = await batcher.submit(numbered(i, 4))
            assert rows_of(scored) == numbers(i, 4)
            await until(lambda: batcher.dispatcher._idle == 1)
            assert (scored.queue_ms, scored.device_ms) == (0.0, 1.0)
            assert batcher.dispatcher.busy_s - busy == pytest.approx(0.0001)
            assert batcher.dispatcher.queued_rows == batcher.dispatcher.inflight_rows == 0
        assert batcher.dispatcher.load.seconds_per_row == pytest.approx(0.0001 / 4)

    run(device, body, clock=clock, on_batch=seen.append)
    assert device.on_the_loop == [False, True, True]
    assert seen == [BatchSeen(4, 4, 1, 0.4, 1.0, failed=False)] * 3


def test_runs_above_the_limit_go_to_a_lane_until_they_are_short_again() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        for device.seconds in (0.001, 0.001, 0.0001, 0.0001, 0.001, 0.001, 0.0001, 0.0001):
            await batcher.submit(numbered(1, 4))
            await until(lambda: batcher.dispatcher._idle == 1)

    run(device, body, clock=clock)
    # The one that turns out to be long on the loop is the fifth.
    assert device.on_the_loop == [False, False, False, True, True, False, False, True]


def test_requests_of_one_round_of_the_event_loop_share_a_batch_there() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 1)
        done = await asyncio.gather(*(batcher.submit(numbered(i, 3), priority=i) for i in range(1, 4)))
        assert [rows_of(scored) for scored in done] == [numbers(i, 3) for i in range(1, 4)]

    run(device, body, clock=clock)
    assert device.batches[1:] == [[n for i in (3, 2, 1) for n in numbers(i, 3)]]
    assert device.on_the_loop == [False, True]


def test_more_than_one_batch_is_left_to_the_lanes() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 1)
        assert rows_of(await batcher.submit(numbered(1, 25))) == numbers(1, 25)

    run(device, body, clock=clock)
    assert device.on_the_loop == [False] * 4


def test_a_run_that_fails_on_the_event_loop_answers_all_its_clients_and_the_next_one_runs() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 1)
        device.fail_on = 2001
        done = await asyncio.gather(*(batcher.submit(numbered(i, 3)) for i in (1, 2, 3)), return_exceptions=True)
        assert [str(error) for error in done] == ["device: got an error on this request's batch, expected scores"] * 3
        assert all(isinstance(error, Unavailable) for error in done)
        assert batcher.dispatcher.queued_rows == batcher.dispatcher.inflight_rows == 0
        assert rows_of(await batcher.submit(numbered(4, 3))) == numbers(4, 3)

    run(device, body, clock=clock)
    assert device.on_the_loop == [False, True, True]


def test_an_order_to_exit_during_a_run_on_the_event_loop_is_obeyed_once_the_clients_are_answered() -> None:
    clock = Clock()
    device = Timed(clock)

    def told_to_exit(blocks: Sequence[RowBlock]) -> BatchResult:
        result = device(blocks)
        if device.on_the_loop[-1]:
            raise SystemExit(1)
        return result

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 3)
        task = asyncio.create_task(batcher.submit(numbered(1, 3)))
        await asyncio.sleep(0)
        with pytest.raises(SystemExit):
            batcher._run_here()
        with pytest.raises(Unavailable, match="device: got an error"):
            await task

    run(told_to_exit, body, clock=clock)


def test_who_hangs_up_when_the_event_loop_is_about_to_run_its_batch_harms_nobody() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 1)
        doomed, other = (asyncio.create_task(batcher.submit(numbered(i, 2))) for i in (1, 2))
        await asyncio.sleep(0)
        assert batcher.dispatcher.queued_rows == 4
        doomed.cancel()
        assert rows_of(await other) == numbers(2, 2)
        assert doomed.cancelled()
        alone = asyncio.create_task(batcher.submit(numbered(3, 2)))
        await asyncio.sleep(0)
        alone.cancel()
        assert rows_of(await batcher.submit(numbered(4, 2))) == numbers(4, 2)
        assert alone.cancelled()
        assert batcher.dispatcher.queued_rows == batcher.dispatcher.inflight_rows == 0

    run(device, body, clock=clock)


def test_a_deadline_that_passes_during_a_run_on_the_event_loop_is_kept() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 2)
        device.seconds = 60
        fine = asyncio.create_task(batcher.submit(numbered(1, 2), deadline=clock.now + 61))
        with pytest.raises(DeadlineExceeded, match="deadline: got past it on the device, expected the scores before it"):
            await batcher.submit(numbered(2, 2), deadline=clock.now + 60)
        assert rows_of(await fine) == numbers(1, 2)

    run(device, body, clock=clock)
    assert device.on_the_loop == [False, True]


def test_closing_waits_for_what_the_event_loop_is_about_to_run() -> None:
    clock = Clock()
    device = Timed(clock)

    async def body(batcher: RowBatcher) -> None:
        await scored_by_a_lane(batcher, 2)
        task = asyncio.create_task(batcher.submit(numbered(1, 2)))
        await asyncio.sleep(0)
        assert batcher.dispatcher.queued_rows == 2
        await batcher.close(drain_s=20)
        assert rows_of(await task) == numbers(1, 2)
        batcher._run_here()  # one that was due yet would find nothing

    run(device, body, clock=clock)
    assert device.on_the_loop == [False, True]


def test_the_event_loop_counts_as_a_lane_so_that_it_never_waits_for_one() -> None:
    clock = Clock()
    device = Timed(clock)
    refused: list[bool] = []

    async def body(batcher: RowBatcher) -> None:
        dispatcher = batcher.dispatcher
        await scored_by_a_lane(batcher, 2)

        def during(blocks: Sequence[RowBlock]) -> BatchResult:
            if threading.get_ident() == device.loops and not refused:
                late = Ticket(_Reply(numbered(2, 2), asyncio.get_running_loop().create_future()), 2, None, 0, clock.now)
                with dispatcher.lock:
                    dispatcher.admit(late)
                    refused.append(not dispatcher._form().parts)
                waiting.append(late)
            return device(blocks)

        waiting: list[Ticket[_Reply]] = []
        dispatcher._run = during
        assert rows_of(await batcher.submit(numbered(1, 2))) == numbers(1, 2)
        assert rows_of(await waiting[0].item.future) == numbers(2, 2)  # a lane was woken for it

    run(device, body, clock=clock)
    assert refused == [True]
    assert device.on_the_loop == [False, True, False]


@pytest.mark.parametrize("name", ["max_batch_rows", "lanes", "max_queued_rows"])
def test_a_bound_below_one_is_refused(name: str) -> None:
    bounds = {"max_batch_rows": 1, "lanes": 1, "max_queued_rows": 1, name: 0}
    with pytest.raises(InputError, match=f"{name}: got 0, expected at least 1"):
        RowBatcher(FakeDevice(), **bounds)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_every_row_of_every_surviving_request_is_scored_once_in_order_and_within_the_bound(
    requests: list[tuple[int, int, bool]], max_batch_rows: int, lanes: int
) -> None:
    device = FakeDevice(open_=False)

    async def body(batcher: RowBatcher) -> None:
        tasks = [
            asyncio.create_task(batcher.submit(numbered(i, rows), priority=priority))
            for i, (rows, priority, _) in enumerate(requests)
        ]
        await asyncio.sleep(0)
        device.release(1)
        for task, (_, _, cancelled) in zip(tasks, requests, strict=True):
            if cancelled:
                task.cancel()
        device.release(1000)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for i, (result, (rows, _, cancelled)) in enumerate(zip(done, requests, strict=True)):
            if isinstance(result, Scored):
                assert rows_of(result) == numbers(i, rows)
            else:
                assert cancelled

    run(device, body, max_batch_rows=max_batch_rows, lanes=lanes)
    assert all(1 <= len(batch) <= max_batch_rows for batch in device.batches)
    scored = [row for batch in device.batches for row in batch]
    assert len(scored) == len(set(scored))


def test_a_refusal_names_no_fewer_rows_than_may_wait() -> None:
    """What waits may have been scored since."""
    assert str(queue_full(9, 8, 0.5)).startswith("queue: got 9 rows waiting, expected at most 8")
    assert str(queue_full(8, 8, 0.5)).startswith("queue: got more than 8 rows waiting, expected at most 8")
