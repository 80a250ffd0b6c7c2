"""The tables of the suites that start whole servers or score whole files, in a machine's RESULTS.md."""

from benchmarks.report.markdown import failures, table
from benchmarks.report.results import Results
from benchmarks.report.serving_aims import measured
from benchmarks.serving.lone_request import STEPS
from benchmarks.serving.request_budget import PARTS
from benchmarks.serving.scaling import course
from benchmarks.serving.stages.stage_of import STAGES

_SERVING = """Client to client, every server over the same engine, encoder and requests, the load generator on the same cores.
Closed loop: so many connections, each sends its next request when the last is answered. Offered: requests due at Poisson
times, latency from when each was due. `failed`: other answers, and requests unanswered two seconds after the end. A rate with a
star was the load generator's limit."""
_BUDGET = """CPU microseconds a request under load, user and system, of all processes of the service but the load generator: by
HAProxy and Serve, and on the direct port of the same service. `replica`: HTTP and engine in one. `rest`: Ray's own. Offered:
shares of the best closed-loop rate of that way. `stolen`: of the CPU time that all processes on the machine wanted, what
its host gave to others."""
_STAGES = """CPU microseconds a request under load, user + system, of all processes of the service but the load generator.
What a process takes is the kernel's count, and its stages' shares are those of perf's samples in the same load."""
_LONE = """Microseconds, medians, one request at a time in the app that a replica serves. `engine`: the same rows through
`Engine.submit` alone. `transport`: what a lone client of the running service waits for beyond the app."""


def serving(results: Results) -> list[str]:
    text = [_SERVING]
    for form in dict.fromkeys(r["cell"]["form"] for r in measured(results)):
        rows = []
        for r in measured(results, form=form):
            cell = r["cell"]
            load = f"{cell['rate']}/s offered" if cell["rate"] else f"{cell['connections']} closed"
            rate = f"{r['requests_per_s']:.0f}" + ("*" if r["load_limited"] else "")
            times = [f"{r['p50_us'] / 1e3:.2f}", f"{r['p99_us'] / 1e3:.2f}"]
            about = [r["system"], r["model"], load]
            rows.append([*about, cell["gpus"], r["batch"], *times, rate, f"{r['rows_per_s'] / 1e6:.3f}", failures(r["failed"])])
        head = ["system", "model", "load", "replicas", "candidates", "p50 ms", "p99 ms", "requests/s", "M rows/s", "failed"]
        text += ["", f"### {form}", "", *table(head, rows, 3)]
    skipped = {
        f"{r['system']} {r['cell']['form'] or ''}".strip(): r["skipped"] for r in results.of("serving") if r.get("skipped")
    }
    if skipped:
        text += ["", "Not measured: " + "; ".join(f"{system}: {why}" for system, why in skipped.items()) + "."]
    return text


def lone_request(results: Results) -> list[str]:
    rows = []
    for r in results.of("lone_request"):
        form = r["cell"]["form"]
        lone = measured(results, system="dpiframe", form=form, batch=r["batch"], connections=1, rate=0, gpus=1)
        transport = f"{lone[0]['p50_us'] - r['p50_us']:.0f}" if lone else ""
        steps = [f"{r[f'{step}_us']:.0f}" for step in STEPS]
        rows.append([form, r["batch"], *steps, f"{r['p50_us']:.0f}", transport, f"{r['engine_us']:.0f}"])
    return [_LONE, "", *table(["form", "candidates", *STEPS, "app", "transport", "engine"], rows, 1)]


def serving_stages(results: Results) -> list[str]:
    rows = []
    for r in results.of("serving_stages"):
        cell, spent = r["cell"], r["cpu_us"]
        user, system = (sum(times) for times in zip(*spent.values(), strict=True))
        cpu = [f"{own:.1f} + {kernel:.1f}" for own, kernel in spent.values()]
        about = [cell["form"], r["batch"], cell["way"], cell["connections"], f"{r['requests_per_s']:.0f}"]
        rows.append([*about, f"{user:.0f} + {system:.0f}", *cpu])
    legend = [f"- `{stage}`: {what}." for stage, what in STAGES.items()]
    head = ["form", "candidates", "way", "connections", "requests/s", "in all", *STAGES]
    return [_STAGES, "", *legend, "", *table(head, rows, 4)]


def request_budget(results: Results) -> list[str]:
    rows = []
    for r in results.of("request_budget"):
        cell, parts = r["cell"], r["cpu_us"]
        load = f"{cell['offered']:.0%} offered" if cell["offered"] else f"{cell['connections']} closed"
        times = [f"{r[key] / 1e3:.2f}" for key in ("p50_us", "p99_us", "p999_us")]
        cpu = [f"{sum(parts[part]):.0f}" for part in PARTS]
        total = sum(map(sum, parts.values()))
        system = f"{sum(own for _, own in parts.values()):.0f}"
        figures = [f"{r['requests_per_s']:.0f}", *times, f"{total:.0f}", system, *cpu]
        stolen = f"{r['stolen']:.1%}" if "stolen" in r else ""
        rows.append([r["system"], cell["form"], r["batch"], cell["way"], cell.get("ingress", ""), load, *figures, stolen])
    head = [
        "system",
        "form",
        "candidates",
        "way",
        "ingresses",
        "load",
        "requests/s",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "CPU us",
        "of it system",
    ]
    return [_BUDGET, "", *table([*head, *PARTS, "stolen"], rows, 6)]


def autoscaling(results: Results) -> list[str]:
    rows = []
    for r in results.of("autoscaling"):
        failed = failures(r["failed"]) or "none"
        times = [f"{r['p50_us'] / 1e3:.2f}", f"{r['p99_us'] / 1e3:.2f}"]
        rows.append([r["system"], r["cell"]["phase"], r["cell"]["rate"], r["batch"], course(r["replicas"]), failed, *times])
    head = ["system", "phase", "offered/s", "candidates", "replicas", "failed", "p50 ms", "p99 ms"]
    note = "One service through three phases of offered load, and its replicas, counted as processes, from each phase's start."
    return [note, "", *table(head, rows, 6)]


def http(results: Results) -> list[str]:
    rows = []
    for r in results.of("http"):
        figures = [f"{r['p50_us'] / 1e3:.2f}", f"{r['p99_us'] / 1e3:.2f}", f"{r['requests_per_s']:.0f}"]
        rows.append([r["system"], r["batch"], r["cell"]["clients"], *figures])
    note = "The endpoint, client to client, load generator on the same cores. `batch`: candidates a request."
    return [note, "", *table(["system", "batch", "clients", "p50 ms", "p99 ms", "requests/s"], rows)]


def score(results: Results) -> list[str]:
    rows = []
    for r in results.of("score"):
        runs = ", ".join(f"{rate / 1e6:.2f}" for rate in r["rows_per_s_runs"])
        rows.append([r["model"], r["cell"]["dim"], r["system"], f"{r['rows_per_s'] / 1e6:.2f}", runs])
    cell = results.of("score")[0]["cell"]
    note = f"Files scored offline, file to file, {cell['rows']:,} rows of {cell['fields']} fields; the median of the runs."
    return [note, "", *table(["model", "dim", "system", "M rows/s", "each run"], rows, figures=3)]
