"""Both ends of the fan-in in one process, without threads and without the door: a test decides when a lane takes a step.

And an ingress for tests whose engine is behind a door.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.batching.batcher import Scored
from deployments.batching.dispatcher import Run
from deployments.fanin.batcher import FanInEngine, Peer
from deployments.fanin.connection import Link
from deployments.fanin.handshake import meeting_place
from deployments.fanin.rings import Channel, shared_memory
from deployments.fanin.scorer import FanInScorer
from tests.deployments.serving_doubles import LAYOUT

FINGERPRINT = "f" * 64


def engine_of(run: Run, clock: Callable[[], float], *, max_batch_rows: int = 10, max_queued_rows: int = 1000) -> FanInEngine:
    """An engine whose only lane is whoever calls `engine.lanes.step()`."""
    return FanInEngine(
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


def connect(scorer: FanInScorer, engine: FanInEngine, index: int = 0) -> tuple[Link, Peer]:
    """What the door does. To be called on the scorer's event loop."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel_fd = shared_memory("test", Channel.NBYTES)
    answer_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    peer = Peer(there, os.dup(scorer._slab.fd), os.dup(channel_fd), os.dup(answer_fd), scorer._slab.size)
    engine.join(peer)
    fds = answer_fd, os.dup(engine.board_fd), os.dup(engine.lanes.wake_fd)
    here.setblocking(False)
    link = Link(index, scorer._slab, here, Channel(channel_fd), fds, engine.welcome)
    os.close(channel_fd)
    link.attach(asyncio.get_running_loop(), scorer._lose, scorer._clock)
    scorer._links.append(link)
    return link, peer


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
