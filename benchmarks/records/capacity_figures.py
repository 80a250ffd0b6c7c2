"""The figures that `dpiframe capacity` brings: of the stored records those that say how many requests a node answers."""

import json
from typing import Any

from benchmarks.records.run import RESULTS
from deployments.cli.capacity_points import OURS, SUITES, SYSTEMS

_FILES = (
    "h200/request_budget.json", "h200/serving_stages.json", "h200/serving-gpus-haproxy.json",
    "h200/serving-gpus-direct-six.json", "h200/serving-gpus.json", "cpu/serving.json", "cpu-amd/serving.json",
)  # fmt: skip
_SINCE = "2026-11-27"  # before, requests by HAProxy took several times as long; of four GPUs there are no later ones
_FOUR_GPUS = "h200/serving-gpus.json"
_KEPT = ("suite", "system", "model", "batch", "cell", "p99_us", "requests_per_s", "failed", "load_limited", "ingress")


def write() -> None:
    OURS.write_text("[\n" + ",\n".join(json.dumps(file) for file in figures()) + "\n]\n")


def figures() -> list[dict[str, Any]]:
    """A file of records for each run: its name in the repository, its run, and what is needed of each record."""
    found = []
    for name in _FILES:
        stored = json.loads((RESULTS / name).read_text())
        for part in (stored, *stored.get("other_cells", [])):
            if part["run"]["date"] < _SINCE and name != _FOUR_GPUS:
                continue
            records = [
                {key: r[key] for key in _KEPT if key in r}
                for r in part["records"]
                if r["suite"] in SUITES and r["system"] in SYSTEMS and r["model"] == "demo" and "form" in r["cell"]
                and (name != _FOUR_GPUS or r["cell"]["gpus"] == 4)
            ]  # fmt: skip
            found.append({"file": f"benchmarks/results/{name}", "run": part["run"], "records": records})
    return found
