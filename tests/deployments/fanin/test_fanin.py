"""The fan-in between processes: what a death or an end on either side means to the other."""

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deployments.config import MOST_ENGINES
from deployments.fanin import handshake
from deployments.fanin.handshake import Agreement, meeting_place
from deployments.fanin.scorer import FanInScorer
from dpiframe_core.errors import DeadlineExceeded, Unavailable
from tests.deployments.fanin.doubles import FINGERPRINT, rows_of, with_scorer
from tests.deployments.serving_doubles import LAYOUT, numbered, numbers, until

pytestmark = pytest.mark.bulk

ROOT = Path(__file__).parents[3]


class Process:
    """One of `process`. Killed at the end if it still runs."""

    def __init__(self, role: str, node: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.deployments.fanin.process", role, node],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self.hear() == {"state": "ready"}

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())  # type: ignore[no-any-return]

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def state(self) -> dict[str, Any]:
        self.tell("state")
        return self.hear()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def node(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()}-{request.node.name}"


@pytest.fixture
def start(node: str) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def process(role: str) -> Process:
        started.append(Process(role, node))
        return started[-1]

    yield process
    for one in started:
        one.kill()
        assert one.popen.stdin is not None
        assert one.popen.stdout is not None
        one.popen.stdin.close()
        one.popen.stdout.close()


def test_scores_of_another_process_are_the_requests_own_whether_encoded_in_place_or_not(
    node: str, start: Callable[[str], Process]
) -> None:
    engine = start("engine")

    async def body(scorer: FanInScorer) -> None:
        assert not scorer.accepting
        await scorer.found(1)
        assert scorer.accepting
        placed = scorer.allocate(LAYOUT, 40, 1)
        placed.fill((numbered(7, 40),))
        answers = await asyncio.gather(scorer.submit(placed), *(scorer.submit(numbered(i, 1 + i % 40)) for i in range(300)))
        assert rows_of(answers[0]) == numbers(7, 40)
        assert [rows_of(answer) for answer in answers[1:]] == [numbers(i, 1 + i % 40) for i in range(300)]
        assert scorer.batch_sizes.sum() == engine.state()["batches"]
        assert scorer.batch_sizes @ np.arange(17) == 40 + sum(1 + i % 40 for i in range(300))
        board = scorer.search.connections[0].board
        assert (board.queued_rows, board.inflight_rows) == (0, 0)

    with_scorer(node, body)


def test_the_death_of_the_engine_fails_what_it_had_at_once_and_the_next_engine_is_found(
    node: str, start: Callable[[str], Process], caplog: pytest.LogCaptureFixture
) -> None:
    first = start("stuck")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        tasks = [asyncio.create_task(scorer.submit(numbered(i, 30))) for i in range(5)]
        await until(lambda: scorer.search.connections[0].board.inflight_rows >= 30)
        first.kill()
        for task in tasks:
            with pytest.raises(Unavailable, match="engine: got its end with this request there, expected scores"):
                await task
        assert not scorer.accepting
        with pytest.raises(Unavailable, match="engine: got none on this node, expected one"):
            await scorer.submit(numbered(9, 1))
        start("engine")
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(8, 30))) == numbers(8, 30)
        assert scorer._memory.free_bytes == scorer._memory.size

    with_scorer(node, body)


def test_the_death_of_an_ingress_takes_its_rows_out_of_the_queue_and_nobody_elses(
    node: str, start: Callable[[str], Process]
) -> None:
    engine = start("stuck")
    doomed = start("ingress")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        await until(lambda: engine.state()["inflight_rows"] >= 30)
        mine = asyncio.create_task(scorer.submit(numbered(1, 5)))
        await asyncio.sleep(0)
        assert engine.state()["peers"] == 2
        doomed.kill()
        await until(lambda: engine.state()["peers"] == 1)
        await until(lambda: engine.state()["queued_rows"] == 0)  # mine is not read before a lane is free
        assert not mine.done()
        mine.cancel()

    with_scorer(node, body)


def test_an_ingress_that_dies_under_load_harms_no_other(node: str, start: Callable[[str], Process]) -> None:
    engine = start("engine")
    doomed = start("ingress")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        for i in range(200):
            if i == 50:
                doomed.kill()
            assert rows_of(await scorer.submit(numbered(i, 30))) == numbers(i, 30)
        await until(lambda: engine.state()["peers"] == 1)

    with_scorer(node, body)


def test_an_engine_that_stops_answers_what_it_has_and_its_ingresses_go_to_the_other(
    node: str, start: Callable[[str], Process]
) -> None:
    first, second = start("engine"), start("engine")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(2)
        done = 0

        async def client(number: int) -> None:
            nonlocal done
            while second.state()["batches"] < 100:
                assert rows_of(await scorer.submit(numbered(number, 10))) == numbers(number, 10)
                done += 1

        clients = [asyncio.create_task(client(i)) for i in range(8)]
        await until(lambda: done > 20)
        first.tell("close")
        await asyncio.gather(*clients)
        await until(lambda: len(scorer.connections) == 1)
        assert first.hear() == {"state": "closed"}

    with_scorer(node, body)


