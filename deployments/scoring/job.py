"""What is known of one request while it is on its way. Plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployments.scoring.request_trace import RequestTrace
from dpiframe_core.features.raw_columns import ColumnValues


@dataclass(slots=True)
class Job:
    """What is known so far of a request. Times in milliseconds but `started`, seconds on the scoring's clock.

    `given`: its raw values, candidates by column and context, where it came with such. `trace`: None if it is not traced.
    """

    request_id: str
    started: float
    model: str = ""
    version: str = ""
    rows: int = 0
    values: int = 0
    oov_count: int = 0
    queue_ms: float = 0.0
    encode_ms: float = 0.0
    device_ms: float = 0.0
    degraded_rows: int = 0
    sampled: Sequence[Sequence[float]] = ()
    given: tuple[Mapping[str, ColumnValues], Mapping[str, object]] | None = None
    trace: RequestTrace | None = None

    def timing_ms(self, total_ms: float) -> dict[str, float]:
        return {"queue": self.queue_ms, "encode": self.encode_ms, "device": self.device_ms, "total": total_ms}
