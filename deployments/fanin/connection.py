"""An ingress's end of one connection to an engine process: requests out, answers in. Lives on the ingress's event loop."""

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deployments.batching.refusals import check_room, expired, queue_full, retry_after_s
from deployments.batching.scorer import Reply, Scored
from deployments.fanin.handshake import Agreement
from deployments.fanin.rings import NO_DEADLINE, SLOTS, Ask, Status
from dpiframe_core.errors import DPIFrameError, Overloaded, Unavailable
from dpiframe_core.features.row_block import Floats, RowBlock

_LINGER_S = 300e-6
_RECENT = 0.25  # what the last lone request counts for in the time that the next one is expected to take


@dataclass(slots=True, eq=False)
class SentRequest:
    """A request that an engine has. Until its answer comes, the block holds its bytes of the request memory.

    Attributes:
        future: the answer's. slot: its place at the engine. scores: where that writes them. timer: of its deadline.
        at: seconds on time.perf_counter. lone: no other one was there when it was sent.
    """

    connection: "Connection"
    future: Reply
    slot: int
    block: RowBlock
    scores: Floats
    at: float
    lone: bool
    timer: asyncio.TimerHandle | None = None

    def expire(self) -> None:
        """Its deadline has passed."""
        if not self.future.done():
            self.future.set_exception(expired("in the queue or on the device"))


class Beside(Protocol):
    """A second connection of this process to the same engine, for requests that Python does not see. It ends with the first."""

    @property
    def open(self) -> int:
        """Requests that the engine has."""

    @property
    def unread_rows(self) -> int:
        """Rows that it has not read yet."""

    def close(self) -> None: ...


