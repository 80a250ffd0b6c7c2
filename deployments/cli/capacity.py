"""How many nodes a load needs, from loads that were measured: nothing is put between them or beyond them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Literal

from dpiframe_core.errors import InputError

Topology = Literal["colocated", "fanin"]
Form = Literal["binary", "bytes", "columns", "rows", "arrow"]
Way = Literal["haproxy", "direct"]
_ASKED: dict[Form, str] = {
    "binary": "binary ids", "bytes": "binary raw values", "columns": "JSON in columns", "rows": "JSON in objects",
    "arrow": "Arrow",
}  # fmt: skip
_WAYS: dict[Way, str] = {"haproxy": "by HAProxy", "direct": "on the direct port"}


@dataclass(frozen=True, slots=True)
class Point:
    """A load that one node answered, all of it, with the p99 that its clients saw; the load generator's cores among `cores`."""

    topology: Topology
    form: Form
    way: Way
    model: str
    candidates: int
    requests_per_s: float
    p99_ms: float
    gpus: int
    cores: int
    ingresses: int
    source: str


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be answered. headroom: the share of a measured load that a node is not to be given. spare: nodes more."""

    rows_per_s: float
    candidates: int
    deadline_ms: float | None = None
    headroom: float = 0.3
    spare: int = 0
    gpus_per_node: int = 1
    topology: Topology | None = None
    form: Form = "binary"
    way: Way = "haproxy"

    def __post_init__(self) -> None:
        for name, value in (("rows-per-s", self.rows_per_s), ("candidates", self.candidates)):
            if not 0 < value < inf:
                raise InputError(name, value, "more than 0")
        if not 0 <= self.headroom < 1:
            raise InputError("headroom", self.headroom, "at least 0 and less than 1")

    @property
    def requests_per_s(self) -> float:
        return self.rows_per_s / self.candidates


@dataclass(frozen=True)
class Plan:
    """So many nodes like the one of `point`."""

    load: Load
    point: Point

    @property
    def planned(self) -> float:
        """Requests a second that a node is given at most."""
        return self.point.requests_per_s * (1 - self.load.headroom)

    @cached_property
    def nodes(self) -> int:
        return ceil(self.load.requests_per_s / self.planned) + self.load.spare

    def share(self, nodes: int) -> float:
        """Of what was measured, that each of so many nodes gets."""
        return self.load.requests_per_s / nodes / self.point.requests_per_s

    def report(self) -> str:
        load, point, n = self.load, self.point, self.nodes
        device = f"{point.gpus} GPU{'s' * (point.gpus > 1)}, " if point.gpus else ""
        beside = f", {point.ingresses} ingresses" if point.ingresses else ""
        within = f", p99 within {load.deadline_ms:g} ms" if load.deadline_ms else ""
        engines = max(point.gpus, 1) * n
        lines = [
            f"load        {load.rows_per_s:,.0f} rows/s: {load.requests_per_s:,.0f} requests/s of {load.candidates}{within}",
            f"measured    {point.requests_per_s:,.0f} requests/s of {point.candidates}, p99 {point.p99_ms:.1f} ms, by one node",
            f"            {point.topology}: {device}{point.cores} cores{beside}, model {point.model}, {_ASKED[point.form]}, "
            f"{_WAYS[point.way]}",
            f"            {point.source}",
            f"planned     {self.planned:,.0f} requests/s a node: {1 - load.headroom:.0%} of that",
            f"needed      {n} node{'s' * (n > 1)}: {point.gpus * n} GPUs, {engines} engines, "
            f"{point.ingresses * n} ingresses, {point.cores * n} cores",
            f"then        each at {self.share(n):.0%} of what was measured"
            + (f"; with one node fewer at {self.share(n - 1):.0%}" if n > 1 else "; there is no other node"),
            f"configure   topology: {point.topology}, nodes: {n}, replicas: {engines}"
            + (f", ingress_replicas: {point.ingresses * n}" if point.ingresses else ""),
        ]
        return "\n".join(lines)


def plan(load: Load, points: Sequence[Point]) -> Plan:
    """The plan with the fewest nodes; of equals the one with the fewest processes.

    A measurement holds for requests of at most as many candidates as it had, and for deadlines of at least its p99.

    Raises:
        InputError: nothing that was measured says anything about the load.
    """
    alike = [p for p in points if (p.form, p.way) == (load.form, load.way)]
    if not alike:
        measured = ", ".join(sorted({f"{p.form} {p.way}" for p in points}))
        raise InputError.worded("form and way", f"{load.form} {load.way}", f"one of {measured}")
    machines = [p for p in alike if p.gpus in (load.gpus_per_node, 0) and load.topology in (None, p.topology)]
    if not machines:
        had = sorted({(p.gpus, p.topology) for p in alike})
        got = f"{load.gpus_per_node} and {load.topology}"
        raise InputError.worded("gpus-per-node and topology", got, f"one of {had} for {load.form} {load.way}")
    sizes = sorted({p.candidates for p in machines})
    size = next((s for s in sizes if s >= load.candidates), None)
    if size is None:
        raise InputError("candidates", load.candidates, f"at most {sizes[-1]}, the most that was measured; measure yours")
    same = [p for p in machines if p.candidates == size]
    fit = [p for p in same if load.deadline_ms is None or p.p99_ms <= load.deadline_ms]
    if not fit:
        least = min(p.p99_ms for p in same)
        raise InputError("deadline-ms", load.deadline_ms, f"at least {least:.2f}, the least p99 that was measured")
    best = {kind: max((p for p in fit if p.topology == kind), key=lambda p: p.requests_per_s, default=None)
            for kind in ("colocated", "fanin")}  # fmt: skip
    plans = [Plan(load, point) for point in best.values() if point is not None]
    return min(plans, key=lambda p: (p.nodes, p.point.ingresses))
