"""The tables of the suites that time models and lookups, in a machine's RESULTS.md."""

from collections.abc import Callable

from benchmarks.records.record import Record
from benchmarks.report.markdown import table, us
from benchmarks.report.results import Results, any_of, best_peer, cell_name, has_compiled, mean, model_name
from benchmarks.systems.names import OURS, SYSTEMS, known_as
from dpiframe_core.engine.options import PRECISIONS

_LATENCY = """Microseconds, host to host, median (p99): ids in host memory to scores in host memory, one call at a time. The
four models read tables of Criteo Kaggle (39 fields, dim 16), MLP 1024-512-256; docs/benchmarks.md has the others. Eight batches
in rotation. Every system's scores were checked against the float32 source model in the same run. `device`: ours alone, on the
device, one graph after the other. A system that several runs have in a cell stands with the last of them, a compiled peer with
the fastest. `(ATEN)`: Inductor chose among cuBLAS's products alone.
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
_MLPERF = """MLPerf's DLRM-DCNv2: 13 numbers and 26 tables of dim 128, float16, bags of 1 to 100 ids, 214 a pair; {tables}.
From ids in host memory to scores in host memory, as many callers as lanes, as in `utilisation`."""
_RANKING = """How its scores rank: against the source model, and clicks that were drawn by that one's probabilities."""
_RANKED = ("largest deviation", "mean deviation", "Kendall tau", "AUC", "AUC delta")
_CONTEXTS = """Half of the 39 fields are the context's. Waves that multiply all columns of every row, beside the program that
the warm-up found fastest; `shares` multiplies a context's columns once."""
_FLOOR = """`floor` = graph launch and wait + (distinct table rows + weights) / copy bandwidth + (ids + scores) / pinned-memory
bandwidth + operations / rate, all measured in the same run. `chain floor` = floor + a trip over the bus + a dependent kernel
for each launch but the first: of an implementation that takes so many kernels, of which each needs the one before it."""


_TIMELINE = (
    """Where a call's time goes: kernels by CUPTI, medians of 50 calls in line. Each begins before the one ahead of it ends."""
)


def latency(results: Results) -> list[str]:
    text = [_LATENCY]
    for precision in dict.fromkeys(r["precision"] for r in results.of("latency")):
        records = results.of("latency", precision=precision)
        systems = sorted(dict.fromkeys(r["system"] for r in records), key=lambda s: (SYSTEMS.index(known_as(s)), s))
        rows = []
        over: dict[str, list[float]] = {s: [] for s in (*systems, "the best peer")}
        for cell in results.cells("latency", precision=precision):
            r, ours, best = any_of(cell), cell.get("dpiframe"), best_peer(cell)
            figures = [f"{us(cell[s]['p50_us'])} ({us(cell[s]['p99_us'])})" if s in cell else "" for s in systems]
            device, gain = "", ""
            usual = not cell_name(r)
            if ours and best and has_compiled(cell):
                gain = f"{best['p50_us'] / ours['p50_us']:.2f}x"
                over["the best peer"] += [best["p50_us"] / ours["p50_us"]] * usual
            for s in cell.keys() - {*OURS} if ours and usual else ():
                over[s].append(cell[s]["p50_us"] / ours["p50_us"])
            if ours and ours["device_us"]:
                device = f"{ours['device_us']:.1f}"
            rows.append([model_name(r), cell_name(r) + str(r["batch"]), *figures, device, gain])
        text += ["", f"### {precision}", "", *table(["model", "B", *systems, "device", "over the best peer"], rows)]
        gains = [f"{s}: {mean(v):.2f}x (least {min(v):.2f}x)" for s, v in over.items() if v]
        errors = [r["max_abs_err"] for r in records if r["system"] == "dpiframe"]
        deviation = [f"Largest deviation of a probability: {max(errors):.1e}."] if errors else []
        over_each = [f"Over each, geometric mean: {', '.join(gains)}."] * bool(gains)
        text += ["", *over_each, *deviation]
    return text


