"""What this replica answered in the last two minutes, second by second: what the status page draws. Plain data, no I/O.

Behind HAProxy another replica may answer the next request, so an answer has the whole window and names its replica: a page that
asks again and again adds up those that it hears from. Latencies are counts by bucket, which can be added; quantiles cannot.
"""

import secrets
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from deployments.metrics import LATENCY_BOUNDS_MS, RequestSeen

KEPT_S = 120


@dataclass(slots=True)  # not a pydantic model: setting its fields would take three times as long
class Second:
    """One second with requests, which began at this Unix time by the replica's clock. Counts.

    `failed`: refused, failed, or given up by the client. `latency`: scored requests by the bucket of their time, one bucket
    more than `bounds_ms`.
    """

    at: int
    scored: int
    failed: int
    rows: int
    latency: list[int]


class RecentAnswer(BaseModel):
    """The last two minutes of one replica. Seconds without a request are left out, and so is the one that has not ended.

    `serving`: the version of each of its models now.
    """

    replica: str
    now: float
    serving: dict[str, str]
    bounds_ms: tuple[float, ...] = LATENCY_BOUNDS_MS
    seconds: list[Second]


@dataclass(slots=True)
class Recent:
    """Counts requests by the second, and hands each record on to `then`. Used from one event loop, in under a microsecond."""

    then: Callable[[RequestSeen], None]
    unix_time: Callable[[], float] = time.time
    replica: str = field(default_factory=lambda: secrets.token_hex(4))
    _seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=KEPT_S + 1))

    def request(self, seen: RequestSeen) -> None:
        self.then(seen)
        at = int(self.unix_time())
        if not self._seconds or self._seconds[-1].at != at:
            self._seconds.append(Second(at=at, scored=0, failed=0, rows=0, latency=[0] * (len(LATENCY_BOUNDS_MS) + 1)))
        second = self._seconds[-1]
        if seen.outcome != "ok":
            second.failed += seen.requests
            return
        second.scored += seen.requests
        second.rows += seen.requests * seen.rows
        second.latency[bisect_left(LATENCY_BOUNDS_MS, seen.total_ms)] += seen.requests

    def answer(self, serving: dict[str, str]) -> RecentAnswer:
        now = self.unix_time()
        window = range(int(now) - KEPT_S, int(now))
        seconds = [second for second in self._seconds if second.at in window]
        return RecentAnswer(replica=self.replica, now=now, serving=serving, seconds=seconds)
