"""README.md and pages of docs/: which of their parts come from the stored results, and what writes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records.record import Record
from benchmarks.records.run import RESULTS
from benchmarks.report import performance, performance_serving, results_page, speed_chart, tiers
from benchmarks.report.architectures import architectures
from benchmarks.report.imported import imported
from benchmarks.report.markdown import filled, table, times_over, us
from benchmarks.report.results import Results, any_of
from benchmarks.systems.names import PAPER_MODELS

ROOT = Path(__file__).parents[2]
_SUBJECTS = ("calls", "parts", "serving", "cpu", "far-rows")
PAGES = (
    "README.md", "docs/performance.md", *(f"docs/performance-{subject}.md" for subject in _SUBJECTS), "docs/imported-models.md",
)  # fmt: skip
PICTURE = ROOT / "docs" / "img" / "speed.png"
_MACHINES = {
    "h200": "H200",
    "h200-second-host": "another H200 host",
    "h100": "one H100",
    "h100x2": "two H100s",
    "h200x2": "two H200s",
    "h200x4": "four H200s",
    "cpu": "Intel Xeon",
    "cpu-second-intel": "another Intel Xeon",
    "cpu-amd": "AMD EPYC",
}


def write() -> list[Path]:
    """Writes every machine's page and pictures, `PAGES` and a picture, after all texts are made; returns what it wrote."""
    machines = {p: Results.read(p) for p in sorted(RESULTS.iterdir()) if p.is_dir()}
    texts = {folder / "RESULTS.md": results_page.page(results) for folder, results in machines.items()}
    texts |= {ROOT / page: written_anew(page) for page in PAGES}
    for path, text in texts.items():
        path.write_text(text)
    for folder, results in machines.items():
        results_page.draw(results, folder)
    speed_chart.draw(Results.read(RESULTS / "h200"), PICTURE)
    return [*texts, PICTURE] if PICTURE.exists() else list(texts)


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
        "architectures": architectures(h200),
        "imported": imported({"H100": stored["h100"], "H200": h200}),
        "tiers": tiers.tiers(h200),
        "tiers-collectives": tiers.collectives(stored["h200x2"]),
        "tiers-collectives-four": tiers.collectives(stored["h200x4"]),
        "tiers-torchrec": tiers.collectives(stored["h200x2"], "torchrec", "TorchRec"),
        "tiers-alone": tiers.alone(stored["h100x2"]),
        "tiers-placements": tiers.placements(stored["h200x2"]),
        "tiers-placements-four": tiers.placements(stored["h200x4"]),
        "tiers-links": tiers.links(stored["h100x2"]),
        "tiers-links-four": tiers.links(stored["h200x4"]),
        "tiers-large": tiers.large(stored["h200x2"]),
        "tiers-load": tiers.loading(stored["h100x2"]),
        "tiers-load-h200": tiers.loading(stored["h200x2"]),
        "tiers-promotion": tiers.promotion(cpu),
        "all-peers": performance.all_peers(stored["h200-all-peers"]),
        "lookup": performance.lookup(h200),
        "large-tables": performance.large_tables(h200),
        "ablation": performance.ablation(h200),
        "lanes": performance.lanes(h200),
        "precision": performance.precision(h200),
        "warmup": performance.warmup(h200),
        "direct-port": performance_serving.direct_port(h200),
        "stages": performance_serving.stages(h200),
        "tails": performance_serving.tails(h200),
        "stalls": performance_serving.undisturbed(stored["h200"]),
        "stalls-beside": performance_serving.beside(stored["h200"]),
        "stalls-cpu": performance_serving.beside(stored["cpu-amd"]),
        "gpus": performance_serving.gpus(h200),
        "autoscaling": performance_serving.autoscaling(h200),
        "cpu-models": performance.cpu_models(processors),
        "cpu-lookup": performance.cpu_lookup(processors),
        "servers": performance_serving.servers(cpu),
        "offline": performance_serving.offline(cpu),
        "missed": performance.missed(machines),
    }


