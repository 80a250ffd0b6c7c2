"""Turns result files into RESULTS.md: every figure there comes from a JSON file beside it."""

import json
from collections.abc import Iterable
from math import exp, log
from pathlib import Path


def write_tables(folder: Path) -> str:
    """Writes `folder`/RESULTS.md from its latency*.json files and returns the text."""
    text = ["# Results", "", "Written by `python -m benchmarks report` from the JSON files in this folder; not by hand.", ""]
    text += [
        "Microseconds, host to host, median (p99): ids in host memory to scores in host memory, one call at a time. Tables of",
        "Criteo Kaggle (39 fields, dim 16), MLP 1024-512-256, Zipf ids, eight batches in rotation. Every system's scores were",
        "checked against the float32 source model in the same run. `eager`: a table per field; `stacked-eager`: one table for",
        "all; `compile-captured`: that model by torch.compile max-autotune, captured by hand in one CUDA graph.",
    ]
    for file in sorted(folder.glob("latency*.json")):
        text += _tables(file)
    (folder / "RESULTS.md").write_text("\n".join([*text, ""]))
    return "\n".join(text)


def _tables(file: Path) -> list[str]:
    stored = json.loads(file.read_text())
    run, records = stored["run"], stored["records"]
    systems = list(dict.fromkeys(r["system"] for r in records))
    text = [
        "",
        f"## {file.name}",
        "",
        f"{run['gpu'] or run['cpu']}, driver {run['driver']}, torch {run['torch']}, CuPy {run['cupy']}, "
        f"commit {run['commit']}, {run['date']}.",
    ]
    for precision in dict.fromkeys(r["precision"] for r in records):
        text += ["", f"### {precision}", "", "| model | B | " + " | ".join(systems) + " | over eager | over the best peer |"]
        text.append("|---|---:|" + "---:|" * (len(systems) + 2))
        own = [r for r in records if r["precision"] == precision]
        eager_gains, peer_gains = [], []
        for model, batch in dict.fromkeys((r["model"], r["batch"]) for r in own):
            cell = {r["system"]: r for r in own if (r["model"], r["batch"]) == (model, batch)}
            if len(cell) < len(systems):  # the run was cut short here
                continue
            ours = cell["dpiframe"]["p50_us"]
            eager_gains.append(cell["eager"]["p50_us"] / ours)
            peer_gains.append(min(r["p50_us"] for s, r in cell.items() if s != "dpiframe") / ours)
            figures = [f"{cell[s]['p50_us']:.0f} ({cell[s]['p99_us']:.0f})" for s in systems]
            text.append(
                f"| {model} | {batch} | " + " | ".join(figures) + f" | {eager_gains[-1]:.1f}x | {peer_gains[-1]:.2f}x |"
            )
        worst = max(r["max_abs_err"] for r in own if r["system"] == "dpiframe")
        text += [
            "",
            f"Geometric mean over eager {_mean(eager_gains):.1f}x (least {min(eager_gains):.1f}x), over the best peer of "
            f"each cell {_mean(peer_gains):.2f}x (least {min(peer_gains):.2f}x). Largest deviation of a probability: "
            f"{worst:.1e}.",
        ]
    return text


def _mean(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [log(v) for v in values]
    return exp(sum(logs) / len(logs))