def test_the_last_engine_that_stops_serves_its_ingresses_until_they_leave(node: str, start: Callable[[str], Process]) -> None:
    engine = start("engine")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        engine.tell("close")
        await until(lambda: scorer.search.connections[0].board.leaving)
        for i in range(20):
            assert rows_of(await scorer.submit(numbered(i, 10))) == numbers(i, 10)

    with_scorer(node, body)
    assert engine.hear() == {"state": "closed"}


def test_a_deadline_is_answered_while_every_lane_is_busy(node: str, start: Callable[[str], Process]) -> None:
    start("stuck")

    async def body(scorer: FanInScorer) -> None:
        await scorer.found(1)
        first = asyncio.create_task(scorer.submit(numbered(1, 32)))
        await until(lambda: scorer.search.connections[0].board.inflight_rows >= 16)
        with pytest.raises(DeadlineExceeded, match="deadline: got past it in the queue or on the device, expected the scores"):
            await scorer.submit(numbered(2, 3), deadline=time.monotonic() + 0.3)
        with pytest.raises(DeadlineExceeded, match="deadline: got past it before it was queued"):
            await scorer.submit(numbered(2, 3), deadline=time.monotonic())
        assert not first.done()
        first.cancel()

    with_scorer(node, body)


def test_what_goes_wrong_with_one_engine_does_not_end_the_search_for_others(
    node: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: Callable[[str], Process]
) -> None:
    greet = handshake.greet

    def odd(sock: socket.socket, index: int, *rest: Any) -> Agreement:
        if index == 0:
            sock.close()
            raise OverflowError("a board of 2**80 bytes")
        return greet(sock, index, *rest)

    monkeypatch.setattr(handshake, "greet", odd)
    start("engine")

    async def body(scorer: FanInScorer) -> None:
        await until(lambda: "engine 0: a board of 2**80 bytes" in caplog.text)
        start("engine")
        await scorer.found(1)
        assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

    with_scorer(node, body)


def test_an_engine_that_does_not_answer_keeps_nobody_from_another(
    node: str, monkeypatch: pytest.MonkeyPatch, start: Callable[[str], Process]
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 600)
    with handshake.listen(meeting_place("test", node)) as hung:

        async def body(scorer: FanInScorer) -> None:
            await asyncio.to_thread(select.select, [hung], [], [], 20)  # it has been called
            await asyncio.to_thread(start, "engine")
            await scorer.found(1)
            assert scorer.search.connections[0].index == 1
            assert rows_of(await scorer.submit(numbered(1, 3))) == numbers(1, 3)

        with_scorer(node, body)


def test_an_engine_that_closes_before_it_has_answered_is_as_one_that_is_not_there(
    node: str, caplog: pytest.LogCaptureFixture, start: Callable[[str], Process]
) -> None:
    listener = handshake.listen(meeting_place("test", node))

    async def body(scorer: FanInScorer) -> None:
        await asyncio.to_thread(select.select, [listener], [], [], 20)
        listener.close()
        start("engine")
        await scorer.found(1)
        assert scorer.search._refused == {}

    with_scorer(node, body)


def test_all_names_are_tried_at_first_then_the_first_free_ones_always_and_the_others_in_turn(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[int]] = [[]]
    engine: Any = SimpleNamespace(index=0, board=SimpleNamespace(leaving=False))

    async def sleep(_: float) -> None:
        looks.append([])
        if len(looks) > 2 * MOST_ENGINES:
            raise asyncio.CancelledError

    def refuse(_: str, index: int) -> socket.socket:
        looks[-1].append(index)
        raise ConnectionRefusedError

    async def main(connected: list[Any]) -> None:
        scorer = FanInScorer(meeting_place("test", node), "m", FINGERPRINT, LAYOUT, 1, most_rows=2000)
        scorer.search.connections = connected
        with monkeypatch.context() as patch, contextlib.suppress(asyncio.CancelledError):
            patch.setattr(handshake, "connect", refuse)
            patch.setattr("deployments.fanin.engine_search.asyncio.sleep", sleep)
            await scorer.search._task
        scorer.search.connections = []
        await scorer.close()

    asyncio.run(main([engine]))
    others = list(range(1, MOST_ENGINES))
    assert looks[0] == others
    assert all(look[:2] == [1, 2] and len(look) <= 3 for look in looks[1:-1])
    assert {index for look in looks[1 : MOST_ENGINES + 1] for index in look} == set(others)
    looks[:] = [[]]
    asyncio.run(main([]))  # without any engine nothing is left out
    assert all(look == [0, *others] for look in looks[:-1])
