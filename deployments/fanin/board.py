"""What an engine process lets its ingresses know at any time. One writer, any number of readers, no lock."""

import mmap

import numpy as np

from dpiframe_core.engine.buckets import Counts

_LINE = 64  # the numbers have a cache line of their own
_QUEUED, _INFLIGHT, _SECONDS_PER_ROW, _LEAVING, _BUSY = range(5)  # places of the numbers, all float64; engine_ring.c has them


class Board:
    """Lies in a memfd that the engine makes and alone writes.

    Attributes:
        counts: int64[max_batch_rows + 1]: batches by their rows since the start. line: the bytes of the numbers.
    """

    def __init__(self, fd: int, max_batch_rows: int) -> None:
        memory = mmap.mmap(fd, self.nbytes(max_batch_rows))
        self.line = memoryview(memory)[:_LINE]
        self._numbers = self.line.cast("d")
        self._counts = memoryview(memory)[_LINE:].cast("q")
        self.counts: Counts = np.frombuffer(memory, np.int64, max_batch_rows + 1, _LINE)

    @staticmethod
    def nbytes(max_batch_rows: int) -> int:
        return _LINE + 8 * (max_batch_rows + 1)

    def write(self, queued_rows: int, inflight_rows: int, seconds_per_row: float | None) -> None:
        numbers = self._numbers
        numbers[_QUEUED], numbers[_INFLIGHT], numbers[_SECONDS_PER_ROW] = queued_rows, inflight_rows, seconds_per_row or 0.0

    def write_busy(self, busy: bool) -> None:
        """Whether no lane needs to be woken: all look for requests before they sleep. C reads it (engine_ring.c)."""
        self._numbers[_BUSY] = busy

    @property
    def busy(self) -> bool:
        return self._numbers[_BUSY] != 0

    def ran(self, rows: int) -> None:
        """Counts a batch. NumPy takes four times as long for one number."""
        self._counts[rows] += 1

    def leave(self) -> None:
        """Asks the ingresses to go to other engines, if there are any."""
        self._numbers[_LEAVING] = 1.0

    @property
    def queued_rows(self) -> int:
        return int(self._numbers[_QUEUED])

    @property
    def inflight_rows(self) -> int:
        return int(self._numbers[_INFLIGHT])

    @property
    def seconds_per_row(self) -> float | None:
        return self._numbers[_SECONDS_PER_ROW] or None

    @property
    def leaving(self) -> bool:
        return self._numbers[_LEAVING] != 0
