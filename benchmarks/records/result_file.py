"""What measurements are on disk: {"run": facts, "records": [one a system and cell], "other_cells": [], "earlier_peers": []}.

Other cells and earlier peers are runs too, each with its facts: of cells that the last run left out; of compiled peers alone.
"""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.records import earlier_peers
from benchmarks.records.record import Record, identity, title


class ResultFile:
    """A suite's JSON file, complete and valid after every `add`, so that a run cut short leaves what it had.

    Compiled peers that the file has of earlier runs on such a machine stay, each with its own run (`earlier_peers`).

    Args:
        append: keep the records of other cells that stand there, if they are of the same machine. Those of another commit stay
            with their own run (`other_cells`) until their cell is measured anew.

    Attributes:
        dropped: what stands there that will not stay, in words: another machine's records, or no records at all.

    Raises:
        ValueError: what stands there holds no results, and is to be appended to.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], *, append: bool = False) -> None:
        self.path, self.run = path, dict(run)
        self.records: list[Record] = []
        self.earlier_peers: list[dict[str, Any]] = []
        self.other_cells: list[dict[str, Any]] = []
        self.dropped: str | None = None
        self._run_before: Mapping[str, Any] = self.run  # of the records that are appended to
        if not path.exists():
            return
        stored = _stored(path)
        if stored is None:
            if append:
                raise ValueError(f"{path}: got a file that holds no results, expected one to append to")
            self.dropped = "what stands there and holds no results"
            return
        before = stored["run"]
        same_machine, same_commit = _machine(before) == _machine(self.run), before.get("commit") == self.run.get("commit")
        if not same_machine:
            kind = "gpu" if before.get("gpu") else "cpu"
            self.dropped = f"records of {kind} {before.get(kind)}, commit {before.get('commit')}"
        if append and same_machine:
            self.earlier_peers, self.other_cells = stored.get("earlier_peers", []), stored.get("other_cells", [])
            if same_commit:
                self.records, self._run_before = stored["records"], before
            else:
                self.other_cells = [{"run": before, "records": stored["records"]}, *self.other_cells]
        elif same_machine:
            self.earlier_peers = earlier_peers.of_file(stored)

    def add(self, new: Record) -> None:
        """Puts a record in the place of the one of the same cell and system, if any, and writes the file."""
        at = [identity(r) for r in self.records]
        if identity(new) in at:
            place = at.index(identity(new))
            self._keep(self._run_before, self.records[place], new)
            self.records[place] = new
        else:
            self.records.append(new)
        for other in self.other_cells:
            for old in [r for r in other["records"] if identity(r) == identity(new)]:
                self._keep(other["run"], old, new)
                other["records"].remove(old)
        self.other_cells = [other for other in self.other_cells if other["records"]]
        cell = [r for r in self.records if identity(r)[1:] == identity(new)[1:] and r["p50_us"]]
        for r in cell:
            r["speedup_vs"] = {title(o): round(o["p50_us"] / r["p50_us"], 3) for o in cell if o is not r}
        self.write()

    def _keep(self, run: Mapping[str, Any], old: Record, new: Record) -> None:
        """A compiled peer of a run before that a slower one replaces is still the one to beat."""
        if run != self.run and (new["p50_us"] or inf) > (old["p50_us"] or inf):
            self.earlier_peers = earlier_peers.fastest_peers([*self.earlier_peers, {"run": run, "records": [old]}])

    def write(self) -> None:
        """A line a record, so that a change of one shows as one."""
        more = ""
        for name, runs in (("other_cells", self.other_cells), ("earlier_peers", self.earlier_peers)):
            told = ",\n ".join(f'{{"run": {json.dumps(e["run"])},\n  {_lines(e["records"], "   ")}}}' for e in runs)
            more += f',\n "{name}": [\n {told}]' if told else ""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(f'{{"run": {json.dumps(self.run)},\n {_lines(self.records, "  ")}{more}}}\n')
        unfinished.replace(self.path)


def _stored(path: Path) -> dict[str, Any] | None:
    """What a file of ours holds; None of another's, or of one that was cut short."""
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        for part in (stored, *stored.get("other_cells", ()), *stored.get("earlier_peers", ())):
            part["run"].keys()
            list(map(identity, part["records"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return stored


def _lines(records: list[Record], indent: str) -> str:
    """The records, one a line."""
    joined = f",\n{indent}".join(map(json.dumps, records))
    return f'"records": [\n{indent}{joined}\n{indent[1:]}]'


def _machine(run: Mapping[str, Any]) -> Any:
    """What a peer's time is of: the GPU, or the processor where there is none."""
    return run.get("gpu") or run.get("cpu")
