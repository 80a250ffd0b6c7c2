"""How many nodes a load needs, from loads that were measured: nothing is put between them or beyond them.

The figures are those of suite `serving` (`python -m benchmarks serving`), ours or those of one's own run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from dpiframe_core.errors import ConfigError, InputError
from dpiframe_core.strict import first_fault

OURS = Path(__file__).with_name("capacity_figures.json")
_TOPOLOGIES = {"dpiframe": "colocated", "dpiframe-fanin": "fanin"}
_INGRESSES = 8  # of the fan-in, in records that do not say it (docs/fan-in.md)
_REACHED = 0.97  # of an offered rate: with less, what waits grows


class _Cell(BaseModel):
    form: str | None = None
    gpus: int = 1
    cores: int | None = None
    connections: int = 0
    rate: float = 0


class _Record(BaseModel):
    system: str
    model: str | None
    batch: int | None
    cell: _Cell
    p99_us: float | None
    requests_per_s: float = 0
    failed: dict[str, int] | None = None
    load_limited: bool = False
    ingress: int = _INGRESSES


class _Host(BaseModel):
    gpu: str | None
    cpu: str
    commit: str | None
    date: str

    @property
    def cores(self) -> int:
        return int(self.cpu.split(" cores")[0].rpartition(" ")[2])


class _File(BaseModel):
    file: str = ""
    run: _Host
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Point:
    """A load that one node answered, all of it, with the p99 that its clients saw; the load generator's cores among `cores`."""

    topology: Literal["colocated", "fanin"]
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
    topology: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("rows-per-s", self.rows_per_s), ("candidates", self.candidates)):
            if value <= 0:
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
            f"            {point.topology}: {device}{point.cores} cores{beside}, model {point.model}, binary bodies",
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


def read_points(path: Path) -> list[Point]:
    """The measured loads of a file of suite `serving`, or of several in a list.

    Raises:
        ConfigError: it is no such file, or has none.
    """
    try:
        data = json.loads(path.read_bytes())
        files = TypeAdapter(list[_File]).validate_python(data if isinstance(data, list) else [data])
        points = [point for file in files for point in _points(file, file.file or str(path))]
    except OSError as error:
        raise ConfigError(f"{path}: got {error.strerror!r}, expected a file of records") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: got {str(error)[:80]!r}, expected records of suite serving") from None
    if not points:
        raise ConfigError(f"{path}: got no load of ours that was answered, expected records of suite serving")
    return points


def _points(file: _File, name: str) -> list[Point]:
    found = []
    for data in file.records:
        if data.get("suite", "serving") != "serving" or data.get("system") not in _TOPOLOGIES:
            continue
        r = _Record.model_validate(data)
        kept_up = not r.cell.rate or r.requests_per_s >= _REACHED * r.cell.rate
        if r.cell.form != "binary" or r.batch is None or r.p99_us is None or r.failed or r.load_limited or not kept_up:
            continue
        how = f"offered {r.cell.rate:,.0f}/s" if r.cell.rate else f"{r.cell.connections} clients at once"
        device = file.run.gpu or file.run.cpu
        source = f"{name} ({device}, {how}, commit {file.run.commit}, {file.run.date[:10]})"
        fanin = r.system.endswith("fanin")
        found.append(
            Point(
                "fanin" if fanin else "colocated", r.model or "?", r.batch, r.requests_per_s, r.p99_us / 1e3,
                r.cell.gpus if file.run.gpu else 0, r.cell.cores or file.run.cores,
                r.ingress * r.cell.gpus if fanin else 0, source,
            )
        )  # fmt: skip
    return found


def plan(load: Load, points: Sequence[Point]) -> Plan:
    """The plan with the fewest nodes; of equals the one with the fewest processes.

    A measurement holds for requests of at most as many candidates as it had, and for deadlines of at least its p99.

    Raises:
        InputError: nothing that was measured says anything about the load.
    """
    machines = [p for p in points if p.gpus in (load.gpus_per_node, 0) and load.topology in (None, p.topology)]
    if not machines:
        had = sorted({(p.gpus, p.topology) for p in points})
        raise InputError.worded("gpus-per-node and topology", f"{load.gpus_per_node} and {load.topology}", f"one of {had}")
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