def embedding(results: Results) -> list[str]:
    systems = {"dpiframe": "call", "dpiframe-pinned": "pinned", "fbgemm": "FBGEMM call", "fbgemm-captured": "FBGEMM captured",
               "eager": "eager call", "stacked-eager": "stacked call"}  # fmt: skip
    text = [_EMBEDDING]
    for dtype in dict.fromkeys(r["cell"]["dtype"] for r in results.of("embedding")):
        rows = []
        for cell in results.cells("embedding", dtype=dtype):
            r = any_of(cell)
            c, ours = r["cell"], cell.get("dpiframe")
            name = f"{c['fields']} x {c['dim']}" + (f", bags of {c['bag'] or '1 to 100'}" if c["bag"] != 1 else "")
            name += (", uniform" if c["ids"] == "uniform" else "") + (", large tables" if c["large"] else "")
            theirs = cell.get("fbgemm-captured")
            device = [f"{x['device_us']:.2f}" if x and x["device_us"] else "" for x in (ours, theirs)]
            gain = f"{theirs['device_us'] / ours['device_us']:.2f}x" if all(device) and ours and theirs else ""
            rate = f"{ours['bytes_per_s'] / 1e9:.0f}" if ours and ours["bytes_per_s"] else ""
            gathers = [x["bytes_per_s"] / 1e9 for s, x in cell.items() if s.startswith("gather")]
            calls = [us(cell[s]["p50_us"]) if s in cell else "" for s in systems]
            rows.append([name, r["batch"], *device, gain, rate, f"{max(gathers):.0f}" if gathers else "", *calls])
        head = ["fields x dim", "B", "device", "FBGEMM device", "over it", "GB/s", "gather GB/s", *systems.values()]
        text += ["", f"### {dtype} tables", "", *table(head, rows)]
    return text


def stages(suite: str) -> Callable[[Results], list[str]]:
    def stage_table(results: Results) -> list[str]:
        stages = list(dict.fromkeys(r["system"] for r in results.of(suite)))
        rows = []
        for cell in results.cells(suite):
            r, eager = any_of(cell), cell.get("eager")
            figures = []
            for s in stages:
                gain = f" ({eager['p50_us'] / cell[s]['p50_us']:.1f}x)" if eager and s in cell and s != "eager" else ""
                figures.append(f"{us(cell[s]['p50_us'])}{gain}" if s in cell else "")
            rows.append([r["model"], r["precision"], cell_name(r) + str(r["batch"]), *figures])
        return [_STAGES[suite], "", *table(["model", "", "B", *stages], rows, figures=2)]

    return stage_table


def utilisation(results: Results) -> list[str]:
    return [_UTILISATION, "", *_saturated(results, "utilisation", "rows")]


def mlperf(results: Results) -> list[str]:
    """MLPerf's shape, where a row is a pair."""
    r = results.of("mlperf")[0]
    tables = f"the largest of {r['largest_table_rows']:,} rows, {r['table_bytes'] / 1e9:.1f} GB in all"
    text = [_MLPERF.format(tables=tables), "", *_saturated(results, "mlperf", "pairs")]
    ours = [r for r in results.of("mlperf", system="dpiframe") if "kendall_tau" in r]
    ranked = {(r["precision"], cell_name(r) + str(r["batch"])): r for r in ours}
    if ranked:
        rows = [[*cell, *_ranking(r)] for cell, r in ranked.items()]
        text += ["", _RANKING, "", *table(["", "B", *_RANKED], rows)]
    return text


def _saturated(results: Results, suite: str, what: str) -> list[str]:
    shares = {"sm_active": "SM active", "sm_occupancy": "occupancy", "dram_active": "DRAM active",
              "kernel_share": "kernels, sum", "kernel_union": "kernels, any"}  # fmt: skip
    rows = []
    for r in results.of(suite):
        figures = [f"{r[k]:.1%}" if r[k] is not None else "" for k in shares]
        times = [f"{r['rows_per_s'] / 1e6:.2f}", f"{r['p50_us']:.0f} ({r['p99_us']:.0f})"]
        name = [model_name(r), r["precision"], r["system"], cell_name(r) + str(r["batch"]), r["cell"]["lanes"]]
        rows.append([*name, *times, *figures])
    return table(["model", "", "system", "B", "lanes", f"M {what}/s", "p50 (p99) us", *shares.values()], rows, figures=3)


