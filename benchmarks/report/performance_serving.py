"""What docs/performance-serving.md and -cpu.md say of whole servers, from the stored results: a function a generated part."""

from benchmarks.records.record import Record
from benchmarks.report.markdown import failures, table, us
from benchmarks.report.results import Results
from benchmarks.report.serving_aims import WIDE, measured
from benchmarks.serving.scaling import course
from benchmarks.serving.stages.stage_of import STAGES
from benchmarks.serving.systems import FANIN, FANIN_DIRECT

_TOPOLOGIES = {
    "dpiframe": "colocated", "dpiframe-fanin": "fan-in", "dpiframe-direct": "colocated, direct port",
    "dpiframe-fanin-direct": "fan-in, direct port", "dpiframe-unix": "colocated, Unix socket",
}  # fmt: skip
_SERVERS = {
    "dpiframe-direct": "DPIFrame, direct port", "dpiframe-unix": "DPIFrame, direct port's Unix socket", "dpiframe": "DPIFrame",
    "dpiframe-fanin": "DPIFrame, fan-in", "dpiframe-fanin-direct": "DPIFrame, fan-in, direct port",
    "mosec": "mosec, batching", "mosec-2": "mosec, batching, two workers",
    "triton": "Triton Inference Server, Python backend, two instances", "litserve": "LitServe, batching",
    "uvicorn": "uvicorn + FastAPI, one model call a request", "ray-serve": "Ray Serve, FastAPI, `@serve.batch`",
    "bentoml": "BentoML, batching",
}  # fmt: skip


def best_closed(records: list[Record]) -> Record | None:
    """The closed loop of the highest rate of which no request failed."""
    whole = [r for r in records if not r["cell"]["rate"] and not r["failed"]]
    return max(whole, key=lambda r: r["requests_per_s"], default=None)


def direct_port(results: Results) -> list[str]:
    """Both ways into one service: a lone client; the most requests a second, and what one costs; half of that run's most."""
    rows, found = [], results.of("request_budget", form="binary", offered=0.0)
    halves = {_run_of(r): r for r in results.of("request_budget", form="binary", offered=0.5)}
    for key in sorted({(r["system"], r["batch"], r["cell"]["way"]) for r in found}):
        cells = [r for r in found if (r["system"], r["batch"], r["cell"]["way"]) == key]
        best = max(cells, key=lambda r: (not r["failed"], r["requests_per_s"]))
        lone = next((f"{r['p50_us'] / 1e3:.2f} ms" for r in cells if r["cell"]["connections"] == 1), "")
        most = f"{best['requests_per_s']:,.0f} ({best['p99_us'] / 1e3:.1f} ms)"
        spent = f"{sum(map(sum, best['cpu_us'].values())):.0f} us"
        half = _times(halves[_run_of(best)]) if _run_of(best) in halves else ""
        system, candidates, way = key
        rows.append([_TOPOLOGIES[system], candidates, way, lone, most, f"{best['rows_per_s'] / 1e6:.1f} M", spent, half])
    head = ["topology", "candidates", "way", "a lone client, p50", "requests/s at most (p99)", "rows/s", "CPU a request",
            "p50 (p99) at half"]  # fmt: skip
    return table(head, rows, 3)


def stages(results: Results) -> list[str]:
    """User and system microseconds of a request of 100 candidates, by stage, form and way."""
    found = {(r["cell"]["form"], r["cell"]["way"]): r["cpu_us"] for r in results.of("serving_stages", batch=100)}
    names = [stage for stage in STAGES if any(stage in spent for spent in found.values())]
    rows = [[name, *(f"{spent[name][0]:.1f} + {spent[name][1]:.1f}" for spent in found.values())] for name in names]
    sums = [[sum(times) for times in zip(*spent.values(), strict=True)] for spent in found.values()]
    rows.append(["in all", *(f"{user:.0f} + {system:.0f}" for user, system in sums)])
    return table(["", *(f"{form}, {way}" for form, way in found)], rows)


def _run_of(r: Record) -> tuple[object, ...]:
    return r["file"], r["system"], r["batch"], r["cell"]["way"], r["cell"]["ingress"]


def tails(results: Results) -> list[str]:
    """The direct port before a fan-in's engine: what clients wait for at shares of the highest rate."""
    rows, found = [], results.of("request_budget", system="dpiframe-fanin", form="binary", way="direct")
    loads = [r for r in found if r["cell"]["offered"]]
    for r in sorted(loads, key=lambda r: (r["batch"], r["cell"]["ingress"], r["cell"]["offered"])):
        cell, times = r["cell"], [f"{r[key] / 1e3:.1f}" for key in ("p50_us", "p99_us", "p999_us")]
        stolen = f"{r['stolen']:.1%}" if "stolen" in r else ""
        rows.append([r["batch"], cell["ingress"], f"{cell['offered']:.0%}", f"{r['requests_per_s']:,.0f}", *times, stolen])
    head = ["candidates", "ingresses", "of the highest rate", "requests/s", "p50 ms", "p99 ms", "p99.9 ms", "stolen"]
    return table(head, rows, 2)


def stalls(results: Results) -> list[str]:
    """The same offered load with and without what goes on beside it: the turn with the middle p99, and the spread of that."""
    rows, found = [], results.of("stalls")
    for r in found:
        cell, times = r["cell"], [f"{r[key] / 1e3:.1f}" for key in ("p50_us", "p99_us", "p999_us")]
        spread = f"{min(r['p99_turns_us']) / 1e3:.1f} to {max(r['p99_turns_us']) / 1e3:.1f}"
        rows.append([cell["way"], f"{cell['offered']:.0%}", f"{r['requests_per_s']:,.0f}", cell["beside"], *times, spread])
    head = ["way", "of the highest rate", "requests/s", "beside it", "p50 ms", "p99 ms", "p99.9 ms", "p99 of all turns"]
    return table(head, rows, 4)


