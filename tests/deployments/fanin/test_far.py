"""An ingress whose node has no engine: engines of other nodes answer, by calls, until there is one here again."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from deployments.batching.batcher import RowBatcher
from deployments.batching.scorer import Scored
from deployments.fanin.far import FarAnswer, FarAsk, HandleEngines, answer
from deployments.fanin.handshake import Welcome
from deployments.fanin.scorer import FanInScorer
from dpiframe_core.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.deployments.fanin.doubles import FINGERPRINT, connect, engine_of, rows_of
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers, until


class OtherNode:
    """An engine that calls reach. `up`: whether it answers. `asks`: what it was asked."""

    def __init__(self, device: FakeDevice, max_queued_rows: int = 100) -> None:
        self.batcher = RowBatcher(device, max_batch_rows=8, lanes=1, max_queued_rows=max_queued_rows)
        self.up, self.asks, self.greeted = True, list[FarAsk](), 0

    async def greet(self) -> Welcome:
        self.greeted += 1
        if not self.up:
            raise Unavailable("engine of another node: got nobody")
        return Welcome(device="cpu", max_batch_rows=8, max_queued_rows=100)

    async def ask(self, ask: FarAsk) -> FarAnswer:
        self.asks.append(ask)
        return await answer(ask, self.batcher, LAYOUT, time.monotonic)


Body = Callable[[FanInScorer, OtherNode, FakeDevice], Coroutine[Any, Any, None]]


def run(body: Body, *, open_: bool = True) -> None:
    async def main() -> None:
        device = FakeDevice(open_=open_)
        other = OtherNode(device)
        scorer = FanInScorer("\0dpiframe-far", "m", FINGERPRINT, LAYOUT, 1, most_rows=1000, far=other)
        try:
            async with asyncio.timeout(30):
                await body(scorer, other, device)
        finally:
            device.release(1000)
            await scorer.close()
            await other.batcher.close(5)

    asyncio.run(main())


def test_without_an_engine_here_one_of_another_node_scores_blocks_of_either_kind_of_memory() -> None:
    async def body(scorer: FanInScorer, other: OtherNode, device: FakeDevice) -> None:
        await scorer.found(1)
        assert scorer.accepting
        assert scorer.search.welcome.max_batch_rows == 8
        assert rows_of(await scorer.submit(numbered(3, 20))) == numbers(3, 20)
        block = scorer.allocate(LAYOUT, 5, 1)
        block.fill((numbered(4, 5),))
        assert rows_of(await scorer.submit(block)) == numbers(4, 5)
        assert [(ask.model, ask.fingerprint, ask.left_s) for ask in other.asks] == [("m", FINGERPRINT, None)] * 2

    run(body)


def test_an_engine_here_is_preferred_and_the_other_node_is_not_even_greeted() -> None:
    async def body(scorer: FanInScorer, other: OtherNode, device: FakeDevice) -> None:
        await scorer.found(1)
        engine = engine_of(FakeDevice(), time.monotonic)
        _, peer = connect(scorer, engine)
        await until(lambda: scorer.search.far_welcome is None)
        greeted, sent = other.greeted, asyncio.create_task(scorer.submit(numbered(1, 2)))
        await until(lambda: engine.dispatcher.step())
        assert rows_of(await sent) == numbers(1, 2)
        await asyncio.sleep(0.3)
        assert (other.asks, other.greeted) == ([], greeted)
        engine.board.leave()  # it is about to go: new requests go elsewhere once there is somebody
        await until(lambda: scorer.search.far_welcome is not None)
        assert rows_of(await scorer.submit(numbered(2, 2))) == numbers(2, 2)
        assert len(other.asks) == 1
        engine.close(0)
        peer.sock.close()

    run(body)


def test_the_death_of_the_only_engine_here_leaves_no_moment_without_one() -> None:
    async def body(scorer: FanInScorer, other: OtherNode, device: FakeDevice) -> None:
        engine = engine_of(FakeDevice(), time.monotonic)
        connection, peer = connect(scorer, engine)
        await until(lambda: scorer.search.far_welcome is None)
        engine.leave(peer)
        peer.sock.close()
        await until(lambda: not connection.alive)
        assert scorer.accepting
        assert rows_of(await scorer.submit(numbered(2, 2))) == numbers(2, 2)
        engine.close(0)

    run(body)


def test_where_nobody_is_left_the_ingress_says_so_and_comes_back_with_the_first_one() -> None:
    async def body(scorer: FanInScorer, other: OtherNode, device: FakeDevice) -> None:
        await scorer.found(1)
        other.up = False
        await until(lambda: not scorer.accepting)
        with pytest.raises(Unavailable):
            await scorer.submit(numbered(1, 1))
        other.up = True
        await until(lambda: scorer.accepting)
        assert rows_of(await scorer.submit(numbered(1, 1))) == numbers(1, 1)

    run(body)


def test_what_the_other_node_refuses_is_refused_here_in_the_same_words() -> None:
    async def body(scorer: FanInScorer, other: OtherNode, device: FakeDevice) -> None:
        await scorer.found(1)
        first = asyncio.create_task(scorer.submit(numbered(1, 8)))
        await until(lambda: device.batches != [])
        second = asyncio.create_task(scorer.submit(numbered(2, 90)))
        await until(lambda: other.batcher.dispatcher.queued_rows == 90)
        with pytest.raises(Overloaded, match=r"^queue: got 90 rows waiting, expected at most 89; retry after") as caught:
            await scorer.submit(numbered(3, 11))
        assert caught.value.retry_after_s > 0
        device.fail_on = 1000
        device.release(1000)
        with pytest.raises(Unavailable, match="device: got an error on this request's batch"):
            await first
        assert rows_of(await second) == numbers(2, 90)

    run(body, open_=False)


def test_a_deadline_is_kept_here_and_told_there_as_what_is_left_of_it() -> None:
    async def body(scorer: FanInScorer, other: OtherNode, device: FakeDevice) -> None:
        await scorer.found(1)
        with pytest.raises(DeadlineExceeded):
            await scorer.submit(numbered(1, 2), time.monotonic() + 0.5)
        [ask] = other.asks
        assert ask.left_s is not None
        assert 0 < ask.left_s <= 0.5
        await until(lambda: not other.batcher.dispatcher.queued_rows)

    run(body, open_=False)


class Handle:
    """Serve's handle, as far as it is used: a method's `remote` gives something to await."""

    def __init__(self, given: Any) -> None:
        self.greet = self.answer = self
        self._given = given

    def remote(self, *_: object) -> Any:
        async def later() -> Any:
            if isinstance(self._given, Exception):
                raise self._given
            return self._given

        return later()


@pytest.mark.parametrize("given", [RuntimeError("the actor died"), Welcome(refused="another bundle"), None, TimeoutError()])
def test_whatever_becomes_of_a_call_is_told_as_an_engine_that_is_not_there(given: Any) -> None:
    async def main() -> None:
        engines = HandleEngines(Handle(given), "m", FINGERPRINT)
        with pytest.raises(Unavailable, match=r"^engine of another node: "):
            await engines.greet()
        with pytest.raises(Unavailable, match=r"^engine of another node: "):
            await engines.ask(FarAsk("m", FINGERPRINT, b"", None, 0))

    asyncio.run(main())


def test_scores_of_several_tasks_come_back_in_their_shape() -> None:
    from deployments.fanin.far import scored

    async def main() -> None:
        scores = np.arange(6, dtype=np.float32).reshape(3, 2)

        async def ask(_: FarAsk) -> FarAnswer:
            return FarAnswer(scores=scores.tobytes(), queue_ms=1.5, device_ms=0.5)

        got: Scored = await scored(ask, FarAsk("m", FINGERPRINT, b"", None, 0), 3)
        assert np.array_equal(got.scores, scores)
        assert (got.queue_ms, got.device_ms) == (1.5, 0.5)

    asyncio.run(main())
