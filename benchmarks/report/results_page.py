"""A machine's RESULTS.md and plots: every figure there comes from the JSON files beside it, no word by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.report import device_tables, imported, performance_serving, plots, serving_tables, tiers
from benchmarks.report.aims import CPU_AIMS, GPU_AIMS, NOTHING, TIERS_AIMS, TIERS_SUITES, Aim
from benchmarks.report.markdown import table
from benchmarks.report.results import Results
from benchmarks.report.serving_aims import SERVING_CPU_AIMS, SERVING_GPU_AIMS

_INTRODUCTION = """# Results

Written by `python -m benchmarks report` from the JSON files in this folder; not by hand. What is measured, and how:
[docs/benchmarks.md](../../../docs/benchmarks.md). What it comes to: [docs/performance.md](../../../docs/performance.md)."""


def _tiers(results: Results) -> list[str]:
    """Of one GPU and of several: what there is."""
    made = (part(results) for part in (tiers.tiers, tiers.collectives, tiers.alone, tiers.placements))
    return [line for part in made if part for line in (*part, "")][:-1]


_TABLES: Mapping[str, Callable[[Results], list[str]]] = {
    "latency": device_tables.latency, "embedding": device_tables.embedding,
    "ablation": device_tables.stages("ablation"), "first_op": device_tables.stages("first_op"),
    "utilisation": device_tables.utilisation, "mlperf": device_tables.mlperf,
    "contexts": device_tables.contexts,
    "imported": imported.measured, "tiers": _tiers,
    "links": tiers.links, "tiers-large": tiers.large, "tiers-load": tiers.loading,
    "tiers-promotion": tiers.promotion,
    "floor": device_tables.floor, "precision": device_tables.precision,
    "warmup": device_tables.warmup, "http": serving_tables.http, "serving": serving_tables.serving,
    "serving_stages": serving_tables.serving_stages, "lone_request": serving_tables.lone_request,
    "request_budget": serving_tables.request_budget,
    "autoscaling": serving_tables.autoscaling, "stalls": performance_serving.stalls, "score": serving_tables.score,
}  # fmt: skip


def write(folder: Path) -> str:
    """Writes `folder`/RESULTS.md and the PNGs that it shows; returns the text."""
    results = Results.read(folder)
    text = page(results)
    (folder / "RESULTS.md").write_text(text)
    draw(results, folder)
    return text


def draw(results: Results, folder: Path) -> None:
    """Writes the PNGs that the page of these results shows."""
    for suite in _shown(results):
        plots.draw(suite, results, folder)


def page(results: Results) -> str:
    """The text of RESULTS.md."""
    text = [_INTRODUCTION, *_aims(results)]
    for suite in _shown(results):
        text += ["", f"## {suite}", "", *_runs(results, suite), "", *_TABLES[suite](results)]
        for name, _ in plots.figures(suite, results):
            text += ["", f"![{name}]({name}.png)"]
    return "\n".join([*text, ""])


def _shown(results: Results) -> list[str]:
    return [suite for suite in _TABLES if results.of(suite)]


def _runs(results: Results, suite: str) -> list[str]:
    """A line a run: its file, machine, versions, commit and date."""
    out = []
    for name in dict.fromkeys(r["file"] for r in results.of(suite)):
        run = results.runs[name]
        versions = [("driver", run["driver"]), ("torch", run["torch"]), ("CuPy", run["cupy"]), ("FBGEMM", run.get("fbgemm"))]
        host = [("host", run["cpu"])] if run["gpu"] else []
        known = ", ".join(f"{k} {v}" for k, v in versions + host if v)
        file = name.removesuffix(f", commit {run['commit']}")  # it is said anyway
        out.append(f"- {file}: {run['gpu'] or run['cpu']}, {known}, commit {run['commit']}, {run['date']}.")
    return out


def aims_of(results: Results) -> tuple[Aim, ...]:
    """What is aimed at on such a machine."""
    if results.suites and set(results.suites) <= TIERS_SUITES:
        return TIERS_AIMS
    on_gpu = any(run["gpu"] for run in results.runs.values())
    aims = GPU_AIMS if on_gpu else CPU_AIMS
    if results.of("serving"):
        aims += SERVING_GPU_AIMS if on_gpu else SERVING_CPU_AIMS
    return aims


def _aims(results: Results) -> list[str]:
    rows, without = [], []
    for aim in aims_of(results):
        verdict = aim.judge(results)
        if verdict == NOTHING:
            without.append(aim.what)
        else:
            rows.append([aim.what, aim.rule, verdict.figure, {True: "met", False: "missed", None: "-"}[verdict.met]])
    missing = ["", f"Not measured here: {'; '.join(without)}."] if without else []
    return ["", "## Aims", "", *table(["", "aim", "measured", ""], rows, figures=4), *missing]
