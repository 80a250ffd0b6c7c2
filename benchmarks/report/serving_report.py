"""The tables of suites `serving` and `serving_stages` in RESULTS.md."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.report.results import Results
from benchmarks.report.serving_aims import measured
from benchmarks.serving.request_stages import STEPS
from benchmarks.serving.scaling import course

Table = Callable[[Sequence[str], Iterable[Sequence[Any]], int], list[str]]
_SERVING = """Client to client, every server over the same engine, encoder and requests, the load generator on the same cores.
Closed loop: so many connections, each sends its next request when the last is answered. Offered: requests due at Poisson
times, latency from when each was due. `failed`: other answers, and requests unanswered two seconds after the end. A rate with a
star was the load generator's limit."""
_STAGES = """Microseconds, medians, one request at a time in the app that a replica serves. `engine`: the same rows through
`Engine.submit` alone. `transport`: what a lone client of the running service waits for beyond the app."""


def serving(results: Results, table: Table) -> list[str]:
    text = [_SERVING]
    for form in dict.fromkeys(r["cell"]["form"] for r in measured(results)):
        rows = []
        for r in measured(results, form=form):
            cell = r["cell"]
            load = f"{cell['rate']}/s offered" if cell["rate"] else f"{cell['connections']} closed"
            rate = f"{r['requests_per_s']:.0f}" + ("*" if r["load_limited"] else "")
            times = [f"{r['p50_us'] / 1e3:.2f}", f"{r['p99_us'] / 1e3:.2f}"]
            failed = ", ".join(f"{count} x {status}" for status, count in r["failed"].items())
            about = [r["system"], r["model"], load]
            rows.append([*about, cell["gpus"], r["batch"], *times, rate, f"{r['rows_per_s'] / 1e6:.3f}", failed])
        head = ["system", "model", "load", "replicas", "candidates", "p50 ms", "p99 ms", "requests/s", "M rows/s", "failed"]
        text += ["", f"### {form}", "", *table(head, rows, 3)]
    skipped = {
        f"{r['system']} {r['cell']['form'] or ''}".strip(): r["skipped"] for r in results.of("serving") if r.get("skipped")
    }
    if skipped:
        text += ["", "Not measured: " + "; ".join(f"{system}: {why}" for system, why in skipped.items()) + "."]
    return text


def stages(results: Results, table: Table) -> list[str]:
    rows = []
    for r in results.of("serving_stages"):
        form = r["cell"]["form"]
        lone = measured(results, system="dpiframe", form=form, batch=r["batch"], connections=1, rate=0, gpus=1)
        transport = f"{lone[0]['p50_us'] - r['p50_us']:.0f}" if lone else ""
        steps = [f"{r[f'{step}_us']:.0f}" for step in STEPS]
        rows.append([form, r["batch"], *steps, f"{r['p50_us']:.0f}", transport, f"{r['engine_us']:.0f}"])
    return [_STAGES, "", *table(["form", "candidates", *STEPS, "app", "transport", "engine"], rows, 1)]


def autoscaling(results: Results, table: Table) -> list[str]:
    rows = []
    for r in results.of("autoscaling"):
        failed = ", ".join(f"{count} x {status}" for status, count in r["failed"].items()) or "none"
        times = [f"{r['p50_us'] / 1e3:.2f}", f"{r['p99_us'] / 1e3:.2f}"]
        rows.append([r["system"], r["cell"]["phase"], r["cell"]["rate"], r["batch"], course(r["replicas"]), failed, *times])
    head = ["system", "phase", "offered/s", "candidates", "replicas", "failed", "p50 ms", "p99 ms"]
    note = "One service through three phases of offered load, and its replicas, counted as processes, from each phase's start."
    return [note, "", *table(head, rows, 6)]
