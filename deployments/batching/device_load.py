"""What the lanes have on the device, how long it has been busy, how fast rows leave it. Plain data: callers bring the time."""


class DeviceLoad:
    """Told when a run starts and when it ends, by one thread at a time.

    Attributes:
        batches, rows: on the device now.
    """

    def __init__(self) -> None:
        self.batches = self.rows = 0
        self._busy_s = self._busy_since = 0.0
        # Rows per second that leave it while it is busy: a ratio of two decaying sums, so that lanes that finish together make
        # no spike, and idle time does not count.
        self._drained_rows = self._drained_s = self._mark = 0.0

    def started(self, rows: int, now: float) -> None:
        if not self.batches:
            self._busy_since = self._mark = now
        self.batches += 1
        self.rows += rows

    def finished(self, rows: int, now: float) -> None:
        self.batches -= 1
        self.rows -= rows
        self._drained_rows = 0.8 * self._drained_rows + rows
        self._drained_s = 0.8 * self._drained_s + (now - self._mark)
        self._mark = now
        if not self.batches:
            self._busy_s += now - self._busy_since

    def busy_s(self, now: float) -> float:
        """Seconds since the start with at least one batch on the device: its growth over time is the busy share."""
        return self._busy_s + (now - self._busy_since if self.batches else 0.0)

    @property
    def seconds_per_row(self) -> float | None:
        """Of draining a queue while the device is busy; None before anything was measured."""
        return self._drained_s / self._drained_rows if self._drained_rows else None
