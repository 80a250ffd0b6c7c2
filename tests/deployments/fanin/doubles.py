"""Both ends of the fan-in in one process, without threads and without an acceptor: a test decides when a lane takes a step.

And an ingress for tests whose engine has one.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.batching.dispatcher import Run
from deployments.batching.scorer import Scored
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.board import Board
from deployments.fanin.connection import Connection
from deployments.fanin.handshake import Agreement, meeting_place
from deployments.fanin.peer import Peer
from deployments.fanin.rings import Rings
from deployments.fanin.scorer import FanInScorer
from deployments.fanin.shared_memory import shared_memory
from tests.deployments.serving_doubles import LAYOUT

FINGERPRINT = "f" * 64


def engine_of(run: Run, clock: Callable[[], float], *, max_batch_rows: int = 10, max_queued_rows: int = 1000) -> FanInBatcher:
    """An engine whose only lane is whoever calls `engine.dispatcher.step()`."""
    return FanInBatcher(
        run,
        LAYOUT,
        1,
        FINGERPRINT,
        max_batch_rows=max_batch_rows,
        lanes=0,
        max_queued_rows=max_queued_rows,
        clock=clock,
    )


def scorer_of(clock: Callable[[], float], most_rows: int = 1000) -> FanInScorer:
    """An ingress that finds no engine by itself. To be called on its event loop."""
    return FanInScorer(f"\0dpiframe-test-{os.getpid()}", "m", FINGERPRINT, LAYOUT, 1, most_rows=most_rows, clock=clock)


def connect(scorer: FanInScorer, engine: FanInBatcher, index: int = 0) -> tuple[Connection, Peer]:
    """What the acceptor does. To be called on the scorer's event loop."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rings_fd = shared_memory("test", Rings.NBYTES)
    answer_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    peer = Peer(there, os.dup(scorer._memory.fd), os.dup(rings_fd), os.dup(answer_fd), scorer._memory.size)
    engine.join(peer)
    here.setblocking(False)
    board = Board(engine.board_fd, engine.welcome.max_batch_rows)
    agreed = Agreement(index, here, Rings(rings_fd), board, answer_fd, os.dup(engine.dispatcher.wake_fd), engine.welcome)
    os.close(rings_fd)
    connection = Connection(agreed, asyncio.get_running_loop(), scorer.search._lose, scorer._clock)
    scorer.search.connections.append(connection)
    return connection, peer


def with_scorer(node: str, body: Callable[[FanInScorer], Coroutine[Any, Any, None]]) -> None:
    """Runs `body` with an ingress that finds the engines of the test's node."""

    async def main() -> None:
        scorer = FanInScorer(meeting_place("test", node), "m", FINGERPRINT, LAYOUT, 1, most_rows=2000)
        try:
            async with asyncio.timeout(60):
                await body(scorer)
        finally:
            await scorer.close()

    asyncio.run(main())


def rows_of(scored: Scored) -> list[int]:
    return [int(score) for score in scored.scores[:, 0]]
