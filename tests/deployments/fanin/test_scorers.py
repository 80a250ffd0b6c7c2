"""What both topologies promise for every sequence of arrivals, cancellations, expiries, failures and deaths."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.batching.batcher import RowBatcher
from deployments.batching.dispatcher import Dispatcher
from deployments.batching.scorer import Scored, Scorer
from deployments.fanin.peer import Peer
from deployments.fanin.rings import SLOTS
from deployments.fanin.scorer import FanInScorer
from dpiframe_core.errors import DeadlineExceeded, Overloaded, Unavailable
from dpiframe_core.features.row_block import BatchResult, RowBlock
from tests.deployments.fanin.doubles import connect, engine_of, scorer_of
from tests.deployments.serving_doubles import LAYOUT, numbered

T = TypeVar("T")

BATCH, BOUND = 10, 60


@dataclass(eq=False)
class Sent:
    number: int
    rows: int
    priority: int
    deadline: float | None
    task: asyncio.Task[Scored]
    where: object
    gone: bool = False  # cancelled, or its ingress died: from the next batch on no row of it may be seen
    failed: bool = False  # some of its rows were in a run that failed
    seen: list[int] = field(default_factory=list)


class ScorerMachine(RuleBasedStateMachine):
    """One lane, stepped by hand on a clock that stands still; the device checks each batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 100.0
        self.sent: list[Sent] = []
        self.fail = False
        self.takes = 0.0  # seconds of a run
        self.during: Callable[[], None] = lambda: None
        self.start()

    # What differs.

    def start(self) -> None:
        raise NotImplementedError

    def scorers(self) -> Sequence[Scorer]:
        raise NotImplementedError

    def dispatcher(self) -> Dispatcher[Any]:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def turn(self) -> bool:
        """What a lane's thread does: one batch, if there is one."""
        return self.dispatcher().step()

    # What is common.

    def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def pump(self) -> None:
        """Lets the event loop do all that it can do now."""

        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.on_loop(turns())

    def device(self, blocks: Sequence[RowBlock]) -> BatchResult:
        rows = [int(i) for block in blocks for i in block.wide_ids("candidate_ids")[:, 0]]
        contexts = [int(block.wide_ids("context_ids")[q, 0]) for block in blocks for q in block.request_of_row]
        assert contexts == [row // 1000 for row in rows]
        assert 1 <= len(rows) <= BATCH
        priorities = []
        for row in rows:
            request = self.sent[row // 1000]
            assert not request.gone, "a request that is gone goes no further"
            assert request.deadline is None or request.deadline > self.now, "nor does one that has expired"
            assert len(request.seen) == row % 1000, "each row once, and in order"
            request.seen.append(row)
            priorities.append(request.priority)
        assert priorities == sorted(priorities, reverse=True)
        during, self.during = self.during, lambda: None
        during()
        self.now += self.takes
        if self.fail:
            for row in rows:
                self.sent[row // 1000].failed = True
            raise RuntimeError("the device failed")
        return BatchResult(np.array(rows, np.float32)[:, None], 1.0, len(rows))

    @rule(
        rows=st.integers(1, 27),
        priority=st.integers(-1, 1),
        wait=st.none() | st.integers(1, 4),
        which=st.integers(0, 1),
        in_place=st.booleans(),
    )
    def submit(self, rows: int, priority: int, wait: int | None, which: int, in_place: bool) -> None:
        scorers = self.scorers()
        scorer = scorers[which % len(scorers)]
        block = numbered(len(self.sent), rows)
        if in_place:
            try:
                placed = scorer.allocate(LAYOUT, rows, 1)
            except Overloaded:
                return
            placed.fill((block,))
            block = placed
        self._send(scorer, block, priority, wait)
        self.pump()

    def _send(self, scorer: Scorer, block: RowBlock, priority: int, wait: int | None) -> None:
        deadline = None if wait is None else self.now + wait * 1000
        task = self.loop.create_task(scorer.submit(block, deadline, priority))
        self.sent.append(Sent(len(self.sent), block.rows, priority, deadline, task, scorer))

    def open(self) -> list[Sent]:
        return [request for request in self.sent if not request.task.done()]

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel(data.draw(st.sampled_from(self.open())))

    def _cancel(self, request: Sent) -> None:
        request.task.cancel()
        request.gone = True
        self.pump()

    @rule()
    def tick(self) -> None:
        self.now += 1000

    @rule(fail=st.booleans(), data=st.data())
    def step(self, fail: bool, data: st.DataObject) -> None:
        """One batch. While it is on the device, a request may be cancelled, whether its rows are there or wait."""
        self.fail = fail and data.draw(st.booleans())
        if self.open() and data.draw(st.booleans()):
            doomed = data.draw(st.sampled_from(self.open()))
            self.during = lambda: self._cancel(doomed)
        self.turn()
        self.fail, self.during = False, lambda: None
        self.pump()

    @invariant()
    def the_bound_holds(self) -> None:
        assert 0 <= self.dispatcher().queue.rows <= BOUND

    @invariant()
    def every_answer_is_the_requests_own(self) -> None:
        for request in self.sent:
            if not request.task.done() or request.task.cancelled():
                assert request.gone or not request.task.done()
                continue
            error = request.task.exception()
            if error is None:
                assert request.task.result().scores[:, 0].tolist() == [1000 * request.number + i for i in range(request.rows)]
            elif isinstance(error, DeadlineExceeded):
                assert request.deadline is not None
                assert request.deadline <= self.now
            elif isinstance(error, Unavailable):
                assert request.failed or request.gone
            else:
                assert isinstance(error, Overloaded)
                assert not request.seen

    def teardown(self) -> None:
        while self.turn():
            self.pump()
        self.pump()
        assert self.open() == [], "every request has its answer"
        self.every_answer_is_the_requests_own()
        assert self.dispatcher().queue.rows == self.dispatcher().inflight_rows == 0
        self.stop()
        self.loop.close()


class ColocatedMachine(ScorerMachine):
    """Once a run has been seen to be short, the event loop runs batches too, until it meets a long one."""

    def start(self) -> None:
        with mock.patch.object(Dispatcher, "start"):
            self.batcher = RowBatcher(self.device, max_batch_rows=BATCH, lanes=1, max_queued_rows=BOUND, clock=lambda: self.now)

    def scorers(self) -> Sequence[Scorer]:
        return (self.batcher,)

    def dispatcher(self) -> Dispatcher[Any]:
        return self.batcher.dispatcher

    def turn(self) -> bool:
        with mock.patch.object(self.batcher, "_thread", 0):  # as if on a thread of its own: its answers are told later
            return super().turn()

    @rule(takes=st.sampled_from((0.0, 1.0)))
    def the_device_changes(self, takes: float) -> None:
        self.takes = takes

    @rule(
        requests=st.lists(st.tuples(st.integers(1, 12), st.integers(-1, 1), st.none() | st.just(1)), min_size=1, max_size=4),
        fail=st.booleans(),
        hang_up=st.booleans(),
    )
    def several_come_in_one_round(self, requests: list[tuple[int, int, int | None]], fail: bool, hang_up: bool) -> None:
        """One may hang up when all are queued and none has been bound."""
        self.fail = fail
        for rows, priority, wait in requests:
            self._send(self.batcher, numbered(len(self.sent), rows), priority, wait)
        self.on_loop(asyncio.sleep(0))
        if hang_up and not self.sent[-1].task.done():
            self._cancel(self.sent[-1])
        self.pump()
        self.fail = False

    def stop(self) -> None:
        self.on_loop(self.batcher.close(1))


class FanInMachine(ScorerMachine):
    """Two ingresses, which may die and come back."""

    def start(self) -> None:
        self.engine = engine_of(self.device, lambda: self.now, max_batch_rows=BATCH, max_queued_rows=BOUND)
        self.ingresses: list[tuple[FanInScorer, Peer]] = []
        for _ in range(2):
            self.on_loop(self._arrive())

    async def _arrive(self) -> None:
        scorer = scorer_of(lambda: self.now, most_rows=200)
        _, peer = connect(scorer, self.engine)
        self.ingresses.append((scorer, peer))

    def scorers(self) -> Sequence[Scorer]:
        return [scorer for scorer, _ in self.ingresses]

    def dispatcher(self) -> Dispatcher[Any]:
        return self.engine.dispatcher

    @rule(during=st.booleans())
    def an_ingress_dies_and_another_comes(self, during: bool) -> None:
        """As it is seen by the engine: the connection ends."""

        def die() -> None:
            scorer, peer = self.ingresses.pop(0)
            self.engine.leave(peer)
            peer.sock.close()
            for request in self.sent:
                if request.where is scorer:
                    request.gone = True
            self.pump()
            assert not [request for request in self.open() if request.where is scorer], "nobody waits for a dead engine"
            self.on_loop(scorer.close())

        if during:
            self.during = die
            self.dispatcher().step()
            if self.during is die:  # there was no batch
                self.during = lambda: None
                die()
        else:
            die()
        self.pump()
        self.on_loop(self._arrive())

    def stop(self) -> None:
        self.sent.clear()
        for scorer, _ in self.ingresses:
            (connection,) = scorer.connections
            assert connection.idle
            assert sorted(connection._free) == list(range(SLOTS))
            assert scorer._memory.free_bytes == scorer._memory.size, "all memory has come back"
            self.on_loop(scorer.close())
        self.engine.close(0)
        for _, peer in self.ingresses:
            peer.sock.close()


TestColocated = ColocatedMachine.TestCase
TestFanIn = FanInMachine.TestCase
TestColocated.settings = TestFanIn.settings = settings(stateful_step_count=30, deadline=None)
