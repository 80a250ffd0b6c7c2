"""How long a batch would run on the thread that asks, learned from finished runs. Plain data: callers bring rows and seconds."""

_EASING = 1 / 64
_MOST_CONTENTION = 8


class RunTimes:
    """Expected seconds of a run by the bit length of its rows, so within a factor of two in rows.

    A run on the caller's own thread says what the next one will take. A run on another thread may have waited for a core or
    for the interpreter (28 us on a GPU become some hundreds beside a busy event loop), so it is an upper bound: it lowers an
    expectation at once and never raises it above itself. Since no more than bounds come while an expectation is too high for
    the caller's thread, each eases it by a 64th, but not below an eighth of the bound: now and then one is tried again.
    """

    def __init__(self) -> None:
        self._expected: dict[int, float] = {}

    def expected(self, rows: int) -> float | None:
        """Seconds; None before a run of this size was seen."""
        return self._expected.get(rows.bit_length())

    def ran_here(self, rows: int, seconds: float) -> None:
        self._expected[rows.bit_length()] = seconds

    def ran_elsewhere(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        known = self._expected.get(size)
        if known is None:
            self._expected[size] = seconds
        else:
            self._expected[size] = max(min(known, seconds) * (1 - _EASING), seconds / _MOST_CONTENTION)
