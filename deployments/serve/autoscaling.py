"""How many replicas a load needs, and when to go there: pure functions on plain data, no clock, no Ray.

Requests say little about work when one has 1 row and the next 4,000, so replicas are counted by what they run out of: a device
(or the event loop before it) that is busy, and rows that wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from deployments.config_load import Autoscaling

_GROWTH = 2  # times the replicas that report: those that still start have not helped yet, and must not be asked for twice
_SLACK = 0.75  # of a target: what fits into one replica fewer must fit with room, or a little noise would bring it back
_ROUNDING = 1e-9  # 0.9 / 0.3 is a little more than 3


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica reports. Filled by `LoadMeter`, averaged over the look-back period by Serve.

    Attributes:
        queued_rows: rows that wait for a lane.
        device_share: time with a batch on the device over wall time, 0 to 1.
        loop_share: CPU time of the thread with the event loop over wall time, 0 to 1: parsing may run out before the device.
    """

    queued_rows: float
    device_share: float
    loop_share: float

    @property
    def busy(self) -> float:
        return max(self.device_share, self.loop_share)


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas that a load needs at the targets (`up`), and with room below them (`down`, never fewer)."""

    up: int
    down: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What `decide` remembers: (seconds, replicas) of the needs that can still be the least or the most of their period.

    Attributes:
        since: seconds when it began; a period that is not over yet decides nothing.
        ups: growing; the first is the least `Need.up` of the last `up_after_s`.
        downs: falling; the first is the greatest `Need.down` of the last `down_after_s`.
    """

    since: float
    ups: tuple[tuple[float, int], ...] = ()
    downs: tuple[tuple[float, int], ...] = ()


def need(loads: Sequence[ReplicaLoad], rules: Autoscaling) -> Need:
    """Within the rules' bounds, and at most twice the replicas that report. Grows with every figure of every load."""
    busy = sum(load.busy for load in loads) / rules.target_busy
    queued = sum(load.queued_rows for load in loads) / rules.target_queued_rows

    def bounded(replicas: float) -> int:
        return max(rules.min_replicas, min(ceil(replicas - _ROUNDING), rules.max_replicas, _GROWTH * len(loads)))

    return Need(up=bounded(max(busy, queued)), down=bounded(max(busy, queued) / _SLACK))


def decide(
    seen: Seen | None, now: float, replicas: int, loads: Sequence[ReplicaLoad], rules: Autoscaling
) -> tuple[int, Seen | None]:
    """The number of replicas to have from now on, and what to remember for the next call.

    Up once more were needed all through `up_after_s`, to the least of those needs; down once fewer were all through
    `down_after_s`, to the greatest. Otherwise, and if nobody reports, what there is stays, within the bounds.

    Args:
        seen: what the last call returned; None at first.
        now: seconds on any one clock. replicas: that were decided last, running yet or not. loads: of those that report.
    """
    least, most = rules.min_replicas, rules.max_replicas
    if not loads:
        return min(max(replicas, least), most), None
    needed, since = need(loads, rules), now if seen is None else seen.since
    ups, downs = (seen.ups, seen.downs) if seen else ((), ())
    ups = (*((t, n) for t, n in ups if t > now - rules.up_after_s and n < needed.up), (now, needed.up))
    downs = (*((t, n) for t, n in downs if t > now - rules.down_after_s and n > needed.down), (now, needed.down))
    if now - since >= rules.up_after_s:
        least = ups[0][1]
    if now - since >= rules.down_after_s:
        most = max(downs[0][1], least)
    return min(max(replicas, least), most), Seen(since, ups, downs)
