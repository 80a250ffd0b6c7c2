"""What a traced request carries: who asked for the trace, and when each step was over. Plain data, no OpenTelemetry."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import random

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True, eq=False)
class RequestTrace:
    """`parent`: the headers of W3C's trace context, if it has any. `marks`: (step, when it was over) in their order.

    Times are seconds of the scoring's clock. A step begins where the one before it ended.
    """

    parent: dict[str, str]
    started: float
    marks: list[tuple[str, float]] = field(default_factory=list)

    @property
    def over_at(self) -> float:
        """When the last step was."""
        return self.marks[-1][1] if self.marks else self.started

    def mark(self, step: str, at: float) -> None:
        self.marks.append((step, at))


def begun(headers: Headers, sample: float, now: float) -> RequestTrace | None:
    """A trace for a request that asks for one; of those that do not say, for a share. W3C's rule: who asked has decided."""
    parent = {k.decode(): v.decode("latin-1") for k, v in headers if k in (b"traceparent", b"tracestate")}
    given = _TRACEPARENT.fullmatch(parent.get("traceparent", "").encode("latin-1"))
    if given is None:
        return RequestTrace({}, now) if random() < sample else None
    return RequestTrace(parent, now) if int(given[1], 16) & 1 else None
