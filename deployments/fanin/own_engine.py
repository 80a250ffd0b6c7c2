"""An engine in the process of its only ingress: requests go to it as to one of a process beside, those that C sends too."""

import asyncio
import contextlib
import time
import uuid
from typing import Self

from deployments.batching.dispatcher import Dispatcher
from deployments.fanin.acceptor import Acceptor
from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.handshake import meeting_place
from deployments.fanin.peer import PeerRequest
from deployments.fanin.scorer import FanInScorer
from dpiframe_core.errors import Unavailable

_MEETS_S, _LOOK_S = 30.0, 0.01


class OwnEngine:
    """Both ends of a fan-in of one ingress. Make and close it on the ingress's event loop.

    Attributes:
        scorer: the ingress's. dispatcher: the engine's.
    """

    def __init__(self, batcher: FanInBatcher, label: str, most_rows: int) -> None:
        """As `FanInScorer`, which looks for the engine from now on."""
        place = meeting_place("", uuid.uuid4().hex)  # which nobody else knows
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(place, {label: batcher})
        self.dispatcher: Dispatcher[PeerRequest] = batcher.dispatcher
        self.scorer = FanInScorer(place, label, batcher.fingerprint, batcher.layout, batcher.tasks, most_rows=most_rows)

    @classmethod
    async def met(cls, batcher: FanInBatcher, label: str, most_rows: int) -> Self:
        """One whose ends have found each other.

        Raises:
            Unavailable: they did not, within half a minute; the log has why.
        """
        own = cls(batcher, label, most_rows)
        try:
            await asyncio.wait_for(own.scorer.found(1), _MEETS_S)
        except BaseException as error:
            await own.close(0)
            if isinstance(error, TimeoutError):
                raise Unavailable(f"engine: got none of this process within {_MEETS_S:g} s, expected its own") from error
            raise
        return own

    def fail(self, why: str) -> None:
        """Answers what is open with Unavailable, and all that comes. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to answer
            self._loop.call_soon_threadsafe(self.scorer.search.leave)

    async def close(self, drain_s: float) -> None:
        """Gives what is open so many seconds to end; the rest is answered with Unavailable."""
        give_up = time.monotonic() + drain_s
        while not all(c.idle for c in self.scorer.connections) and time.monotonic() < give_up:
            await asyncio.sleep(_LOOK_S)
        await self.scorer.close()
        await asyncio.to_thread(self._acceptor.close, drain_s)
