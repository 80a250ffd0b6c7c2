"""What the lanes have run of a model, added up where it happens: to read a record of each run takes the interpreter that the
lanes need, and there are ten thousand a second.
"""

import collections
from collections.abc import Iterator, Sequence

from deployments.metrics import BatchSeen
from deployments.telemetry.request_counts import taken, thinned


class BatchCounts:
    """What one thread has run of a model. It alone adds; the thread of metrics alone asks, and loses nothing meanwhile."""

    def __init__(self) -> None:
        self.runs, self.failed, self.device_ms, self.computed, self.padding = 0, 0, 0.0, 0, 0
        self._fills: collections.deque[float] = collections.deque(maxlen=200_000)  # a bound, if nobody asks
        self._told: tuple[float, ...] = (0.0,) * 5

    def add(self, seen: BatchSeen) -> None:
        self.runs += 1
        self.device_ms += seen.device_ms
        self.computed += seen.computed_rows
        self._fills.append(seen.fill)
        if seen.failed:
            self.failed += 1
        else:
            self.padding += seen.computed_rows - seen.rows

    def since(self) -> Iterator[float]:
        """Runs, failed ones, milliseconds, computed rows and padding since it was asked last."""
        before, self._told = self._told, (self.runs, self.failed, self.device_ms, self.computed, self.padding)
        return (now - then for now, then in zip(self._told, before, strict=True))

    def sample(self, most: int) -> Sequence[float]:
        """An even sample of the fills since it was asked last."""
        return thinned(taken(self._fills), most)
