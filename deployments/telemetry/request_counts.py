"""Requests of a version with one outcome, added up where they end: to read a record of each takes the interpreter that those
need who answer, and there are five thousand a second.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import TypeVar

from deployments.metrics import RequestSeen, Times

T = TypeVar("T")


class RequestCounts:
    """What one thread has seen. It alone adds; the thread of metrics alone asks, and loses nothing meanwhile.

    sampled: whether somebody asks for a sample.
    """

    def __init__(self, sampled: bool) -> None:
        self.requests, self.rows, self.values, self.oov = 0, 0, 0, 0
        most = 200_000 if sampled else 0  # a bound, if nobody asks
        self._times: collections.deque[Times] = collections.deque(maxlen=most)
        self._scores: collections.deque[Sequence[float]] = collections.deque(maxlen=most)
        self._told = 0, 0, 0, 0

    def add(self, seen: RequestSeen) -> None:
        self.requests += seen.requests
        self.rows += seen.requests * seen.rows
        self.values += seen.requests * seen.values
        self.oov += seen.requests * seen.oov_count
        self._times.extend((seen[6:10],) if seen.times is None else seen.times)
        self._scores.extend(seen.sampled)

    def since(self) -> Iterator[int]:
        """Requests, rows, values and those out of vocabulary since it was asked last."""
        before, self._told = self._told, (self.requests, self.rows, self.values, self.oov)
        return (now - then for now, then in zip(self._told, before, strict=True))

    def times(self, most: int) -> Sequence[Times]:
        """Of an even sample of the requests since it was asked last."""
        return thinned(taken(self._times), most)

    def scores(self, most: int) -> Sequence[Sequence[float]]:
        """Of the rows that all requests have sampled since it was asked last: float[rows, tasks]."""
        return thinned(taken(self._scores), most)


def taken(queue: collections.deque[T]) -> list[T]:
    """What is in it now, and no more, another thread adding to it."""
    return [queue.popleft() for _ in range(len(queue))]


def thinned(some: Sequence[T], most: int) -> Sequence[T]:
    """An even sample of them, of at least one if there are any."""
    return some[:: -(-len(some) // max(most, 1)) or 1]
