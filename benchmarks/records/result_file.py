"""What measurements are on disk: {"run": facts, "records": [one a system and cell], "earlier_peers": [runs of peers alone]}."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import earlier_peers
from benchmarks.records.record import Record, identity

_SAME = ("gpu", "commit")  # records of runs that agree in these may stand in one file


class ResultFile:
    """A suite's JSON file, complete and valid after every `add`, so that a run cut short leaves what it had.

    Compiled peers that the file has of earlier runs on such a machine stay, each with its own run (`earlier_peers`).

    Args:
        append: keep the records of other cells that stand there, if they are of the same commit and GPU.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], *, append: bool = False) -> None:
        self.path, self.run = path, dict(run)
        self.records: list[Record] = []
        self.earlier_peers: list[dict[str, Any]] = []
        self.dropped: str | None = None
        if not path.exists():
            return
        stored = json.loads(path.read_text())
        if append and all(stored["run"].get(k) == self.run.get(k) for k in _SAME):
            self.records, self.earlier_peers = stored["records"], stored.get("earlier_peers", [])
            return
        if append:
            self.dropped = ", ".join(f"{k} {stored['run'].get(k)}" for k in _SAME)
        if _machine(stored["run"]) == _machine(self.run):
            self.earlier_peers = earlier_peers.of_file(stored)

    def add(self, new: Record) -> None:
        """Puts a record in the place of the one of the same cell and system, if any, and writes the file."""
        at = [identity(r) for r in self.records]
        if identity(new) in at:
            self.records[at.index(identity(new))] = new
        else:
            self.records.append(new)
        cell = [r for r in self.records if identity(r)[1:] == identity(new)[1:] and r["p50_us"]]
        for r in cell:
            r["speedup_vs"] = {o["system"]: round(o["p50_us"] / r["p50_us"], 3) for o in cell if o is not r}
        self.write()

    def write(self) -> None:
        """A line a record, so that a change of one shows as one."""
        peers = ",\n ".join(f'{{"run": {json.dumps(e["run"])},\n  {_lines(e["records"], "   ")}}}' for e in self.earlier_peers)
        more = f',\n "earlier_peers": [\n {peers}]' if peers else ""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(f'{{"run": {json.dumps(self.run)},\n {_lines(self.records, "  ")}{more}}}\n')
        unfinished.replace(self.path)


def _lines(records: list[Record], indent: str) -> str:
    """The records, one a line."""
    joined = f",\n{indent}".join(map(json.dumps, records))
    return f'"records": [\n{indent}{joined}\n{indent[1:]}]'


def _machine(run: Mapping[str, Any]) -> Any:
    """What a peer's time is of: the GPU, or the processor where there is none."""
    return run.get("gpu") or run.get("cpu")