def undisturbed(results: Results) -> list[str]:
    """Offered loads with nothing beside them: the turn with the middle p99."""
    rows, found = [], results.of("stalls", beside="as it is")
    for r in sorted(found, key=lambda r: (r["cell"]["way"], r["cell"]["offered"])):
        cell, times = r["cell"], [f"{r[key] / 1e3:.1f}" for key in ("p50_us", "p99_us", "p999_us")]
        rows.append([cell["way"], f"{cell['offered']:.0%}", f"{r['requests_per_s']:,.0f}", *times])
    return table(["way", "of the highest rate", "requests/s", "p50 ms", "p99 ms", "p99.9 ms"], rows, 2)


def beside(results: Results) -> list[str]:
    """p99 in milliseconds by what goes on beside the load, and by way and share of the highest rate."""
    found = {(r["cell"]["way"], r["cell"]["offered"], r["cell"]["beside"]): r["p99_us"] / 1e3 for r in results.of("stalls")}
    loads = dict.fromkeys(key[:2] for key in found)
    rows = [[name, *(us(found.get((*load, name))) for load in loads)] for name in dict.fromkeys(key[2] for key in found)]
    return table(["beside it", *(f"{way}, {share:.0%}" for way, share in loads)], rows)


def _times(r: Record) -> str:
    return f"{r['p50_us'] / 1e3:.1f} ({r['p99_us'] / 1e3:.1f}) ms"


def gpus(results: Results) -> list[str]:
    """Several GPUs of one host, 16 cores each: the rates, and what the same cores gave to loops of Python."""
    rows = []
    for model, candidates, about, system, file in (
        ("demo", 100, "the demo model, direct port, eight ingresses a GPU", FANIN_DIRECT, "serving-gpus-direct.json"),
        ("demo", 100, "the demo model, direct port, six ingresses a GPU", FANIN_DIRECT, "serving-gpus-direct-six.json"),
        ("demo", 100, "the demo model, direct port, six ingresses, another host", FANIN_DIRECT, "serving-gpus-direct-one.json"),
        ("demo", 100, "the demo model, HAProxy", FANIN, "serving-gpus-haproxy.json"),
        ("demo", 100, "the same before C read HAProxy's requests", FANIN, "serving-gpus.json"),
        (WIDE, 1000, "dense layers 4,096 wide, HAProxy", FANIN, "serving-gpus.json"),
    ):
        loops = {r["cell"]["gpus"]: r["turns_per_s"] for r in results.of("serving", system="python-loops", file=file)}
        found = measured(results, file=file, system=system, model=model, batch=candidates, form="binary")
        counts = sorted({r["cell"]["gpus"] for r in found})
        best = {count: best_closed([r for r in found if r["cell"]["gpus"] == count]) for count in counts}
        rates = {count: r for count, r in best.items() if r}
        for count, r in rates.items():
            over = f"{r['requests_per_s'] / rates[1]['requests_per_s']:.2f}x" if 1 in rates else ""
            cores = f"{loops[count] / loops[1]:.2f}x" if {1, count} <= loops.keys() else ""
            figures = [f"{r['requests_per_s']:,.0f}", f"{r['rows_per_s'] / 1e6:.1f}", f"{r['p99_us'] / 1e3:.1f}"]
            rows.append([about, candidates, count, *figures, over, cores])
    head = ["", "candidates", "GPUs", "requests/s", "M rows/s", "p99 ms", "over one GPU", "loops of Python on these cores"]
    return table(head, rows, figures=1)


def autoscaling(results: Results) -> list[str]:
    rows = []
    for r in results.of("autoscaling"):
        figures = [
            course(r["replicas"]),
            failures(r["failed"]) or "none",
            f"{r['p50_us'] / 1e3:.1f}",
            f"{r['p99_us'] / 1e3:.1f}",
        ]
        rows.append([r["cell"]["phase"], r["cell"]["rate"], *figures])
    return table(["phase", "requests/s offered", "replicas", "failed", "p50 ms", "p99 ms"], rows)


def servers(results: Results) -> list[str]:
    """Two CPU cores, 100 candidates: requests a second with 64 clients, by server and body form."""
    rows = []
    for system, name in _SERVERS.items():
        found = [r for r in measured(results, system=system, batch=100) if not r["cell"]["rate"]]
        if not found:
            continue
        rates = {r["cell"]["form"]: f"{r['requests_per_s']:,.0f}" for r in found if r["cell"]["connections"] == 64}
        lone = [r for r in found if r["cell"]["connections"] == 1 and r["cell"]["form"] == "binary"]
        alone = f"{lone[0]['p50_us'] / 1e3:.2f} ms" if lone else "none"
        rows.append([name, *(rates.get(form, "none") for form in ("binary", "columns", "rows")), alone])
    return table(["", "binary", "JSON, columns", "JSON, an object a candidate", "binary, one client, p50"], rows)


def offline(results: Results) -> list[str]:
    rates: dict[int, dict[str, float]] = {}
    for r in results.of("score"):
        rates.setdefault(r["cell"]["dim"], {})[r["system"]] = r["rows_per_s"] / 1e6
    systems = list(dict.fromkeys(s for found in rates.values() for s in found))
    rows = [[dim, *(f"{found[s]:.2f}" if s in found else "" for s in systems)] for dim, found in rates.items()]
    return table(["dim", *systems], rows)