def summary(h200: Results, cpu: Results, records: str) -> list[str]:
    """The README's table: six rows, each with a link to its record; a row of which nothing was measured is left out."""
    found = [*(_call(h200, precision) for precision in ("tf32", "bf16")), _lookup(h200), *_http(h200), _cpu_call(cpu)]
    rows = [[row.what, f"[{row.ours}]({records}/{row.link})", row.over] for row in found if row]
    return table(["", "DPIFrame", "times as fast as the peer"], rows)


@dataclass(frozen=True, slots=True)
class _Row:
    what: str
    link: str  # below the results
    ours: str
    over: str


def _call(h200: Results, precision: str) -> _Row | None:
    found = [g for g in h200.gains(precision=precision) if g.model in PAPER_MODELS]
    if not found:
        return None
    times = [g.ours["p50_us"] for g in found]
    what = f"A call, {precision}: four models, 1 to 4,096 candidates"
    ours = f"{us(min(times))} to {us(max(times))} µs"
    return _Row(what, f"h200/RESULTS.md#{precision}", ours, times_over([g.over_peer for g in found]))


def _lookup(h200: Results) -> _Row | None:
    times = {}
    for cell in h200.cells("embedding", dtype="float16", dim=16, fields=26, bag=1, ids="zipf", large=False):
        ours, fbgemm = (cell[s]["device_us"] if s in cell else None for s in ("dpiframe", "fbgemm-captured"))
        if ours and fbgemm:
            times[any_of(cell)["batch"]] = f"{ours:.1f}", f"{fbgemm / ours:.1f}x"
    if not {1024, 16384} <= times.keys():
        return None
    ours, over = (" and ".join(both) for both in zip(times[1024], times[16384], strict=True))
    what = "The lookup alone: 26 fp16 tables, 1,024 and 16,384 rows"
    return _Row(what, "h200/RESULTS.md#embedding", f"{ours} µs", f"{over}, FBGEMM")


def _http(h200: Results) -> list[_Row]:
    """Of a fan-in's direct port in the last run; over HAProxy's way in, at its best."""
    link, rows, fixed = "h200/RESULTS.md#request_budget", [], {"system": "dpiframe-fanin", "batch": 100, "form": "binary"}
    found = h200.of("request_budget", file="request_budget.json", offered=0.0, **fixed)
    ways = [[r for r in found if r["cell"]["way"] == way] for way in ("direct", "haproxy")]
    direct, haproxy = (max(way, key=lambda r: r["requests_per_s"], default=None) for way in ways)
    if direct and haproxy:
        rate = f"{direct['requests_per_s']:,.0f}/s, p99 {direct['p99_us'] / 1e3:.1f} ms"
        over = _over_haproxy(direct["requests_per_s"] / haproxy["requests_per_s"], direct, haproxy)
        rows.append(_Row("HTTP requests of 100 candidates, one GPU and 16 cores, direct port", link, rate, over))
    alone = [[r for r in way if r["cell"]["connections"] == 1] for way in ways]
    if all(alone):
        direct, haproxy = (min(way, key=lambda r: r["p50_us"]) for way in alone)
        over = _over_haproxy(haproxy["p50_us"] / direct["p50_us"], direct, haproxy)
        rows.append(_Row("One such request, a lone client", link, f"{direct['p50_us'] / 1e3:.2f} ms", over))
    return rows


def _over_haproxy(times: float, direct: Record, haproxy: Record) -> str:
    return f"{times:.1f}x, our HAProxy way" + (" on another host" if direct["file"] != haproxy["file"] else "")


def _cpu_call(cpu: Results) -> _Row | None:
    cells = [c for c in cpu.usual("latency", "dpiframe", "compile", precision="fp32") if c["dpiframe"]["model"] in PAPER_MODELS]
    if not cells:
        return None
    times = [c["dpiframe"]["p50_us"] for c in cells]
    over = times_over([c["compile"]["p50_us"] / c["dpiframe"]["p50_us"] for c in cells])
    ours = f"{min(times) / 1e3:.1f} to {max(times) / 1e3:.0f} ms"
    return _Row("A call on two CPU cores, fp32: the same models", "cpu/RESULTS.md#fp32", ours, f"{over}, torch.compile")
