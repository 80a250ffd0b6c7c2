"""The `Scorer` of an ingress of the fan-in: sends each request to the engine process of this node with the fewest rows waiting.

While there is none, to engines of other nodes, if there may be some. Owns the memory that requests are encoded into and the
search for engines, which come and go. Knows no Ray and no HTTP.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from deployments.batching.refusals import check_deadline
from deployments.batching.scorer import Reply, Scored, forwarded
from deployments.config import MOST_ENGINES
from deployments.fanin import handshake
from deployments.fanin.connection import Agreement, Connection, SentRequest, greeted
from deployments.fanin.far import FarAsk, FarEngines
from deployments.fanin.far import scored as far_scored
from deployments.fanin.handshake import Hello, Welcome
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.shared_memory import require_ordered_stores
from dpiframe_core.engine.buckets import Counts
from dpiframe_core.errors import Overloaded, Unavailable
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import Floats, RowBlock

log = logging.getLogger(__name__)

_REFUSED_S = 2.0  # until an engine is asked again that would not have this ingress
_REFUSED_BY_ALL_S = 0.2  # the same while no other one stays: it may be about to load what is asked for
_FAILED_S = 1.0  # how long others are preferred to an engine whose device has failed
_LOOK_S = 0.1  # between two looks for engines
_FAR_S = 1.0  # and for those of other nodes, while there is none here
_MISSES = 2  # names in vain, once there are engines: all sixteen, ten times a second, took 0.5 % of each ingress


class FanInScorer:
    """Scores through the engines that listen in `place`. Make and use it on one event loop.

    Args:
        model, fingerprint: what the engines must serve, by the name that both ends have for it, and of which bundle.
        most_rows: of all requests that may be here at once; the memory has room for them.
        far: how engines of other nodes are reached, if there may be any.
    """

    def __init__(
        self,
        place: str,
        model: str,
        fingerprint: str,
        layout: BlockLayout,
        tasks: int,
        *,
        most_rows: int,
        clock: Callable[[], float] = time.monotonic,
        far: FarEngines | None = None,
    ) -> None:
        require_ordered_stores()
        self._place, self._layout, self._tasks, self._clock = place, layout, tasks, clock
        self._memory = RequestMemory(memory_bytes(layout, tasks, most_rows))
        self._hello = Hello(model=model, fingerprint=fingerprint, memory_bytes=self._memory.size)
        self._connections: list[Connection] = []
        self._far, self._far_at = far, -math.inf
        self._far_welcome: Welcome | None = None  # while there is no engine here, and one elsewhere
        self._refused: dict[int, tuple[float, str]] = {}  # by index: when, and why
        self._changed = asyncio.Event()
        self._closing = False
        self._search = asyncio.create_task(self._look(), name="fanin-search")

    @property
    def accepting(self) -> bool:
        return bool(self._connections or self._far_welcome) and not self._closing

    @property
    def queued_rows(self) -> int:
        """At the engine of this node that has the fewest; what waits at other nodes is not known here."""
        return min((connection.waiting_rows for connection in self._connections), default=0)

    @property
    def engines(self) -> int:
        """How many are connected."""
        return len(self._connections)

    @property
    def connections(self) -> Sequence[Connection]:
        """To the engines of this node."""
        return self._connections

    async def greeted_again(self, connection: Connection, memory: RequestMemory) -> Agreement:
        """A second agreement with the same engine, over other memory. Raises as `greet`."""
        sock = handshake.connect(self._place, connection.index)
        hello = self._hello.model_copy(update={"memory_bytes": memory.size})
        return await greeted(sock, connection.index, hello, memory)

    @property
    def welcome(self) -> Welcome:
        """What the first engine says of itself; they all serve one configuration.

        Raises:
            Unavailable: there is none.
        """
        if self._connections:
            return self._connections[0].welcome
        if self._far_welcome is None:
            raise _no_engine()
        return self._far_welcome

    @property
    def batch_sizes(self) -> Counts:
        """int64[max_batch_rows + 1]: the batches of all engines here since their start, by rows."""
        if not self._connections:
            raise _no_engine()
        each = [c.board.counts for c in self._connections]
        counts = np.zeros(max(map(len, each)), np.int64)  # while a configuration is replaced, they may differ in length
        for one in each:
            counts[: len(one)] += one
        return counts

    async def found(self, engines: int) -> None:
        """Returns when so many are connected, or one of another node answers."""
        while len(self._connections) < engines and self._far_welcome is None:
            self._changed.clear()
            await self._changed.wait()

    def allocate(self, layout: BlockLayout, rows: int, contexts: int) -> RowBlock:
        """Room in the memory for a block and, right behind it, its scores.

        Raises:
            Overloaded: it is full. Unavailable: there is no engine that could empty it.
        """
        size = layout.offsets(rows, contexts)[-1]
        size += rows * self._tasks * 4
        memory = self._memory.take(size)
        if memory is None:
            free = self._memory.free_bytes
            fault = f"request memory: got {free} bytes free at this ingress, expected {size} in one piece"
            raise Overloaded(fault, 1.0) if self._goes_far else self._best().overloaded(fault)
        return RowBlock.formatted(memory, layout, rows, contexts)

    async def submit(self, block: RowBlock, deadline: float | None = None, priority: int = 0) -> Scored:
        """As `RowBatcher.submit`; deadlines are of time.monotonic, which all processes of a host share.

        A block from `allocate` is read by the engine where it is, any other is copied first.
        """
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        sent = self.send(block, deadline, priority, future)
        try:
            self.flush()
            return await future
        finally:
            self.over(sent)
            # A failure refers to this frame and the future to it: a cycle, which would hold bytes of the memory for long.
            del block, sent, future

    def send(self, block: RowBlock, deadline: float | None, priority: int, reply: Reply) -> SentRequest | asyncio.Task[None]:
        """As `Scorer.send`."""
        now = self._clock()
        check_deadline(deadline, now, "before it was queued")
        if self._goes_far:
            far = self._far_away(block, None if deadline is None else deadline - now, priority)
            return asyncio.create_task(forwarded(far, reply))
        connection = self._best()
        connection.check_room(block.rows)
        placed, at, scores = self._placed(block)
        sent = connection.send(placed, at, scores, deadline, now, priority, reply)
        if deadline is not None:
            sent.timer = asyncio.get_running_loop().call_later(deadline - now, sent.expire)
        return sent

    def flush(self) -> None:
        for connection in self._connections:
            connection.flush()

    def over(self, sent: SentRequest | asyncio.Task[None], /) -> None:
        if isinstance(sent, asyncio.Task):  # it went far
            sent.cancel()
            return
        if sent.timer is not None:
            sent.timer.cancel()
        sent.connection.abandon(sent)

    def leave(self) -> None:
        """Leaves all engines, for good: what is open fails with Unavailable, and so does all that comes."""
        self._closing = True
        self._search.cancel()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def close(self) -> None:
        """`leave`, and gives the memory back: close when no request is open."""
        self.leave()
        with contextlib.suppress(asyncio.CancelledError):
            await self._search
        self.leave()  # what the search has found meanwhile
        self._memory.close()

    @property
    def _goes_far(self) -> bool:
        """Whether all engines of this node are about to leave, or gone, and there is one elsewhere."""
        return self._far_welcome is not None and not self._closing and not self._staying

    @property
    def _staying(self) -> int:
        return sum(not c.board.leaving for c in self._connections)

    async def _far_away(self, block: RowBlock, left_s: float | None, priority: int) -> Scored:
        assert self._far is not None  # it has greeted
        data = block.buffer[: block.places[-1]].tobytes()
        ask = FarAsk(self._hello.model, self._hello.fingerprint, data, left_s, priority)
        return await far_scored(self._far.ask, ask, block.rows)

    async def _look_far(self) -> None:
        """Once a second while no engine of this node stays."""
        if self._far is None or self._staying:
            self._far_welcome = None
        elif self._far_at + _FAR_S <= self._clock():
            try:
                self._far_welcome = await self._far.greet()
            except Unavailable:
                self._far_welcome = None
            self._far_at = self._clock()
            self._changed.set()

    def _best(self) -> Connection:
        if not self._connections or self._closing:
            raise _no_engine()
        if len(self._connections) == 1:
            return self._connections[0]
        # An engine that fails all it is given at once has the shortest queue of all. Each second a few requests try it.
        since = self._clock() - _FAILED_S
        return min(self._connections, key=lambda c: (c.board.leaving, c.failed_at > since, c.load))

    def _placed(self, block: RowBlock) -> tuple[RowBlock, int, Floats]:
        """The block in the memory, where it lies, and the room for its scores."""
        at = self._memory.offset(block.buffer)
        if at is None:
            copy = self.allocate(self._layout, block.rows, block.contexts)
            copy.fill((block,))
            block, at = copy, self._memory.offset(copy.buffer) or 0
        size = self._layout.offsets(block.rows, block.contexts)[-1]
        return block, at, np.ndarray((block.rows, self._tasks), np.float32, self._memory.mapped, at + size)

    async def _look(self) -> None:
        """Connects to engines that are new; leaves those that want it, once nothing of ours is there.

        An engine takes the first free name. So once there are engines, only the first names without one are tried each time,
        and one of the others in turn.
        """
        for turn in count():
            known = {c.index for c in self._connections if not c.board.leaving}
            missed, most = 0, _MISSES if turn and self._connections else MOST_ENGINES
            for index in range(MOST_ENGINES):
                tried = missed < most or index == turn % MOST_ENGINES
                if tried and index not in known and not self._put_off(index):
                    missed += not await self._connect(index)
            await self._look_far()
            elsewhere = self._staying or self._far_welcome
            for connection in [c for c in self._connections if elsewhere and c.board.leaving and c.idle]:
                connection.close()
                self._connections.remove(connection)
            await asyncio.sleep(_LOOK_S)

    def _put_off(self, index: int) -> bool:
        """Whether an engine has refused this ingress too recently to be asked again."""
        at, _ = self._refused.get(index, (-math.inf, ""))
        return self._clock() < at + (_REFUSED_S if self._staying else _REFUSED_BY_ALL_S)

    async def _connect(self, index: int) -> bool:
        """Whether anybody has that name."""
        refused = self._refused.pop(index, None)
        try:
            sock = handshake.connect(self._place, index)
            agreed = await greeted(sock, index, self._hello, self._memory)
        except ConnectionError:  # nobody, or no longer
            return False
        except Exception as error:  # of another bundle, or nothing that we know; the search must go on
            self._refused[index] = self._clock(), str(error)
            if refused is None or refused[1] != str(error):  # it is asked for as long as it has that name
                log.warning("engine %d: %s", index, error)
            return True
        loop = asyncio.get_running_loop()
        self._connections.append(Connection(agreed, loop, self._lose, self._clock))
        self._changed.set()
        return True

    def _lose(self, connection: Connection) -> None:
        log.warning("engine %d is gone", connection.index)
        self._connections.remove(connection)
        if self._far is not None and not self._staying:  # they all serve one configuration; the next look makes sure
            self._far_welcome, self._far_at = connection.welcome, -math.inf


def memory_bytes(layout: BlockLayout, tasks: int, rows: int) -> int:
    """Bytes that hold requests of `rows` rows together, each row with its own context and each request's sections aligned."""
    return 2 * (rows * (layout.offsets(1024, 1024)[-1] // 1024 + 4 * tasks) + (1 << 19))


def _no_engine() -> Unavailable:
    return Unavailable("engine: got none on this node, expected one")