class Connection:
    """One engine as an ingress sees it.

    Attributes:
        rings: what is asked and answered. besides: other connections of this process to it.
        index: of the engine's socket. welcome: what it said of itself. board: what it lets everybody know.
        alive: until the engine is gone; what was sent by then has failed with Unavailable.
        failed_at: when its device last failed with a request of ours, in seconds on `clock`.
    """

    def __init__(
        self,
        agreed: Agreement,
        loop: asyncio.AbstractEventLoop,
        lost: Callable[["Connection"], None],
        clock: Callable[[], float],
    ) -> None:
        """Listens for answers from now on; `lost` is called once if the engine goes."""
        self.index, self.welcome, self.board = agreed.index, agreed.welcome, agreed.board
        self._agreed, self._sock, self.rings = agreed, agreed.sock, agreed.rings
        self._answer_fd, self._wake_fd = agreed.answer_fd, agreed.wake_fd
        self._loop, self._lost, self._clock = loop, lost, clock
        self._free = list(range(SLOTS))
        self._sent: dict[int, SentRequest] = {}
        self._unsaid = False  # the engine was not told of all that is in its ring
        self._fence = threading.Lock()  # nobody else takes it: stores before it are seen by all before what is loaded behind it
        self._lone_s = 0.0  # until a lone request is answered, lately
        self.alive = True
        self.failed_at = -math.inf
        self.besides: list[Beside] = []
        loop.add_reader(self._answer_fd, self._read_answers)
        loop.add_reader(self._sock, self._engine_gone)

    @property
    def waiting_rows(self) -> int:
        """Rows that wait there, those that this ingress sent and the engine has not read yet among them."""
        return self.board.queued_rows + self.rings.unread_rows + sum(beside.unread_rows for beside in self.besides)

    @property
    def load(self) -> int:
        return self.waiting_rows + self.board.inflight_rows

    @property
    def idle(self) -> bool:
        return not self._sent and not any(beside.open for beside in self.besides)

    def check_room(self, rows: int) -> None:
        """Raises as `refusals.check_room`, for the rows that the engine lets wait."""
        check_room(rows, self.waiting_rows, self.welcome.max_queued_rows, self.board.seconds_per_row)

    def send(
        self, block: RowBlock, at: int, scores: Floats, deadline: float | None, arrived: float, priority: int, reply: Reply
    ) -> SentRequest:
        """Asks for the scores of a block at byte `at` of the request memory, with the room for them right behind it; the engine
        is told by `flush`.

        Raises:
            Overloaded: the engine has as many requests as one ingress may have there.
        """
        if not self._free:
            raise self.overloaded(f"requests: got {SLOTS + 1} of this ingress at one engine, expected at most {SLOTS}")
        slot = self._free.pop()
        sent = SentRequest(self, reply, slot, block, scores, time.perf_counter(), not self._sent)
        self._sent[slot] = sent
        self.rings.asked(block.rows)
        until = NO_DEADLINE if deadline is None else deadline
        self.rings.asks.put(Ask.SCORE, slot, at, block.rows, block.contexts, until, arrived, priority)
        self._unsaid = True
        return sent

    def flush(self) -> None:
        """Tells the engine of what was sent since, and wakes a lane, unless all have a run: each looks before it sleeps.

        If that is a lone request, it looks out for the answer for a moment.
        """
        if not self._unsaid:
            return
        self._unsaid = False
        self.rings.asks.publish()
        with self._fence:  # before it is seen that all lanes are busy, so that one that goes to sleep sees what was published
            busy = self.board.busy
        if not busy:
            os.eventfd_write(self._wake_fd, 1)
        if len(self._sent) == 1 and self._lone_s <= _LINGER_S and next(iter(self._sent.values())).lone:
            self._linger()

    def abandon(self, sent: SentRequest) -> None:
        """Nobody waits for a request any more: unless it has been answered, the engine is told."""
        if self._sent.get(sent.slot) is sent:
            self.rings.asks.put(Ask.CANCEL, sent.slot, 0, 0, 0, 0.0, 0.0, 0)
            self.rings.asks.publish()

    def close(self) -> None:
        """Leaves the engine; what it still has fails with Unavailable."""
        if not self.alive:
            return
        self.alive = False
        for beside in [*self.besides]:
            beside.close()
        for fd in (self._answer_fd, self._sock):
            self._loop.remove_reader(fd)
        self._agreed.close()
        for sent in self._sent.values():
            if not sent.future.done():
                sent.future.set_exception(engine_ended())
        self._sent.clear()

    def overloaded(self, fault: str) -> Overloaded:
        """The refusal for lack of what answers give back: they come once what waits has drained, and no sooner than a batch."""
        rows = max(self.waiting_rows, self.welcome.max_batch_rows)
        return Overloaded(fault, retry_after_s(rows, self.board.seconds_per_row))

    def full(self, rows: int, waiting: int) -> Overloaded:
        """The refusal of so many rows while others wait, as `check_room` has it."""
        return queue_full(waiting, self.welcome.max_queued_rows - rows, retry_after_s(waiting, self.board.seconds_per_row))

    def refusal(self, status: int, rows: int, retry_s: float) -> DPIFrameError:
        """What the engine's answer to a request that it has not scored means."""
        if status == Status.EXPIRED:
            return expired("in the queue")
        if status == Status.OVERLOADED:
            return queue_full(self.waiting_rows, max(0, self.welcome.max_queued_rows - rows), retry_s)
        if status == Status.FAILED:
            self.failed_at = self._clock()
        return Unavailable("device: got an error on this request's batch, expected scores")

    def _linger(self) -> None:
        """Looks out for the answer to a lone request for at most 0.3 ms; done if lately that was enough.

        A GPU needs some 30 us, and an event loop that sleeps 50 us or more to wake up. No other request is open here meanwhile.
        """
        give_up = time.perf_counter() + _LINGER_S
        while not self.rings.answers.waiting:
            if time.perf_counter() > give_up:
                return
            os.sched_yield()
        self._read_answers()

    def _read_answers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._answer_fd)
        for slot, status, queue_ms, device_ms, retry_s in self.rings.answers.new():
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
            else:
                future.set_exception(self.refusal(status, sent.block.rows, retry_s))

    def _engine_gone(self) -> None:
        """The engine says nothing after its welcome: this is its end."""
        self._read_answers()  # what it answered before
        self.close()
        self._lost(self)


def engine_ended() -> Unavailable:
    return Unavailable("engine: got its end with this request there, expected scores")
