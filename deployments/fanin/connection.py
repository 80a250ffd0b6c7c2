"""An ingress's end of one connection to an engine process: requests out, answers in. Lives on the ingress's event loop."""

import asyncio
import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from deployments.batching.batcher import Scored, expired
from deployments.batching.row_queue import queue_full, retry_after_s
from deployments.fanin import handshake
from deployments.fanin.handshake import Hello, Welcome
from deployments.fanin.request_memory import Slab
from deployments.fanin.rings import NO_DEADLINE, SLOTS, Ask, Board, Channel, Status, shared_memory
from dpiframe_core.errors import Overloaded, Unavailable
from dpiframe_core.features.row_block import Floats, RowBlock

_LINGER_S = 300e-6
_RECENT = 0.25  # what the last lone request counts for in the time that the next one is expected to take


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that the engine has. Until its answer comes, the block holds its bytes of the slab."""

    future: asyncio.Future[Scored]
    block: RowBlock
    scores: Floats
    at: float  # seconds, on time.perf_counter
    lone: bool


class Link:
    """One engine as an ingress sees it.

    Attributes:
        index: of the engine's socket. welcome: what it said of itself. board: what it lets everybody know.
        alive: until the engine is gone; what was sent by then has failed with Unavailable.
        failed_at: when its device last failed with a request of ours, in seconds on the clock of `attach`.
    """

    def __init__(
        self, index: int, slab: Slab, connection: socket.socket, channel: Channel, fds: tuple[int, int, int], welcome: Welcome
    ) -> None:
        self.index, self.welcome = index, welcome
        self._slab, self._connection, self._channel = slab, connection, channel
        self._answer_fd, board_fd, self._wake_fd = fds
        self.board = Board(board_fd, welcome.max_batch_rows)
        os.close(board_fd)
        self._free = list(range(SLOTS))
        self._sent: dict[int, _Sent] = {}
        self._asked_rows = 0
        self._lone_s = 0.0  # until a lone request is answered, lately
        self.alive = True
        self.failed_at = -math.inf

    @classmethod
    def greet(cls, connection: socket.socket, index: int, hello: Hello, slab: Slab) -> "Link":
        """Agrees with the engine that `door.connect` found. Blocks for some milliseconds, at worst seconds.

        Raises:
            OSError, Unavailable: it is gone, or refuses this ingress.
        """
        channel_fd, answer_fd = (
            shared_memory("dpiframe-channel", Channel.NBYTES),
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),
        )
        fds: list[int] = []
        try:
            handshake.send(connection, hello, (slab.fd, channel_fd, answer_fd))
            welcome, fds = handshake.receive(connection, Welcome, 2)
            if welcome.refused or len(fds) != 2:
                raise Unavailable(f"engine: {welcome.refused}")
            connection.setblocking(False)
            return cls(index, slab, connection, Channel(channel_fd), (answer_fd, *fds), welcome)  # type: ignore[arg-type]
        except BaseException:
            connection.close()
            for fd in (answer_fd, *fds):
                os.close(fd)
            raise
        finally:
            os.close(channel_fd)

    def attach(self, loop: asyncio.AbstractEventLoop, lost: Callable[["Link"], None], clock: Callable[[], float]) -> None:
        """Listens for answers from now on; `lost` is called once if the engine goes."""
        self._loop, self._lost, self._clock = loop, lost, clock
        loop.add_reader(self._answer_fd, self._answers)
        loop.add_reader(self._connection, self._gone)

    @property
    def waiting_rows(self) -> int:
        """Rows that wait there, those that this ingress sent and the engine has not read yet among them."""
        return self.board.queued_rows + self._asked_rows - self._channel.taken_rows

    @property
    def load(self) -> int:
        return self.waiting_rows + self.board.inflight_rows

    @property
    def idle(self) -> bool:
        return not self._sent

    def send(self, block: RowBlock, scores: Floats, deadline: float | None, arrived: float, priority: int) -> int:
        """Asks for the scores of a block of the slab, with the room for them right behind it. Returns its slot.

        Raises:
            Overloaded: the rows do not fit into the engine's bound, or it has as many requests as one ingress may have there.
        """
        waiting, bound = self.waiting_rows, self.welcome.max_queued_rows
        if waiting + block.rows > bound:
            raise Overloaded(queue_full(waiting, bound - block.rows), retry_after_s(waiting, self.board.seconds_per_row))
        if not self._free:
            raise self.overloaded(f"requests: got {SLOTS + 1} of this ingress at one engine, expected at most {SLOTS}")
        slot = self._free.pop()
        at = self._slab.offset(block.buffer)
        self._sent[slot] = _Sent(self._loop.create_future(), block, scores, time.perf_counter(), not self._sent)
        self._asked_rows += block.rows
        self._channel.asks.put(
            Ask.SCORE,
            slot,
            at or 0,
            block.rows,
            block.contexts,
            NO_DEADLINE if deadline is None else deadline,
            arrived,
            priority,
        )
        self._channel.asks.publish()
        os.eventfd_write(self._wake_fd, 1)
        return slot

    def future(self, slot: int) -> asyncio.Future[Scored]:
        return self._sent[slot].future

    def linger(self) -> None:
        """Looks out for the answer to a lone request for at most 0.3 ms, if lately that was enough.

        A GPU needs some 30 us, and an event loop that sleeps 50 us or more to wake up. No other request is open here meanwhile.
        """
        if len(self._sent) != 1 or self._lone_s > _LINGER_S:
            return
        give_up = time.perf_counter() + _LINGER_S
        while not self._channel.answers.waiting:
            if time.perf_counter() > give_up:
                return
            os.sched_yield()
        self._answers()

    def cancel(self, slot: int, future: asyncio.Future[Scored]) -> None:
        """Nobody waits for a request any more: unless it has been answered, the engine is told."""
        sent = self._sent.get(slot)
        if sent is not None and sent.future is future:
            self._channel.asks.put(Ask.CANCEL, slot, 0, 0, 0, 0.0, 0.0, 0)
            self._channel.asks.publish()

    def close(self) -> None:
        """Leaves the engine; what it still has fails with Unavailable."""
        if not self.alive:
            return
        self.alive = False
        for fd in (self._answer_fd, self._connection):
            self._loop.remove_reader(fd)
        self._connection.close()
        os.close(self._answer_fd)
        os.close(self._wake_fd)
        for sent in self._sent.values():
            if not sent.future.done():
                sent.future.set_exception(Unavailable("engine: got its end with this request there, expected scores"))
        self._sent.clear()

    def overloaded(self, fault: str) -> Overloaded:
        """The refusal for lack of what answers give back: they come once what waits has drained, and no sooner than a batch."""
        rows = max(self.waiting_rows, self.welcome.max_batch_rows)
        return Overloaded(fault, retry_after_s(rows, self.board.seconds_per_row))

    def _answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._answer_fd)
        for slot, status, queue_ms, device_ms, retry_s in self._channel.answers.new():
            sent = self._sent.pop(slot)
            self._free.append(slot)
            if sent.lone:
                self._lone_s += _RECENT * (time.perf_counter() - sent.at - self._lone_s)
            if status == Status.FAILED:
                self.failed_at = self._clock()
            future = sent.future
            if future.done():
                continue
            if status == Status.OK:
                future.set_result(Scored(sent.scores.copy(), queue_ms, device_ms))
            elif status == Status.EXPIRED:
                future.set_exception(expired("in the queue"))
            elif status == Status.OVERLOADED:
                bound = max(0, self.welcome.max_queued_rows - sent.block.rows)
                future.set_exception(Overloaded(queue_full(self.waiting_rows, bound), retry_s))
            else:
                message = "device: got an error on this request's batch, expected scores"
                future.set_exception(Unavailable(message))

    def _gone(self) -> None:
        """The engine says nothing after its welcome: this is its end."""
        self._answers()  # what it answered before
        self.close()
        self._lost(self)
