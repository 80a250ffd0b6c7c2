"""Turns result files into RESULTS.md and plots: every figure there comes from the JSON files beside it, no word by hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Record
from benchmarks.report import plots, serving_report
from benchmarks.report.aims import CPU_AIMS, GPU_AIMS
from benchmarks.report.results import Results, any_of, best_peer, has_compiled, mean
from benchmarks.report.serving_aims import SERVING_CPU_AIMS, SERVING_GPU_AIMS
from benchmarks.systems.names import SYSTEMS, known_as
from dpiframe_core.engine.options import PRECISIONS

_INTRODUCTION = """# Results

Written by `python -m benchmarks report` from the JSON files in this folder; not by hand. What is measured, and how:
[docs/benchmarks.md](../../../docs/benchmarks.md)."""
_LATENCY = """Microseconds, host to host, median (p99): ids in host memory to scores in host memory, one call at a time. Tables
of Criteo Kaggle (39 fields, dim 16), MLP 1024-512-256, eight batches in rotation. Every system's scores were checked against
the float32 source model in the same run. `device`: ours alone, on the device, one graph after the other. A system that several
runs have in a cell stands with the last of them, a compiled peer with the fastest. `(ATEN)`: Inductor chose among cuBLAS's
products alone (docs/benchmarks.md).
"Over the best peer" is over the fastest of the row, of whichever run; it stands only where a compiled one was measured."""
_EMBEDDING = """Microseconds, median. `device` is device time, many launches in one graph; `call` is a launch and the wait for
it, all with ids on the device but for `pinned`, where our kernel reads them from host memory as the engine has it.
float32 tables give float32, others bfloat16 (eager and stacked: what the tables hold)."""
_STAGES = {
    "ablation": "Microseconds, host to host, median; each column adds a component to the last (in brackets: over eager).",
    "first_op": "Microseconds from the first operator's launch to the scores in host memory, median (in brackets: over eager).",
}
_UTILISATION = """As many threads as lanes call without a pause. SM active, occupancy and DRAM active are the GPU's own counters
over the loop; kernels by CUPTI over fifty calls in a row: their times added up over streams, and the time with any of them
running, both over the wall time (which profiling lengthens)."""
_FLOOR = """`floor` = graph launch and wait + (distinct table rows + weights) / copy bandwidth + (ids + scores) / pinned-memory
bandwidth + operations / rate, all measured in the same run."""


def write(folder: Path) -> str:
    """Writes `folder`/RESULTS.md and the PNGs that it shows; returns the text."""
    results = Results.read(folder)
    text = [_INTRODUCTION, *_aims(results)]
    for suite, table in _TABLES.items():
        if not results.of(suite):
            continue
        text += ["", f"## {suite}", "", *_runs(results, suite), "", *table(results)]
        for picture in plots.draw(suite, results, folder):
            text += ["", f"![{picture.stem}]({picture.name})"]
    whole = "\n".join([*text, ""])
    (folder / "RESULTS.md").write_text(whole)
    return whole


def _runs(results: Results, suite: str) -> list[str]:
    files = dict.fromkeys(r["file"] for r in results.of(suite))
    out = []
    for name in files:
        run = results.runs[name]
        versions = [("driver", run["driver"]), ("torch", run["torch"]), ("CuPy", run["cupy"]), ("FBGEMM", run.get("fbgemm"))]
        host = [("host", run["cpu"])] if run["gpu"] else []
        known = ", ".join(f"{k} {v}" for k, v in versions + host if v)
        out.append(f"{name}: {run['gpu'] or run['cpu']}, {known}, commit {run['commit']}, {run['date']}.")
    return out


def _aims(results: Results) -> list[str]:
    on_gpu = any(run["gpu"] for run in results.runs.values())
    aims = GPU_AIMS if on_gpu else CPU_AIMS
    if results.of("serving"):
        aims += SERVING_GPU_AIMS if on_gpu else SERVING_CPU_AIMS
    rows = []
    for aim in aims:
        verdict = aim.judge(results)
        rows.append([aim.what, aim.rule, verdict.figure, {True: "met", False: "missed", None: "-"}[verdict.met]])
    return ["", "## Aims", "", *_table(["", "aim", "measured", ""], rows, figures=4)]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], figures: int = 1) -> list[str]:
    """Markdown; columns from number `figures` on are aligned to the right."""
    line = "|" + "".join("---|" if i < figures else "---:|" for i in range(len(head)))
    return [f"| {' | '.join(head)} |", line, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def _latency(results: Results) -> list[str]:
    text = [_LATENCY]
    for precision in dict.fromkeys(r["precision"] for r in results.of("latency")):
        records = results.of("latency", precision=precision)
        systems = sorted(dict.fromkeys(r["system"] for r in records), key=lambda s: (SYSTEMS.index(known_as(s)), s))
        rows, over = [], {s: [] for s in (*systems, "the best peer")}  # type: dict[str, list[float]]
        for cell in results.cells("latency", precision=precision):
            r, ours, best = any_of(cell), cell.get("dpiframe"), best_peer(cell)
            figures = [f"{_us(cell[s]['p50_us'])} ({_us(cell[s]['p99_us'])})" if s in cell else "" for s in systems]
            device, gain = "", ""
            if ours and best and has_compiled(cell):
                gain = f"{best['p50_us'] / ours['p50_us']:.2f}x"
                over["the best peer"].append(best["p50_us"] / ours["p50_us"])
            for s in cell.keys() - {"dpiframe"} if ours else ():
                over[s].append(cell[s]["p50_us"] / ours["p50_us"])
            if ours and ours["device_us"]:
                device = f"{ours['device_us']:.1f}"
            rows.append([r["model"], _ids(r) + str(r["batch"]), *figures, device, gain])
        text += ["", f"### {precision}", "", *_table(["model", "B", *systems, "device", "over the best peer"], rows)]
        gains = [f"{s}: {mean(v):.2f}x (least {min(v):.2f}x)" for s, v in over.items() if v]
        worst = max((r["max_abs_err"] for r in records if r["system"] == "dpiframe"), default=0.0)
        text += ["", f"Over each, geometric mean: {', '.join(gains)}. Largest deviation of a probability: {worst:.1e}."]
    return text


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ids(r: Record) -> str:
    """What else sets a cell apart from the usual one."""
    own = r["cell"]
    return ("uniform ids, " if own.get("ids") == "uniform" else "") + (
        "serving buckets, " if own.get("buckets") == "default" else ""
    )


def _embedding(results: Results) -> list[str]:
    systems = {"dpiframe": "call", "dpiframe-pinned": "pinned", "fbgemm": "FBGEMM call", "fbgemm-captured": "FBGEMM captured",
               "eager": "eager call", "stacked-eager": "stacked call"}  # fmt: skip
    text = [_EMBEDDING]
    for dtype in dict.fromkeys(r["cell"]["dtype"] for r in results.of("embedding")):
        rows = []
        for cell in results.cells("embedding", dtype=dtype):
            r = any_of(cell)
            c, ours = r["cell"], cell.get("dpiframe")
            name = f"{c['fields']} x {c['dim']}" + (f", bags of {c['bag']}" if c["bag"] > 1 else "")
            name += (", uniform" if c["ids"] == "uniform" else "") + (", large tables" if c["large"] else "")
            theirs = cell.get("fbgemm-captured")
            device = [f"{x['device_us']:.2f}" if x and x["device_us"] else "" for x in (ours, theirs)]
            gain = f"{theirs['device_us'] / ours['device_us']:.2f}x" if all(device) and ours and theirs else ""
            rate = f"{ours['bytes_per_s'] / 1e9:.0f}" if ours and ours["bytes_per_s"] else ""
            gathers = [x["bytes_per_s"] / 1e9 for s, x in cell.items() if s.startswith("gather")]
            calls = [_us(cell[s]["p50_us"]) if s in cell else "" for s in systems]
            rows.append([name, r["batch"], *device, gain, rate, f"{max(gathers):.0f}" if gathers else "", *calls])
        head = ["fields x dim", "B", "device", "FBGEMM device", "over it", "GB/s", "gather GB/s", *systems.values()]
        text += ["", f"### {dtype} tables", "", *_table(head, rows)]
    return text


def _stages(suite: str) -> Callable[[Results], list[str]]:
    def table(results: Results) -> list[str]:
        stages = list(dict.fromkeys(r["system"] for r in results.of(suite)))
        rows = []
        for cell in results.cells(suite):
            r, eager = any_of(cell), cell.get("eager")
            figures = []
            for s in stages:
                gain = f" ({eager['p50_us'] / cell[s]['p50_us']:.1f}x)" if eager and s in cell and s != "eager" else ""
                figures.append(f"{_us(cell[s]['p50_us'])}{gain}" if s in cell else "")
            rows.append([r["model"], r["precision"], r["batch"], *figures])
        return [_STAGES[suite], "", *_table(["model", "", "B", *stages], rows, figures=2)]

    return table


def _utilisation(results: Results) -> list[str]:
    shares = {"sm_active": "SM active", "sm_occupancy": "occupancy", "dram_active": "DRAM active",
              "kernel_share": "kernels, sum", "kernel_union": "kernels, any"}  # fmt: skip
    rows = []
    for r in results.of("utilisation"):
        figures = [f"{r[k]:.1%}" if r[k] is not None else "" for k in shares]
        times = [f"{r['rows_per_s'] / 1e6:.2f}", f"{r['p50_us']:.0f} ({r['p99_us']:.0f})"]
        rows.append([r["model"], r["precision"], r["system"], r["batch"], r["cell"]["lanes"], *times, *figures])
    head = ["model", "", "system", "B", "lanes", "M rows/s", "p50 (p99) us", *shares.values()]
    return [_UTILISATION, "", *_table(head, rows, figures=3)]


def _floor(results: Results) -> list[str]:
    text = [_FLOOR]
    for m in results.of("floor", system="machine"):
        rates = ", ".join(f"{p} {rate / 1e12:.1f}" for p, rate in m["operations_per_s"].items())
        text += [
            "",
            f"Launch and wait {m['launch_us']:.1f} us, {m['polled_us']:.1f} us if the host polls; copy "
            f"{m['copy_bytes_per_s'] / 1e12:.2f} TB/s; pinned memory "
            f"{m['pinned_bytes_per_s'] / 1e9:.1f} GB/s; products of {m['cell']['gemm']}^3, TFLOP/s: {rates}.",
        ]
    rows = []
    for r in sorted(results.latest("floor", system="dpiframe"), key=lambda r: PRECISIONS["cuda"].index(r["precision"])):
        device = f"{r['device_us']:.1f}" if r["device_us"] else ""
        rows.append(
            [r["model"], r["precision"], r["batch"], f"{r['p50_us']:.1f}", device, f"{r['floor_us']:.1f}", f"{r['ratio']:.2f}x"]
        )
    return [*text, "", *_table(["model", "", "B", "p50 us", "device us", "floor us", "p50 over floor"], rows, figures=2)]


def _precision(results: Results) -> list[str]:
    rows = []
    for r in results.of("precision"):
        deviations = [f"{r['max_abs_err']:.1e}", f"{r['mean_abs_err']:.1e}"]
        rows.append(
            [
                r["precision"],
                f"{r['p50_us']:.0f}",
                *deviations,
                f"{r['kendall_tau']:.6f}",
                f"{r['auc']:.5f}",
                f"{r['auc_delta']:+.1e}",
            ]
        )
    count = results.of("precision")[0]["cell"]["rows"]
    note = f"The demo model on its {count:,} held-out rows, against our own float32. p50 of a batch of 1024."
    head = ["", "p50 us", "largest deviation", "mean deviation", "Kendall tau", "AUC", "AUC delta"]
    return [note, "", *_table(head, rows)]


def _warmup(results: Results) -> list[str]:
    rows = []
    for r in results.of("warmup"):
        sizes = [f"{r[k] / 1e6:.0f}" for k in ("table_bytes", "buffer_bytes", "captured_bytes")]
        rows.append([r["model"], r["precision"], r["cell"]["start"], r["buckets"], f"{r['seconds']:.1f}", *sizes])
    note = "Seconds from a loaded model to a ready engine. `cold`: no caches; `again`: with what that start left there."
    head = ["model", "", "start", "buckets", "seconds", "tables MB", "buffers MB", "captured graphs MB"]
    return [note, "", *_table(head, rows, figures=3)]


def _http(results: Results) -> list[str]:
    rows = []
    for r in results.of("http"):
        figures = [f"{r['p50_us'] / 1e3:.2f}", f"{r['p99_us'] / 1e3:.2f}", f"{r['requests_per_s']:.0f}"]
        rows.append([r["system"], r["batch"], r["cell"]["clients"], *figures])
    note = "The endpoint, client to client, load generator on the same cores. `batch`: candidates a request."
    return [note, "", *_table(["system", "batch", "clients", "p50 ms", "p99 ms", "requests/s"], rows)]


_TABLES: Mapping[str, Callable[[Results], list[str]]] = {
    "latency": _latency, "embedding": _embedding, "ablation": _stages("ablation"), "first_op": _stages("first_op"),
    "utilisation": _utilisation, "floor": _floor, "precision": _precision, "warmup": _warmup,
    "http": _http, "serving": lambda results: serving_report.serving(results, _table),
    "serving_stages": lambda results: serving_report.stages(results, _table),
    "autoscaling": lambda results: serving_report.autoscaling(results, _table),
}  # fmt: skip