def contexts(results: Results) -> list[str]:
    """Waves that multiply every row's columns, beside what the warm-up kept."""
    rows = []
    for cell in results.cells("contexts"):
        if not {"waves", "dpiframe"} <= cell.keys():
            continue
        each, ours = cell["waves"], cell["dpiframe"]
        name = [ours["model"], ours["precision"], str(ours["batch"]), str(ours["cell"]["contexts"]), ours["program"]]
        on_device = each["device_us"] and ours["device_us"]
        times = [us(r["p50_us"]) + (f" ({us(r['device_us'])})" if on_device else "") for r in (each, ours)]
        gain = f" ({each['device_us'] / ours['device_us']:.2f}x)" if on_device else ""
        rows.append([*name, *times, f"{each['p50_us'] / ours['p50_us']:.2f}x{gain}"])
    head = ["model", "", "rows", "contexts", "kept", "for each row, us (device)", "as kept, us (device)", "gain (device)"]
    return [_CONTEXTS, "", *table(head, rows, figures=3)]


def floor(results: Results) -> list[str]:
    text = [_FLOOR]
    for m in results.of("floor", system="machine"):
        steps = ""
        if "step_us" in m:
            steps = f" A dependent kernel {m['step_us']:.2f} us, a trip over the bus {m['trip_us']:.2f} us."
        rates = ", ".join(f"{p} {rate / 1e12:.1f}" for p, rate in m["operations_per_s"].items())
        text += [
            "",
            f"Launch and wait {m['launch_us']:.1f} us, {m['polled_us']:.1f} us if the host polls; copy "
            f"{m['copy_bytes_per_s'] / 1e12:.2f} TB/s; pinned memory "
            f"{m['pinned_bytes_per_s'] / 1e9:.1f} GB/s; products of {m['cell']['gemm']}^3, TFLOP/s: {rates}.{steps}",
        ]
    rows = []
    for r in sorted(results.latest("floor", system="dpiframe"), key=lambda r: PRECISIONS["cuda"].index(r["precision"])):
        device = f"{r['device_us']:.1f}" if r["device_us"] else ""
        name = [r["model"], r["precision"], cell_name(r) + str(r["batch"])]
        chain = [str(r["launches"]), f"{r['chain_floor_us']:.1f}", f"{r['chain_ratio']:.2f}x"] if "launches" in r else [""] * 3
        rows.append([*name, f"{r['p50_us']:.1f}", device, f"{r['floor_us']:.1f}", f"{r['ratio']:.2f}x", *chain])
    head = ["model", "", "B", "p50 us", "device us", "floor us", "p50 over floor", "launches", "chain floor us", "p50 over it"]
    return [*text, "", *table(head, rows, figures=2), *_timelines(results)]


def _timelines(results: Results) -> list[str]:
    rows = []
    for r in results.latest("floor", system="dpiframe"):
        if "kernels" not in r:
            continue
        on_device = sum(us for _, us in r["kernels"])
        steps = ", ".join(f"{name} {us:.1f}" for name, us in r["kernels"])
        rows.append([r["model"], r["precision"], r["batch"], f"{r['p50_us']:.1f}", f"{r['p50_us'] - on_device:.1f}", steps])
    head = ["model", "", "B", "p50 us", "launch and wait us", "each kernel's end behind the one before it, us"]
    return ["", _TIMELINE, "", *table(head, rows, figures=3)] if rows else []


def precision(results: Results) -> list[str]:
    rows = [[r["precision"], f"{r['p50_us']:.0f}", *_ranking(r)] for r in results.of("precision")]
    count = results.of("precision")[0]["cell"]["rows"]
    note = f"The demo model on its {count:,} held-out rows, against our own float32. p50 of a batch of 1024."
    return [note, "", *table(["", "p50 us", *_RANKED], rows)]


def _ranking(r: Record) -> list[str]:
    deviations = [f"{r['max_abs_err']:.1e}", f"{r['mean_abs_err']:.1e}"]
    return [*deviations, f"{r['kendall_tau']:.6f}", f"{r['auc']:.5f}", f"{r['auc_delta']:+.1e}"]


def warmup(results: Results) -> list[str]:
    rows = []
    for r in results.of("warmup"):
        sizes = [f"{r[k] / 1e6:.0f}" for k in ("table_bytes", "buffer_bytes", "captured_bytes")]
        rows.append([r["model"], r["precision"], r["cell"]["start"], r["buckets"], f"{r['seconds']:.1f}", *sizes])
    note = "Seconds from a loaded model to a ready engine. `cold`: no caches; `again`: with what that start left there."
    head = ["model", "", "start", "buckets", "seconds", "tables MB", "buffers MB", "captured graphs MB"]
    return [note, "", *table(head, rows, figures=3)]
