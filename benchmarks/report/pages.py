"""README.md and docs/performance.md: which of their parts come from the stored results, and what writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.records.run import RESULTS
from benchmarks.report import performance, performance_serving, speed_chart
from benchmarks.report.markdown import filled, table, times_over, us
from benchmarks.report.results import Results, any_of, gains
from benchmarks.report.serving_aims import measured

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/performance.md")
PICTURE = ROOT / "docs" / "img" / "speed.png"
_MACHINES = {
    "h200": "H200",
    "h200-second-host": "another H200 host",
    "cpu": "Intel Xeon",
    "cpu-second-intel": "another Intel Xeon",
    "cpu-amd": "AMD EPYC",
}


def write() -> list[Path]:
    """Writes the generated parts of both pages and the picture; returns what it wrote."""
    for page in PAGES:
        (ROOT / page).write_text(written_anew(page))
    speed_chart.draw(Results.read(RESULTS / "h200"), PICTURE)
    return [*(ROOT / page for page in PAGES), PICTURE]


def written_anew(page: str) -> str:
    """The page as it should be: its own words, and the parts that the stored results make."""
    stored = {folder: Results.read(RESULTS / folder) for folder in (*_MACHINES, "h200-all-peers")}
    return filled(page, (ROOT / page).read_text(), parts(stored, "../" * page.count("/") + "benchmarks/results"))


def parts(stored: Mapping[str, Results], records: str) -> dict[str, list[str]]:
    """Every generated part by name. `records`: where the results lie, seen from the page."""
    h200, cpu = stored["h200"], stored["cpu"]
    machines = [(name, f"{records}/{folder}/RESULTS.md", stored[folder]) for folder, name in _MACHINES.items()]
    processors = [m for m in machines if not any(run["gpu"] for run in m[2].runs.values())]
    return {
        "summary": summary(h200, cpu, records),
        **{f"models-{precision}": performance.models(h200, precision) for precision in ("tf32", "bf16", "fp32")},
        "models-fp8": performance.fp8(h200),
        "all-peers": performance.all_peers(stored["h200-all-peers"]),
        "lookup": performance.lookup(h200),
        "large-tables": performance.large_tables(h200),
        "ablation": performance.ablation(h200),
        "lanes": performance.lanes(h200),
        "precision": performance.precision(h200),
        "warmup": performance.warmup(h200),
        "topologies": performance_serving.topologies(h200),
        "topologies-second-host": performance_serving.topologies(stored["h200-second-host"]),
        "gpus": performance_serving.gpus(h200),
        "autoscaling": performance_serving.autoscaling(h200),
        "cpu-models": performance.cpu_models(processors),
        "cpu-lookup": performance.cpu_lookup(processors),
        "servers": performance_serving.servers(cpu),
        "offline": performance_serving.offline(cpu),
        "missed": performance.missed(machines),
    }


def summary(h200: Results, cpu: Results, records: str) -> list[str]:
    """The README's table: six rows, each with a link to its record."""
    rows: list[Sequence[str]] = []

    def add(what: str, link: str, ours: str, peer: str) -> None:
        rows.append([what, f"[{ours}]({records}/{link})", peer])

    for precision in ("tf32", "bf16"):
        found = gains(h200, precision=precision)
        times = [g.ours["p50_us"] for g in found]
        over = times_over([g.over_peer for g in found])
        what = f"A call, {precision}: four models, 1 to 4,096 candidates"
        add(what, f"h200/RESULTS.md#{precision}", f"{us(min(times))} to {us(max(times))} µs", over)
    lookups = [c for c in h200.cells("embedding", dtype="float16", dim=16, fields=26, bag=1, ids="zipf", large=False)
               if any_of(c)["batch"] in (1024, 16384)]  # fmt: skip
    ours = [c["dpiframe"]["device_us"] for c in lookups]
    fbgemm = [f"{c['fbgemm-captured']['device_us'] / t:.1f}x" for c, t in zip(lookups, ours, strict=True)]
    what = "The lookup alone: 26 fp16 tables, 1,024 and 16,384 rows"
    add(what, "h200/RESULTS.md#embedding", f"{ours[0]:.1f} and {ours[1]:.1f} µs", f"{' and '.join(fbgemm)}, FBGEMM")
    serving = [r for r in measured(h200, batch=100, form="binary") if r["file"] == "serving.json"]
    best = performance_serving.best_closed([r for r in serving if r["system"] == "dpiframe-fanin"])
    (lone,) = (r for r in serving if r["system"] == "dpiframe" and r["cell"]["connections"] == 1 and not r["cell"]["rate"])
    if best:
        rate = f"{best['requests_per_s']:,.0f}/s, p99 {best['p99_us'] / 1e3:.1f} ms"
        add("HTTP requests of 100 candidates, one GPU and 16 cores", "h200/RESULTS.md#serving", rate, "not measured")
    add("One such request, a lone client", "h200/RESULTS.md#serving", f"{lone['p50_us'] / 1e3:.2f} ms", "not measured")
    pairs = [(c["compile"]["p50_us"], c["dpiframe"]["p50_us"]) for c in cpu.cells("latency", precision="fp32")]
    times = [ours for _, ours in pairs]
    over = times_over([theirs / ours for theirs, ours in pairs])
    what = "A call on two CPU cores, fp32: the same models"
    add(what, "cpu/RESULTS.md#fp32", f"{min(times) / 1e3:.1f} to {max(times) / 1e3:.0f} ms", f"{over}, torch.compile")
    return table(["", "DPIFrame", "times as fast as the peer"], rows)
