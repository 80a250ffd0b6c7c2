"""An ingress's search for engines: those of its node, which come and go, and while none of them stays, one of another node.

Knows no Ray and no HTTP.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from itertools import count

from deployments.config import MOST_ENGINES
from deployments.fanin import handshake
from deployments.fanin.connection import Connection
from deployments.fanin.far import FarEngines
from deployments.fanin.handshake import Agreement, Hello, Welcome
from deployments.fanin.request_memory import RequestMemory
from dpiframe_core.errors import Unavailable

log = logging.getLogger(__name__)

_REFUSED_S = 2.0  # until an engine is asked again that would not have this ingress
_REFUSED_BY_ALL_S = 0.2  # the same while no other one stays: it may be about to load what is asked for
_FAILED_S = 1.0  # how long others are preferred to an engine whose device has failed
_LOOK_S = 0.1  # between two looks for engines
_FAR_S = 1.0  # and for those of other nodes, while there is none here
_MISSES = 2  # names in vain, once there are engines: all sixteen, ten times a second, took 0.5 % of each ingress


class EngineSearch:
    """Looks from now on until it is closed. Make and use it on one event loop.

    Args:
        place: where engines of this node listen. hello: what is asked of them. memory: what they read requests from.
        far: how engines of other nodes are reached, if there may be any.

    Attributes:
        connections: to the engines of this node. far_welcome: of one elsewhere, while none stays here.
    """

    def __init__(
        self, place: str, hello: Hello, memory: RequestMemory, clock: Callable[[], float], far: FarEngines | None = None
    ) -> None:
        self.hello, self.far = hello, far
        self._place, self._memory, self._clock, self._far_at = place, memory, clock, -math.inf
        self.connections: list[Connection] = []
        self.far_welcome: Welcome | None = None
        self._refused: dict[int, tuple[float, str]] = {}  # by index: when, and why
        self._greeting: dict[int, asyncio.Task[None]] = {}  # by index: an engine has five seconds to answer
        self._changed = asyncio.Event()
        self._closing = False
        self._task = asyncio.create_task(self._look(), name="fanin-search")

    @property
    def accepting(self) -> bool:
        """Whether a request can go anywhere."""
        return bool(self.connections or self.far_welcome) and not self._closing

    @property
    def goes_far(self) -> bool:
        """Whether all engines of this node are about to leave, or gone, and there is one elsewhere."""
        return self.far_welcome is not None and not self._closing and not self._staying

    @property
    def welcome(self) -> Welcome:
        """What the first engine says of itself; they all serve one configuration.

        Raises:
            Unavailable: there is none.
        """
        if self.connections:
            return self.connections[0].welcome
        if self.far_welcome is None:
            raise no_engine()
        return self.far_welcome

    @property
    def best(self) -> Connection:
        """The engine of this node with the fewest rows. Raises Unavailable: there is none."""
        if not self.connections or self._closing:
            raise no_engine()
        if len(self.connections) == 1:
            return self.connections[0]
        # An engine that fails all it is given at once has the shortest queue of all. Each second a few requests try it.
        since = self._clock() - _FAILED_S
        return min(self.connections, key=lambda c: (c.board.leaving, c.failed_at > since, c.load))

    async def found(self, engines: int) -> None:
        """Returns when so many are connected, or one of another node answers."""
        while len(self.connections) < engines and self.far_welcome is None:
            self._changed.clear()
            await self._changed.wait()

    async def greeted_again(self, connection: Connection, memory: RequestMemory) -> Agreement:
        """A second agreement with the same engine, over other memory. Raises as `greet`."""
        sock = handshake.connect(self._place, connection.index)
        hello = self.hello.model_copy(update={"memory_bytes": memory.size})
        return await handshake.greeted(sock, connection.index, hello, memory)

    def leave(self) -> None:
        """Leaves all engines, for good: what is open fails with Unavailable, and so does all that comes."""
        self._closing = True
        for task in (self._task, *self._greeting.values()):
            task.cancel()
        for connection in self.connections:
            connection.close()
        self.connections.clear()

    async def close(self) -> None:
        """`leave`, and returns when no engine has this ingress."""
        self.leave()
        await asyncio.gather(self._task, *self._greeting.values(), return_exceptions=True)
        self.leave()  # what it has found meanwhile

    @property
    def _staying(self) -> int:
        return sum(not c.board.leaving for c in self.connections)

    async def _look(self) -> None:
        """Connects to engines that are new; leaves those that want it, once nothing of ours is there.

        An engine takes the first free name. So once there are engines, only the first names without one are tried each time,
        and one of the others in turn.
        """
        for turn in count():
            known = {c.index for c in self.connections if not c.board.leaving} | self._greeting.keys()
            missed, most = 0, _MISSES if turn and self.connections else MOST_ENGINES
            for index in range(MOST_ENGINES):
                tried = missed < most or index == turn % MOST_ENGINES
                if tried and index not in known and not self._put_off(index):
                    missed += not await self._connect(index)
            await self._look_far()
            elsewhere = self._staying or self.far_welcome
            for connection in [c for c in self.connections if elsewhere and c.board.leaving and c.idle]:
                connection.close()
                self.connections.remove(connection)
            await asyncio.sleep(_LOOK_S)

    def _put_off(self, index: int) -> bool:
        """Whether an engine has refused this ingress too recently to be asked again."""
        at, _ = self._refused.get(index, (-math.inf, ""))
        return self._clock() < at + (_REFUSED_S if self._staying else _REFUSED_BY_ALL_S)

    async def _connect(self, index: int) -> bool:
        """Whether anybody has that name. Who is slow to answer is waited for no longer than until the next look is due."""
        try:
            sock = handshake.connect(self._place, index)
        except ConnectionError:
            self._refused.pop(index, None)
            return False
        except Exception as error:
            self._refuse(index, error)
            return True
        task = self._greeting[index] = asyncio.create_task(self._greet(sock, index), name="fanin-greet")
        task.add_done_callback(lambda _: self._greeting.pop(index))
        await asyncio.wait([task], timeout=_LOOK_S)
        return True

    async def _greet(self, sock: socket.socket, index: int) -> None:
        try:
            agreed = await handshake.greeted(sock, index, self.hello, self._memory)
        except Exception as error:  # of another bundle, or nothing that we know; the search must go on
            self._refuse(index, error)
            return
        self._refused.pop(index, None)
        self.connections.append(Connection(agreed, asyncio.get_running_loop(), self._lose, self._clock))
        self._changed.set()

    def _refuse(self, index: int, error: Exception) -> None:
        _, before = self._refused.pop(index, (0.0, ""))
        if isinstance(error, ConnectionError):  # it was about to end
            return
        self._refused[index] = self._clock(), str(error)
        if before != str(error):  # it is asked for as long as it has that name
            log.warning("engine %d: %s", index, error)

    async def _look_far(self) -> None:
        """Once a second while no engine of this node stays."""
        if self.far is None or self._staying:
            self.far_welcome = None
        elif self._far_at + _FAR_S <= self._clock():
            try:
                self.far_welcome = await self.far.greet()
            except Unavailable:
                self.far_welcome = None
            self._far_at = self._clock()
            self._changed.set()

    def _lose(self, connection: Connection) -> None:
        log.warning("engine %d is gone", connection.index)
        self.connections.remove(connection)
        if self.far is not None and not self._staying:  # they all serve one configuration; the next look makes sure
            self.far_welcome, self._far_at = connection.welcome, -math.inf


def no_engine() -> Unavailable:
    return Unavailable("engine: got none on this node, expected one")
