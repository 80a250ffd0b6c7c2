"""What a process has scored since its start, by model and version: the counts behind the protocol's statistics. No I/O."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.metrics import RequestSeen


@dataclass(slots=True)
class ModelStatistics:
    """Sums over a version's requests. Times are milliseconds, of requests that were scored but for `fail_ms`."""

    success: int = 0
    fail: int = 0
    rows: int = 0
    total_ms: float = 0.0
    fail_ms: float = 0.0
    queue_ms: float = 0.0
    encode_ms: float = 0.0
    device_ms: float = 0.0
    last_unix_ms: int = 0


@dataclass(slots=True)
class Statistics:
    """Adds requests up by model and version, and hands each record on to `then`. Used from one event loop."""

    then: Callable[[RequestSeen], None]
    unix_time: Callable[[], float] = time.time
    models: dict[tuple[str, str], ModelStatistics] = field(default_factory=dict)

    def request(self, seen: RequestSeen) -> None:
        self.then(seen)
        of = self.models.setdefault((seen.model, seen.version), ModelStatistics())
        if seen.outcome != "ok":
            of.fail += seen.requests
            of.fail_ms += seen.requests * seen.total_ms
            return
        of.success += seen.requests
        of.rows += seen.requests * seen.rows
        of.total_ms += seen.requests * seen.total_ms
        of.queue_ms += seen.requests * seen.queue_ms
        of.encode_ms += seen.requests * seen.encode_ms
        of.device_ms += seen.requests * seen.device_ms
        of.last_unix_ms = int(self.unix_time() * 1e3)
