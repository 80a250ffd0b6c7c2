"""Hands an engine's lanes to the threads that wait for one. Knows nothing of what a lane does."""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.errors import DeadlineExceeded, Unavailable


class LanePool:
    """Free lanes go to waiting threads, higher priority first, then first come first served."""

    def __init__(self, lanes: Sequence[CpuLane | CudaLane]) -> None:
        self.lanes: Sequence[CpuLane | CudaLane] = tuple(lanes)
        self._free = list(lanes)
        self._turns = dict.fromkeys(lanes, 0)  # a lane has one user at a time, so its count needs no lock
        self._drained = False
        self._waiting: list[tuple[int, int]] = []
        self._tickets = count()
        self._changed = threading.Condition()

    def take(self, deadline: float | None, priority: int) -> CpuLane | CudaLane:
        """A lane that nobody else has until it is `put` back.

        Raises:
            DeadlineExceeded: the deadline passed first. Unavailable: the pool is drained.
        """
        if deadline is None and not self._waiting and not self._drained:
            try:  # the common case needs no lock: a list's pop is atomic
                return self._free.pop()
            except IndexError:  # not `suppress`, which takes longer than the rest of the call
                pass
        with self._changed:
            ticket = (-priority, next(self._tickets))
            heapq.heappush(self._waiting, ticket)
            try:
                while True:
                    if self._drained:
                        raise Unavailable("engine: closed")
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise DeadlineExceeded("engine: got no free lane before the deadline, expected one")
                    if self._waiting[0] == ticket:
                        with suppress(IndexError):
                            return self._free.pop()
                    self._changed.wait(left)
            finally:
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                self._changed.notify_all()

    def put(self, lane: CpuLane | CudaLane) -> None:
        """Gives a lane back. Whoever began to wait before it came sees it in the list, whoever comes later is in `_waiting`."""
        self._turns[lane] += 1
        self._free.append(lane)
        if self._waiting or self._drained:
            with self._changed:
                self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        """Whether more than one lane is taken."""
        return len(self.lanes) - len(self._free) > 1

    def taken(self) -> set[CpuLane | CudaLane]:
        """The lanes that somebody has."""
        return {*self.lanes} - {*self._free}

    def await_taken(self, check: Callable[[], None]) -> None:
        """Returns when each lane is back that somebody has now, whoever has it by then. What `check` raises ends the wait."""
        left = {lane: self._turns[lane] for lane in self.taken()}
        while left:
            check()
            time.sleep(0.001)
            out = self.taken()
            left = {lane: turns for lane, turns in left.items() if lane in out and self._turns[lane] == turns}

    def drain(self) -> Sequence[CpuLane | CudaLane]:
        """Gives no lane to anybody any more, waits until all are back, and hands them over; nothing to later callers."""
        with self._changed:
            if self._drained:  # two that collected side by side would each wait for the other's lanes
                self._changed.wait_for(lambda: not self.lanes)
                return ()
            self._drained = True
            self._changed.notify_all()
            lanes: list[CpuLane | CudaLane] = []
            while len(lanes) < len(self.lanes):  # one by one: who was about to take one without the lock still may
                try:
                    lanes.append(self._free.pop())
                except IndexError:
                    self._changed.wait()
            self.lanes = ()
            self._changed.notify_all()
            return lanes
