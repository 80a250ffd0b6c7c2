"""Who else sees single requests, where that is asked for: tracing and the score log. When they are off nothing calls them."""

from dataclasses import dataclass
from typing import Protocol

from deployments.scoring.job import Job
from deployments.scoring.request_trace import Headers, RequestTrace
from deployments.scoring.served_model import ServedModel
from dpiframe_core.features.row_block import Floats


class Tracer(Protocol):
    """`now`: seconds of the scoring's clock."""

    def begin(self, headers: Headers, now: float) -> RequestTrace | None:
        """None for a request that is not traced."""

    def end(self, job: Job, outcome: str, now: float) -> None: ...


class Recorder(Protocol):
    def take(self, job: Job, served: ServedModel, scores: Floats) -> None: ...


@dataclass(frozen=True, slots=True)
class Watchers:
    tracer: Tracer | None = None
    recorder: Recorder | None = None
