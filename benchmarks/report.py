"""Turns result files into RESULTS.md: every figure there comes from a JSON file beside it."""

import json
from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from typing import Any


def write_tables(folder: Path) -> str:
    """Writes `folder`/RESULTS.md from its latency.json and returns the text."""
    stored = json.loads((folder / "latency.json").read_text())
    run, records = stored["run"], stored["records"]
    where = run["gpu"] or run["cpu"]
    text = [
        "# Results",
        "",
        "Written by `python -m benchmarks report` from the JSON files in this folder; not by hand.",
        "",
        f"{where}, driver {run['driver']}, torch {run['torch']}, CuPy {run['cupy']}, commit {run['commit']}, {run['date']}.",
        "Microseconds, host to host, median (p99): ids in host memory to scores in host memory, one call at a time. Tables of",
        "Criteo Kaggle (39 fields, dim 16), MLP 1024-512-256, Zipf ids. Every system's scores were checked against the float32",
        "source model in the same run.",
    ]
    systems = list(dict.fromkeys(r["system"] for r in records))
    for precision in dict.fromkeys(r["precision"] for r in records):
        text += [
            "",
            f"## {precision}",
            "",
            "| model | B | " + " | ".join(systems) + " | faster than eager | than the best peer |",
        ]
        text.append("|---|---:|" + "---:|" * (len(systems) + 2))
        own = [r for r in records if r["precision"] == precision]
        eager_gains, peer_gains = [], []
        for model, batch in dict.fromkeys((r["model"], r["batch"]) for r in own):
            cell = {r["system"]: r for r in own if (r["model"], r["batch"]) == (model, batch)}
            ours = cell["dpiframe"]["p50_us"]
            peers = [r["p50_us"] for s, r in cell.items() if s != "dpiframe"]
            eager_gains.append(cell["eager"]["p50_us"] / ours)
            peer_gains.append(min(peers) / ours)
            figures = [f"{cell[s]['p50_us']:.0f} ({cell[s]['p99_us']:.0f})" if s in cell else "" for s in systems]
            text.append(
                f"| {model} | {batch} | " + " | ".join(figures) + f" | {eager_gains[-1]:.1f}x | {peer_gains[-1]:.2f}x |"
            )
        text += [
            "",
            f"Geometric mean over eager {_mean(eager_gains):.1f}x (least {min(eager_gains):.1f}x); over the best peer of each "
            f"cell {_mean(peer_gains):.2f}x (least {min(peer_gains):.2f}x).",
        ]
    worst: dict[str, float] = {}
    for r in records:
        if r["system"] == "dpiframe":
            worst[r["precision"]] = max(worst.get(r["precision"], 0.0), r["max_abs_err"])
    text += ["", "Largest deviation of a probability from the float32 source model: " + _listed(worst), ""]
    (folder / "RESULTS.md").write_text("\n".join(text))
    return "\n".join(text)


def _mean(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs))


def _listed(worst: dict[str, Any]) -> str:
    return ", ".join(f"{precision} {error:.1e}" for precision, error in worst.items()) + "."
