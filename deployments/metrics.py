"""What the service reports about itself: two small records and the port that takes them. Knows no Ray and no Prometheus.

Observing must cost less than a microsecond or two: both calls are made on hot paths (event loop and lane threads).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# A warm GPU answers in tens of microseconds, a busy queue in tens of milliseconds: bounds from 50 us to 2.5 s.
LATENCY_BOUNDS_MS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 25, 50, 100, 250, 500, 1000, 2500)
FILL_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """One answered (or abandoned) request. Filled by the ingress.

    `outcome` is "ok", "cancelled" or the code of an error; times are milliseconds, zero for steps that were not reached.
    """

    model: str
    outcome: str
    rows: int
    oov_count: int
    queue_ms: float
    encode_ms: float
    device_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class BatchSeen:
    """One run on a lane. Filled by the batcher. `fill` is rows over the most that a batch may hold.

    `computed_rows` are those of the bucket that ran, zero for a run that failed: what is above `rows` is padding.
    """

    rows: int
    computed_rows: int
    requests: int
    fill: float
    device_ms: float
    failed: bool


class Gauged(Protocol):
    """Something that can say how many rows wait in it and how many are on the device."""

    @property
    def queued_rows(self) -> int: ...

    @property
    def inflight_rows(self) -> int: ...


class Metrics(Protocol):
    """Where the records go."""

    def request(self, seen: RequestSeen) -> None: ...

    def batch_of(self, model: str) -> Callable[[BatchSeen], None]:
        """The observer of a model's batches. It is called from whichever thread has run one."""

    def watch(self, model: str, gauged: Gauged) -> None:
        """Registers a model's gauges, read whenever the implementation likes."""


class NoMetrics:
    """Drops everything."""

    def request(self, seen: RequestSeen) -> None:
        pass

    def batch_of(self, model: str) -> Callable[[BatchSeen], None]:
        return lambda seen: None

    def watch(self, model: str, gauged: Gauged) -> None:
        pass
