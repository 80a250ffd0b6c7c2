"""The loads that nodes were measured to answer, from records of suites `serving`, `request_budget` and `serving_stages`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from deployments.cli.capacity import Form, Point, Topology, Way
from dpiframe_core.errors import ConfigError
from dpiframe_core.strict import first_fault

OURS = Path(__file__).with_name("capacity_figures.json")
SYSTEMS: dict[str, tuple[Topology, Way]] = {
    "dpiframe": ("colocated", "haproxy"),
    "dpiframe-fanin": ("fanin", "haproxy"),
    "dpiframe-direct": ("colocated", "direct"),
    "dpiframe-fanin-direct": ("fanin", "direct"),
}
SUITES = ("serving", "request_budget", "serving_stages")
_INGRESSES = 8  # of the fan-in, in records that do not say it (docs/fan-in.md)
_REACHED = 0.97  # of an offered rate: with less, what waits grows


class _Cell(BaseModel):
    """What was asked of a service. rate: requests a second that were offered. offered: that as a share of the highest rate."""

    form: Form
    way: Way | None = None
    gpus: int = 1
    cores: int | None = None
    connections: int = 0
    ingress: int | None = None
    rate: float = 0
    offered: float = 0


class _Record(BaseModel):
    suite: str = "serving"
    system: str
    model: str | None
    batch: int | None
    cell: _Cell
    p99_us: float | None
    requests_per_s: float = 0
    failed: dict[str, int] | None = None
    load_limited: bool = False
    ingress: int = _INGRESSES

    @property
    def way(self) -> Way:
        return self.cell.way or SYSTEMS[self.system][1]

    @property
    def service(self) -> tuple[object, ...]:
        """What answers, and what it is asked."""
        cell = self.cell
        return self.system, self.model, self.batch, cell.form, self.way, cell.gpus, cell.cores, cell.ingress, self.ingress

    @property
    def closed(self) -> bool:
        return not (self.cell.rate or self.cell.offered)


class _Host(BaseModel):
    gpu: str | None
    cpu: str
    commit: str | None
    date: str

    @property
    def cores(self) -> int:
        return int(self.cpu.split(" cores")[0].rpartition(" ")[2])


class _Run(BaseModel):
    run: _Host
    records: list[dict[str, Any]]


class _File(_Run):
    """other_cells: of earlier runs, what the last one has not measured."""

    file: str = ""
    other_cells: list[_Run] = []


def read_points(path: Path) -> list[Point]:
    """The measured loads of a file of one of these suites, or of several in a list.

    Raises:
        ConfigError: it is no such file, or has none.
    """
    try:
        data = json.loads(path.read_bytes())
        files = TypeAdapter(list[_File]).validate_python(data if isinstance(data, list) else [data])
        points = [p for file in files for run in (file, *file.other_cells) for p in _points(run, file.file or str(path))]
    except OSError as error:
        raise ConfigError(f"{path}: got {error.strerror!r}, expected a file of records") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: got {str(error)[:80]!r}, expected records of suite serving") from None
    if not points:
        raise ConfigError(f"{path}: got no load of ours that was answered, expected records of suite {', '.join(SUITES)}")
    return points


def _points(run: _Run, name: str) -> Iterator[Point]:
    ours = [r for r in run.records if r.get("suite", "serving") in SUITES and r.get("system") in SYSTEMS and _has_form(r)]
    records = [_Record.model_validate(r) for r in ours]
    for r in records:
        if r.batch is None or r.p99_us is None or not _answered(r, records):
            continue
        rate = f"{r.cell.rate:,.0f}/s" if r.cell.rate else f"{r.cell.offered:.0%} of the highest rate"
        how = f"{r.cell.connections} clients at once" if r.closed else f"offered {rate}"
        device = run.run.gpu or run.run.cpu
        source = f"{name} ({device}, {how}, commit {run.run.commit}, {run.run.date[:10]})"
        topology, gpus = SYSTEMS[r.system][0], r.cell.gpus
        ingresses = r.ingress * gpus if r.cell.ingress is None else r.cell.ingress
        yield Point(
            topology, r.cell.form, r.way, r.model or "?", r.batch, r.requests_per_s, r.p99_us / 1e3,
            gpus if run.run.gpu else 0, r.cell.cores or run.run.cores, ingresses if topology == "fanin" else 0, source,
        )  # fmt: skip


def _has_form(record: dict[str, Any]) -> bool:
    return record.get("cell", {}).get("form") in get_args(Form)


def _answered(r: _Record, beside: Sequence[_Record]) -> bool:
    """Whether a service kept up with a load. A load generator that is full offers less, and its clients wait longer."""
    if r.failed or r.closed:
        return not r.failed
    offered = r.cell.rate
    if r.cell.offered:  # of the best loop of the same requests
        most = max((o.requests_per_s for o in beside if o.service == r.service and o.closed and not o.failed), default=None)
        if most is None:
            return False
        offered = most * r.cell.offered
    return not r.load_limited and r.requests_per_s >= _REACHED * offered
