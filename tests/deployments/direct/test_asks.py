"""What an ingress asks engines for at once: an engine works by asks more than by rows, so requests that can go together do."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from deployments.config import Limits
from deployments.direct import direct_server
from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from dpiframe_core.features.row_block import BatchResult, RowBlock
from tests.deployments.direct.test_express import Ingress, expected, post, scores
from tests.deployments.fanin.doubles import FINGERPRINT
from tests.deployments.serving_doubles import SCHEMA, FakeEngine, until


class Counting(FakeEngine):
    """Counts the asks that came to it, and says that its runs took so long."""

    def __init__(self, device_ms: float = 0.5) -> None:
        super().__init__()
        self.asks, self._device_ms = 0, device_ms

    def run_batch(self, blocks: Sequence[RowBlock]) -> BatchResult:
        self.asks += len(blocks)
        return super().run_batch(blocks)._replace(device_ms=self._device_ms)


@pytest.mark.parametrize(
    ("rows", "priority", "device_ms", "asks"),
    [
        pytest.param(3, 0, 0.5, 3, id="the last three wait for one another"),
        pytest.param(3, 1, 0.5, 5, id="those that are to go first do not wait"),
        pytest.param(3, 0, 2.0, 5, id="none waits for a run of milliseconds"),
        pytest.param(600, 0, 0.01, 5, id="nor where a second one has no room beside it"),
    ],
)
def test_requests_wait_for_one_another_while_their_engine_has_not_read_the_last_ask(
    rows: int, priority: int, device_ms: float, asks: int
) -> None:
    engine = Counting(device_ms)

    def sent(first: int) -> bytes:
        return post(first=first, rows=rows, priority=priority)

    async def test(at: Ingress) -> None:
        dispatcher = at.batchers["7"].dispatcher
        clients = [await at.client() for _ in range(5)]
        await at.learned(clients[0], sent(0))
        engine.go.clear()
        clients[0].send(sent(0))
        await until(lambda: dispatcher.inflight_rows > 0)
        for first, client in enumerate(clients[1:], 1):
            client.send(sent(first))
            await asyncio.sleep(0.05)
        (ring,) = (peer.rings.asks for peer in at.batchers["7"]._peers if peer.tickets)
        read = ring._at
        assert ring._published[0] - read == (1 if asks == 3 else 4)
        engine.go.set()
        for first, client in enumerate(clients):
            assert scores(await client.answer()) == expected(first=first, rows=rows)
        assert ring._published[0] - read == asks - 1

    limits = Limits(max_body_bytes=200_000, max_rows_per_request=1000)
    assert [one.outcome for one in Ingress(True, engine, limits=limits, queued=5000).run(test)] == ["ok"] * 5


@pytest.mark.parametrize("device_ms", [0.5, 2.0])
@pytest.mark.parametrize(("waiting", "at_first"), [(150, 0), (50, 1)])
def test_a_request_waits_for_others_a_moment_while_a_batch_waits_before_it(
    monkeypatch: pytest.MonkeyPatch, device_ms: float, waiting: int, at_first: int
) -> None:
    monkeypatch.setattr(direct_server, "_TICK_S", 3600.0)  # which looks at what is kept back, too
    engine = Counting(device_ms)
    in_the_moment = False

    async def test(at: Ingress) -> None:
        nonlocal in_the_moment
        clients = [await at.client() for _ in range(3)]
        await at.learned(clients[0], post())
        asks = at.batchers["7"]._peers[-1].rings.asks  # C's; the one before it is Python's
        (ring,) = at.server._express._tracks
        (connection,) = at.live.scorer.connections
        engine.go.clear()
        clients[0].send(post(rows=10))  # by Python's way: a run, and what waits
        await until(lambda: connection.board.inflight_rows == 10)
        clients[1].send(post(rows=waiting))
        await until(lambda: connection.waiting_rows == waiting)
        begun, sent = asks._published[0], time.monotonic()
        clients[2].send(post(first=2))
        while not ring.open:
            await asyncio.sleep(0)
        published = asks._published[0] - begun  # of the round that began it: this task is before the next one
        in_the_moment = time.monotonic() - sent < 1e-3
        assert published == at_first or not in_the_moment
        await until(lambda: asks._published[0] == begun + 1)
        engine.go.set()
        for rows, client in zip((10, waiting, 3), clients, strict=True):
            assert scores(await client.answer()) == expected(rows, *([2] if rows == 3 else []))

    limits = Limits(max_body_bytes=200_000, max_rows_per_request=1000)
    give_up = time.monotonic() + 60
    while not in_the_moment:  # on a busy host the moment may be over before anything has come
        assert time.monotonic() < give_up
        engine.go.set()
        assert [one.outcome for one in Ingress(True, engine, limits=limits).run(test)] == ["ok"] * 3


@asynccontextmanager
async def joined(at: Ingress, engine: FakeEngine) -> AsyncIterator[FanInBatcher]:
    """A second engine of the node, which the ingress has found."""
    batcher = FanInBatcher(
        engine.run_batch, SCHEMA.block_layout, 1, FINGERPRINT, max_batch_rows=64, lanes=1, max_queued_rows=1000
    )
    acceptor = Acceptor(at.scorers["7"].search._place, {"7": batcher})
    try:
        await at.scorers["7"].found(2)
        yield batcher
    finally:
        for each in (*at.engines, engine):
            each.go.set()
        await asyncio.to_thread(acceptor.close, 5)


def test_what_waits_for_one_of_two_busy_engines_is_joined_though_the_other_has_less_to_do_by_now() -> None:
    engines = Counting(), Counting()

    async def test(at: Ingress) -> None:
        async with joined(at, engines[1]) as second:
            clients = [await at.client() for _ in range(7)]
            await at.learned(clients[0], post())
            for engine in engines:
                engine.go.clear()
                engine.asks = 0
            # One each runs. Then: behind the first run, behind the second by Python's way, kept back behind the first, there by
            # Python's way, and the last.
            rows = [3, 3, 3, 10, 3, 20, 3]
            begun = at.in_python
            for first, client in enumerate(clients):
                client.send(post(first=first, rows=rows[first]))
                await asyncio.sleep(0.05)
            assert at.batchers["7"].dispatcher.inflight_rows == second.dispatcher.inflight_rows == 3
            assert at.in_python == begun + 2
            for engine in engines:
                engine.go.set()
            for first, client in enumerate(clients):
                assert scores(await client.answer()) == expected(first=first, rows=rows[first])
            assert sorted(engine.asks for engine in engines) == [2, 4]

    assert [one.outcome for one in Ingress(True, engines[0]).run(test)] == ["ok"] * 7
