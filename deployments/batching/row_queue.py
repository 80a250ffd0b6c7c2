"""Which rows go into the next batch: the queue of waiting requests, as plain data and pure decisions.

Knows no clock (callers pass `now`), no threads, no asyncio; `dispatcher` and `batcher` add those.
"""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

_WHOLE_ROWS = 256


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A waiting request. `item`, `rows`, `deadline`, `priority` and `arrived` are the submitter's; the rest is the queue's.

    Attributes:
        item: whatever the submitter needs to answer it.
        deadline: seconds on the submitter's clock, or None. From that moment on no row of it is given out.
        next_row: rows [0, next_row) have been given out.
        turn: rows that are left of its turn.
    """

    item: T
    rows: int
    deadline: float | None
    priority: int
    arrived: float
    next_row: int = 0
    turn: int = 0

    @property
    def left(self) -> int:
        return self.rows - self.next_row


class Part(NamedTuple, Generic[T]):
    """Rows [start, stop) of a request, bound to one batch. A batch has at most one part of a request."""

    ticket: Ticket[T]
    start: int
    stop: int


class RowQueue(Generic[T]):
    """Waiting requests, counted in rows: higher priority first; within one, deficit round robin over the requests.

    Requests take turns in the order of their arrival. In its turn one is given at most `turn_rows` rows (the quantum of
    Shreedhar and Varghese, SIGCOMM 1995; a turn that a batch cuts goes on in the next), then it goes behind those of its own.
    Hence, while two requests of one priority wait, what they are given differs by at most `turn_rows` rows, and one of at most
    `turn_rows` rows waits for at most a turn of each request before it.
    """

    def __init__(self, max_batch_rows: int, turn_rows: int | None = None) -> None:
        self.max_batch_rows = max_batch_rows
        # Requests of usual sizes go whole and in order of arrival, which has the least mean waiting time.
        self.turn_rows = turn_rows or max(max_batch_rows // 4, min(max_batch_rows, _WHOLE_ROWS))
        self.rows = 0
        # Ordered dicts, not deques: a cancelled request leaves from the middle in constant time, and its rows are free at once.
        self._levels: defaultdict[int, OrderedDict[Ticket[T], None]] = defaultdict(OrderedDict)

    def push(self, ticket: Ticket[T]) -> None:
        ticket.turn = self.turn_rows
        self._levels[ticket.priority][ticket] = None
        self.rows += ticket.rows - ticket.next_row

    def discard(self, ticket: Ticket[T]) -> None:
        """Takes a request out; rows already given out stay with their batches. Does nothing if it no longer waits."""
        level = self._levels.get(ticket.priority)
        if level is not None and ticket in level:
            del level[ticket]
            self.rows -= ticket.left
            if not level:
                del self._levels[ticket.priority]

    def clear(self) -> None:
        self._levels.clear()
        self.rows = 0

    def form(self, now: float) -> tuple[list[Part[T]], list[Ticket[T]]]:
        """The next batch (empty if nothing waits), and the expired requests that were met and removed on the way."""
        if self.rows <= self.max_batch_rows:
            return self._all(now)
        starts: dict[Ticket[T], int] = {}
        expired: list[Ticket[T]] = []
        room = self.max_batch_rows
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            while level and room:
                ticket = next(iter(level))
                start = ticket.next_row
                left = ticket.rows - start
                if ticket.deadline is not None and ticket.deadline <= now:
                    del level[ticket]
                    self.rows -= left
                    expired.append(ticket)
                    continue
                starts.setdefault(ticket, start)
                count = min(room, ticket.turn, left)
                ticket.next_row = start + count
                room -= count
                self.rows -= count
                if count == left:
                    del level[ticket]
                    continue
                ticket.turn -= count
                if not ticket.turn:
                    ticket.turn = self.turn_rows
                    level.move_to_end(ticket)
            if not level:
                del self._levels[priority]
            if not room:
                break
        return [Part(ticket, start, ticket.next_row) for ticket, start in starts.items()], expired

    def _all(self, now: float) -> tuple[list[Part[T]], list[Ticket[T]]]:
        """`form` where all that waits fits into a batch, so that turns cut nothing."""
        parts: list[Part[T]] = []
        expired: list[Ticket[T]] = []
        levels = self._levels
        for priority in sorted(levels, reverse=True) if len(levels) > 1 else levels:
            for ticket in levels[priority]:
                deadline = ticket.deadline
                if deadline is not None and deadline <= now:
                    expired.append(ticket)
                else:
                    parts.append(Part(ticket, ticket.next_row, ticket.rows))
                    ticket.next_row = ticket.rows
        self.clear()
        return parts, expired
