"""Result files read back: records by suite and cell, and the few statistics that tables, plots and aims share."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, log
from pathlib import Path
from typing import Any

from benchmarks.records.record import Record, identity, title
from benchmarks.systems.names import MODEL_TITLES, OURS, is_compiled


@dataclass(frozen=True)
class Results:
    """What a folder holds. `runs`: the run-level facts by `file` of their records; files of one suite are read as one, by name.

    Systems are named as `title` has them.
    """

    runs: Mapping[str, Mapping[str, Any]]
    records: tuple[Record, ...]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        runs, records = {}, []
        for file in sorted(folder.glob("*.json")):
            stored = json.loads(file.read_text())
            parts = {file.name: stored}
            for what, key in (("cells", "other_cells"), ("peers", "earlier_peers")):
                for e in stored.get(key, ()):
                    parts[f"{file.name}, {what} of {e['run']['date']}, commit {e['run']['commit']}"] = e
            for name, part in parts.items():
                runs[name] = part["run"]
                for r in part["records"]:
                    records.append({**r, "file": name, "system": title(r)})
        return cls(runs, tuple(records))

    def of(self, suite: str, **fixed: object) -> list[Record]:
        """A suite's records with these values, in the record or in its cell."""
        return [r for _, r in self._placed(suite, fixed)]

    def cells(self, suite: str, **fixed: object) -> list[dict[str, Record]]:
        """The same by cell: system -> record. In the order of the file, but a model's cells together, by contexts and rows.

        Of a system that several runs have in a cell the last; of a compiled peer the fastest, for it is the one to beat.
        """
        asked = suite, *fixed.items()
        if asked not in self._cells:
            found: dict[tuple[Any, ...], dict[str, Record]] = {}
            for place, r in self._placed(suite, fixed):
                cell, system = found.setdefault(place, {}), r["system"]
                before = cell.get(system)
                if not before or not is_compiled(system) or (r["p50_us"] or inf) < (before["p50_us"] or inf):
                    cell[system] = r
            self._cells[asked] = sorted(found.values(), key=lambda c: _place(any_of(c), self._models))
        return list(self._cells[asked])

    def usual(self, suite: str, *systems: str, **fixed: object) -> list[dict[str, Record]]:
        """Those that nothing sets apart (`cell_name`) and that have all of these systems: for tables without a label."""
        asked = suite, systems, *fixed.items()
        if asked not in self._usual:
            found = self.cells(suite, **fixed)
            self._usual[asked] = [cell for cell in found if set(systems) <= cell.keys() and not cell_name(any_of(cell))]
        return list(self._usual[asked])

    def gains(self, **fixed: object) -> list["Gain"]:
        """Usual cells of suite `latency` that have us and a compiled peer. In the order of `cells`."""
        asked = tuple(fixed.items())
        if asked not in self._gains:
            self._gains[asked] = [gain for cell in self.usual("latency", "dpiframe", **fixed) if (gain := Gain.of(cell))]
        return list(self._gains[asked])

    def latest(self, suite: str, **fixed: object) -> list[Record]:
        """One system's records, the last file's where several have a cell. In the order of `cells`."""
        return [any_of(cell) for cell in self.cells(suite, **fixed)]

    @property
    def suites(self) -> list[str]:
        return list(self._by_suite)

    def _placed(self, suite: str, fixed: Mapping[str, object]) -> list[tuple[tuple[Any, ...], Record]]:
        """A suite's records with these values, each behind what names its cell."""
        asked = suite, *fixed.items()
        if asked not in self._answers:
            found = self._by_suite.get(suite, [])
            wanted = [(place, r) for place, r in found if all(r.get(k, r["cell"].get(k)) == v for k, v in fixed.items())]
            self._answers[asked] = wanted
        return self._answers[asked]

    @cached_property
    def _answers(self) -> dict[tuple[object, ...], list[tuple[tuple[Any, ...], Record]]]:
        """By what was asked for: tables, pictures and aims ask for the same few thousands of times."""
        return {}

    @cached_property
    def _cells(self) -> dict[tuple[object, ...], list[dict[str, Record]]]:
        """The same of cells, which nobody changes."""
        return {}

    @cached_property
    def _usual(self) -> dict[tuple[object, ...], list[dict[str, Record]]]:
        return {}

    @cached_property
    def _gains(self) -> dict[tuple[object, ...], list["Gain"]]:
        return {}

    @cached_property
    def _models(self) -> list[str | None]:
        return list(dict.fromkeys(r["model"] for r in self.records))

    @cached_property
    def _by_suite(self) -> Mapping[str, list[tuple[tuple[Any, ...], Record]]]:
        found: dict[str, list[tuple[tuple[Any, ...], Record]]] = {}
        for r in self.records:
            found.setdefault(r["suite"], []).append((identity(r)[1:], r))
        return found


@dataclass(frozen=True, slots=True)
class Gain:
    """Our time for a model and batch beside the fastest of all peers, one of which is compiled."""

    model: str
    batch: int
    precision: str
    ours: Record
    peer: Record
    eager: Record | None

    @classmethod
    def of(cls, cell: Mapping[str, Record]) -> "Gain | None":
        """None: the cell has no compiled peer."""
        ours, best = cell["dpiframe"], best_peer(cell)
        if best is None or not has_compiled(cell):
            return None
        return cls(ours["model"], ours["batch"], ours["precision"], ours, best, cell.get("eager"))

    @property
    def title(self) -> str:
        return model_title(self.ours)

    @property
    def over_peer(self) -> float:
        return float(self.peer["p50_us"] / self.ours["p50_us"])

    @property
    def over_eager(self) -> float | None:
        return float(self.eager["p50_us"] / self.ours["p50_us"]) if self.eager else None


def any_of(cell: Mapping[str, Record]) -> Record:
    """One of a cell's records: for what they have in common."""
    return next(iter(cell.values()))


def best_peer(cell: Mapping[str, Record]) -> Record | None:
    """The fastest of a cell's systems that is not ours."""
    return min((r for s, r in cell.items() if s not in OURS and r["p50_us"]), key=lambda r: r["p50_us"], default=None)


def has_compiled(cell: Iterable[str]) -> bool:
    """Whether some of a cell's systems is compiled, else the best of the weak would pass for a peer."""
    return any(map(is_compiled, cell))


def mean(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs))


def model_name(r: Record) -> str:
    """The model, and how many contexts a batch has, if they are several."""
    contexts = r["cell"].get("contexts", 1)
    return f"{r['model']}, {contexts} contexts" if contexts > 1 else r["model"]


def model_title(r: Record) -> str:
    """The same as papers write it."""
    return model_name(r | {"model": MODEL_TITLES.get(r["model"], r["model"])})


def _place(r: Record, models: list[str | None]) -> tuple[int, int, int]:
    """Where a cell stands among others. Lookups, which have no model, keep their order."""
    return models.index(r["model"]), r["cell"].get("contexts", 1), (r["batch"] or 0) if r["model"] else 0


def cell_name(r: Record) -> str:
    """What else sets a model's cell apart from the usual one."""
    own = r["cell"]
    capped = f"tables of {own['max_rows']} rows at most, " if own.get("max_rows") else ""
    ids = "uniform ids, " if own.get("ids") == "uniform" else ""
    stored = f"{own['tables']} tables, " if own.get("tables") == "int8" else ""
    return capped + stored + ids + ("serving buckets, " if own.get("buckets") == "default" else "")
