"""How long a batch would run on the thread that asks, learned from finished runs.

Plain data: callers bring rows and seconds.
"""

import math

_SPIKE = 4
_EASING = 1 / 64


class RunTimes:
    """Expected seconds of a run by the bit length of its rows, so within a factor of two in rows.

    A run on the caller's own thread says what the next one will take, but one that was interrupted counts for at most four
    times what was expected. A run on another thread may have waited for a core or for the interpreter (28 us on a GPU become
    milliseconds beside a busy event loop), so its time is an upper bound, which lowers an expectation at once. While an
    expectation is too high for the caller's thread, no more than such bounds come; so each eases it by a 64th, but not below
    what the run took of its thread's CPU time: what was high for the waiting alone is tried again. Any run bounds those of
    fewer rows, and those of more rows in proportion.
    """

    def __init__(self, max_rows: int) -> None:
        self._expected = [math.inf] * (max_rows.bit_length() + 1)

    def expected(self, rows: int) -> float:
        """Seconds for 1 to `max_rows` rows; infinite before any run."""
        return self._expected[rows.bit_length()]

    def ran_here(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        known = self._expected[size]
        self._bound(size, seconds)
        self._expected[size] = min(seconds, _SPIKE * known) if known else seconds

    def ran_elsewhere(self, rows: int, seconds: float, cpu_seconds: float) -> None:
        size = rows.bit_length()
        known = self._expected[size]
        self._bound(size, seconds)
        if known < math.inf:
            self._expected[size] = min(max(known * (1 - _EASING), cpu_seconds), seconds)

    def _bound(self, size: int, seconds: float) -> None:
        if seconds < self._expected[size]:
            self._expected = [min(known, seconds * 2 ** max(0, at - size)) for at, known in enumerate(self._expected)]
