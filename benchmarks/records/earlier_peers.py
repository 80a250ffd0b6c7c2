"""The compiled peers of earlier runs that a result file keeps, each with its run: measuring again makes no peer weaker.

How fast `torch.compile` is differs from run to run, by what Inductor chose and by the host. The one to beat is the fastest.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.records.record import Record, identity
from benchmarks.systems.names import is_compiled

SUITE = "latency"  # the one whose claims are about the fastest peer of all runs
Stored = Mapping[str, Any]  # {"run": facts, "records": [..]}


def fastest_peers(runs: Iterable[Stored]) -> list[dict[str, Any]]:
    """Of each compiled peer and cell the fastest record, grouped by the run that it is of. Of two that are alike the first."""
    found: dict[tuple[Any, ...], tuple[Stored, Record]] = {}
    for stored in runs:
        for r in stored["records"]:
            if r["suite"] != SUITE or not is_compiled(r["system"]) or not r["p50_us"]:
                continue
            key = identity(r)
            if key not in found or r["p50_us"] < found[key][1]["p50_us"]:
                found[key] = stored, r
    kept: dict[str, dict[str, Any]] = {}
    for stored, r in found.values():
        kept.setdefault(json.dumps(stored["run"]), {"run": stored["run"], "records": []})["records"].append(r)
    return list(kept.values())


def of_file(stored: Stored) -> list[dict[str, Any]]:
    """What a file that is about to be measured anew hands on: its own compiled peers, and those that it has kept."""
    return fastest_peers([stored, *stored.get("other_cells", ()), *stored.get("earlier_peers", ())])
