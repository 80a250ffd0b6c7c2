"""The `Scorer` of an ingress of the fan-in: sends each request to the engine process of this node with the fewest rows waiting.

While there is none, to engines of other nodes, if there may be some. Owns the memory that requests are encoded into and the
search for engines. Knows no Ray and no HTTP.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from deployments.batching.refusals import check_deadline
from deployments.batching.scorer import Reply, Scored, forwarded
from deployments.fanin.connection import Connection, SentRequest
from deployments.fanin.engine_search import EngineSearch, no_engine
from deployments.fanin.far import FarAsk, FarEngines
from deployments.fanin.far import scored as far_scored
from deployments.fanin.handshake import Hello
from deployments.fanin.request_memory import RequestMemory
from deployments.fanin.shared_memory import require_ordered_stores
from dpiframe_core.engine.buckets import Counts
from dpiframe_core.errors import Overloaded
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import Floats, RowBlock


class FanInScorer:
    """Scores through the engines that listen in `place`. Make and use it on one event loop.

    Args:
        model, fingerprint: what the engines must serve, by the name that both ends have for it, and of which bundle.
        most_rows: of all requests that may be here at once; the memory has room for them.
        far: how engines of other nodes are reached, if there may be any.

    Attributes:
        search: for engines; it has the connections.
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
        self._layout, self._tasks, self._clock = layout, tasks, clock
        self._memory = RequestMemory(memory_bytes(layout, tasks, most_rows))
        hello = Hello(model=model, fingerprint=fingerprint, layout=layout.header, memory_bytes=self._memory.size)
        self.search = EngineSearch(place, hello, self._memory, clock, far)

    @property
    def accepting(self) -> bool:
        return self.search.accepting

    @property
    def queued_rows(self) -> int:
        """At the engine of this node that has the fewest; what waits at other nodes is not known here."""
        return min((connection.waiting_rows for connection in self.connections), default=0)

    @property
    def connections(self) -> Sequence[Connection]:
        """To the engines of this node."""
        return self.search.connections

    @property
    def batch_sizes(self) -> Counts:
        """int64[max_batch_rows + 1]: the batches of all engines here since their start, by rows."""
        if not self.connections:
            raise no_engine()
        each = [c.board.counts for c in self.connections]
        counts = np.zeros(max(map(len, each)), np.int64)  # while a configuration is replaced, they may differ in length
        for one in each:
            counts[: len(one)] += one
        return counts

    async def found(self, engines: int) -> None:
        """As `EngineSearch.found`."""
        await self.search.found(engines)

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
            raise Overloaded(fault, 1.0) if self.search.goes_far else self.search.best.overloaded(fault)
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
        if self.search.goes_far:
            far = self._far_away(block, None if deadline is None else deadline - now, priority)
            return asyncio.create_task(forwarded(far, reply))
        connection = self.search.best
        connection.check_room(block.rows)
        placed, at, scores = self._placed(block)
        sent = connection.send(placed, at, scores, deadline, now, priority, reply)
        if deadline is not None:
            sent.timer = asyncio.get_running_loop().call_later(deadline - now, sent.expire)
        return sent

    def flush(self) -> None:
        for connection in self.connections:
            connection.flush()

    def over(self, sent: SentRequest | asyncio.Task[None], /) -> None:
        if isinstance(sent, asyncio.Task):  # it went far
            sent.cancel()
            return
        if sent.timer is not None:
            sent.timer.cancel()
        sent.connection.abandon(sent)

    async def close(self) -> None:
        """Leaves all engines, for good, and gives the memory back: close when no request is open."""
        await self.search.close()
        self._memory.close()

    async def _far_away(self, block: RowBlock, left_s: float | None, priority: int) -> Scored:
        far, hello = self.search.far, self.search.hello
        assert far is not None  # it has greeted
        data = block.buffer[: block.places[-1]].tobytes()
        return await far_scored(far.ask, FarAsk(hello.model, hello.fingerprint, data, left_s, priority), block.rows)

    def _placed(self, block: RowBlock) -> tuple[RowBlock, int, Floats]:
        """The block in the memory, where it lies, and the room for its scores."""
        at = self._memory.offset(block.buffer)
        if at is None:
            copy = self.allocate(self._layout, block.rows, block.contexts)
            copy.fill((block,))
            block, at = copy, self._memory.offset(copy.buffer) or 0
        size = self._layout.offsets(block.rows, block.contexts)[-1]
        return block, at, np.ndarray((block.rows, self._tasks), np.float32, self._memory.mapped, at + size)


def memory_bytes(layout: BlockLayout, tasks: int, rows: int) -> int:
    """Bytes that hold requests of `rows` rows together, each row with its own context and each request's sections aligned."""
    return 2 * (rows * (layout.offsets(1024, 1024)[-1] // 1024 + 4 * tasks) + (1 << 19))
