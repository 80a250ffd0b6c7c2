"""Which rows go into the next batch: the queue of waiting requests, as plain data and pure decisions.

Knows no clock (callers pass `now`), no threads, no asyncio; `batching` adds those.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A waiting request. `item`, `rows`, `deadline`, `priority` and `arrived` are the submitter's; the rest is the queue's.

    Attributes:
        item: whatever the submitter needs to answer it.
        deadline: seconds on the submitter's clock, or None. From that moment on no row of it is given out.
        next_row: rows [0, next_row) have been given out.
        share: rows that it may still take before it goes behind the others of its priority.
    """

    item: T
    rows: int
    deadline: float | None
    priority: int
    arrived: float
    next_row: int = 0
    share: int = 0

    @property
    def left(self) -> int:
        return self.rows - self.next_row


class Part(NamedTuple, Generic[T]):
    """Rows [start, stop) of a request, bound to one batch."""

    ticket: Ticket[T]
    start: int
    stop: int


class RowQueue(Generic[T]):
    """Waiting requests: higher priority first, then first come first served, counted in rows.

    A request that does not fit into what is left of a batch is split there and keeps its place; once it has had
    `max_batch_rows` rows it goes behind those of its own priority, so that a large one holds nobody beyond one batch's worth.
    """

    def __init__(self, max_batch_rows: int) -> None:
        self.max_batch_rows = max_batch_rows
        self.rows = 0
        # Ordered dicts, not deques: a cancelled request leaves from the middle in constant time, and its rows are free at once.
        self._levels: dict[int, OrderedDict[Ticket[T], None]] = {}

    def push(self, ticket: Ticket[T]) -> None:
        ticket.share = self.max_batch_rows
        self._levels.setdefault(ticket.priority, OrderedDict())[ticket] = None
        self.rows += ticket.left

    def discard(self, ticket: Ticket[T]) -> None:
        """Takes a request out; rows already given out stay with their batches. Does nothing if it no longer waits."""
        level = self._levels.get(ticket.priority)
        if level is not None and ticket in level:
            self._remove(level, ticket)

    def clear(self) -> None:
        self._levels.clear()
        self.rows = 0

    def form(self, now: float) -> tuple[list[Part[T]], list[Ticket[T]]]:
        """The next batch (empty if nothing waits), and the expired requests that were met and removed on the way."""
        parts: list[Part[T]] = []
        expired: list[Ticket[T]] = []
        room = self.max_batch_rows
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            while level and room:
                ticket = next(iter(level))
                if ticket.deadline is not None and ticket.deadline <= now:
                    self._remove(level, ticket)
                    expired.append(ticket)
                    continue
                start = ticket.next_row
                count = min(room, ticket.share, ticket.left)
                ticket.next_row += count
                ticket.share -= count
                room -= count
                self.rows -= count
                if parts and parts[-1].ticket is ticket:
                    start = parts.pop().start
                parts.append(Part(ticket, start, ticket.next_row))
                if not ticket.left:
                    self._remove(level, ticket)
                elif not ticket.share:
                    ticket.share = self.max_batch_rows
                    level.move_to_end(ticket)
            if not room:
                break
        return parts, expired

    def _remove(self, level: OrderedDict[Ticket[T], None], ticket: Ticket[T]) -> None:
        del level[ticket]
        self.rows -= ticket.left
        if not level:
            del self._levels[ticket.priority]


class DrainRate:
    """Rows per second that leave the device while it is busy: a ratio of two decaying sums, so that lanes that finish together
    do not make a spike, and idle time does not count."""

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        self._mark = 0.0

    def busy_from(self, now: float) -> None:
        """The first lane starts after all were idle."""
        self._mark = now

    def finished(self, rows: int, now: float) -> None:
        self._rows = 0.8 * self._rows + rows
        self._seconds = 0.8 * self._seconds + (now - self._mark)
        self._mark = now

    def seconds_for(self, rows: int) -> float:
        """How long `rows` rows will take, between 1 ms and 60 s; 1 s before anything was measured."""
        if not self._rows:
            return 1.0
        return min(max(rows * self._seconds / self._rows, 0.001), 60.0)
