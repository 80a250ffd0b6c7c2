"""What the service reports about itself: two small records and what gauges read. Knows no Ray and no Prometheus.

Taking a record must cost less than a microsecond or two: they are made on hot paths (event loop and lane threads).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# A warm GPU answers in tens of microseconds, a busy queue in tens of milliseconds: bounds from 50 us to 2.5 s.
LATENCY_BOUNDS_MS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 25, 50, 100, 250, 500, 1000, 2500)
FILL_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Click rates lie near zero, so probabilities have finer buckets there. What is above 1 is no probability.
SCORE_BOUNDS = (
    0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4,
    0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0,
)  # fmt: skip
# |difference| of two probabilities: below the first bound the two versions compute the same.
DIFFERENCE_BOUNDS = (1e-6, 1e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


Times = tuple[float, float, float, float]  # queue_ms, encode_ms, device_ms, total_ms


class RequestSeen(NamedTuple):
    """One answered (or abandoned) request, filled by `Scoring`; or so many `requests`, filled by `Express`.

    Those have one outcome and form, so `rows`, `values` and `oov_count` are of each. Their times are means, and lie with them
    between the same two of LATENCY_BOUNDS_MS; `times` are those of a sample.

    `model` and `version` are empty for a request that named none of this process.
    `outcome` is "ok", "cancelled" or the code of an error; times are milliseconds, zero for steps that were not reached.
    `values` are the places for ids in its rows and contexts, of which `oov_count` hold a value that the model did not know.
    `sampled` are the scores of some of its rows, by task: float[rows of the sample, tasks].
    """

    model: str
    version: str
    outcome: str
    rows: int
    values: int
    oov_count: int
    queue_ms: float
    encode_ms: float
    device_ms: float
    total_ms: float
    sampled: Sequence[Sequence[float]] = ()
    requests: int = 1
    times: Sequence[Times] | None = None


@dataclass(frozen=True, slots=True)
class ShadowSeen:
    """One request that a version has answered, in the shadow of which another one was to score it. Filled by `Shadows`.

    `outcome` is "ok", "dropped" or the code of an error; `differences` are the largest over the tasks, of some of its rows.
    """

    model: str
    version: str
    shadow: str
    outcome: str
    differences: Sequence[float] = ()


class BatchSeen(NamedTuple):
    """One run on a lane. Filled by `Dispatcher`. `fill` is rows over the most that a batch may hold.

    `computed_rows` are those of the bucket that ran, zero for a run that failed: what is above `rows` is padding.
    """

    rows: int
    computed_rows: int
    requests: int
    fill: float
    device_ms: float
    failed: bool


class Serving(Protocol):
    """What a served model is, as far as metrics tell it."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def tasks(self) -> Sequence[str]: ...

    @property
    def precision(self) -> str: ...

    @property
    def device(self) -> str: ...


class Gauged(Protocol):
    """Something that can say how many rows wait in it and are on the device, and for how long the device has been busy."""

    @property
    def queued_rows(self) -> int: ...

    @property
    def inflight_rows(self) -> int: ...

    @property
    def busy_s(self) -> float: ...


# Fields of `TableReads`, where reads of sampled rows were served; and of `FarReads`, where rows of files were found.
TIERS = ("hot", "peers", "host", "files")
FOUND = ("promoted", "memory", "file")
