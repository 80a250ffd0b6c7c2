"""What suite `serving` aims at, judged from its records alone."""

from benchmarks.records.record import Record
from benchmarks.report.aims import NOTHING, Aim, Judge, Verdict
from benchmarks.report.results import Results
from benchmarks.serving.payloads import FORMS
from benchmarks.serving.systems import DIRECT, OURS, PEERS

WIDE = "demo-4096-4096-4096"  # keeps the GPU busy: the demo model's rate is that of the cores
_BARE = ("uvicorn", "mosec", "mosec-2")  # Python workers behind nothing, or behind Rust: the ceiling, not a service


def measured(results: Results, **fixed: object) -> list[Record]:
    """Records of suite `serving` with figures."""
    return [r for r in results.of("serving", **fixed) if r["p50_us"]]


def _alone(results: Results, **fixed: object) -> list[Record]:
    """Those of runs on hosts of one GPU: where there are several, one has the cores of all."""
    several = {r["file"] for r in measured(results) if r["cell"]["gpus"] > 1}
    return [r for r in measured(results, gpus=1, **fixed) if r["file"] not in several]


def _best(results: Results, system: str, **fixed: object) -> float:
    """Requests a second of a system, whatever the number of connections; 0 if it was not measured."""
    return max((r["requests_per_s"] for r in measured(results, system=system, rate=0, **fixed)), default=0.0)


def _stock_ray(least: float, system: str = "dpiframe") -> Judge:
    def judge(results: Results) -> Verdict:
        ours, theirs = _best(results, system, form="binary", batch=100), _best(results, "ray-serve", form="rows", batch=100)
        if not ours or not theirs:
            return NOTHING
        same = _best(results, system, form="rows", batch=100)
        return Verdict(
            f"binary {ours / theirs:.1f}x ({ours:.0f} to {theirs:.0f} requests/s); row JSON too {same / theirs:.1f}x",
            ours / theirs >= least,
        )

    return judge


def _against(peers: tuple[str, ...], least: float, own: str = "dpiframe") -> Judge:
    """Our requests a second over each peer's, body form by body form, 100 candidates."""

    def judge(results: Results) -> Verdict:
        ratios = {}
        for peer in peers:
            for form in FORMS:
                ours, theirs = (_best(results, system, form=form, batch=100, gpus=1) for system in (own, peer))
                if ours and theirs:
                    ratios[f"{peer} {form}"] = ours / theirs
        if not ratios:
            return NOTHING
        return Verdict(", ".join(f"{k} {v:.2f}x" for k, v in ratios.items()), min(ratios.values()) >= least)

    return judge


def _overhead(most_us: float, system: str = "dpiframe") -> Judge:
    def judge(results: Results) -> Verdict:
        lone = measured(results, system=system, form="binary", batch=100, connections=1, rate=0, gpus=1)
        stages = results.of("lone_request", form="binary", batch=100)
        if not lone or not stages:
            return NOTHING
        more = lone[0]["p50_us"] - stages[0]["engine_us"]
        return Verdict(f"{more:.0f} us over {stages[0]['engine_us']:.0f} us", more <= most_us)

    return judge


def _rate_within(least: float, p99_ms: float) -> Judge:
    """Best rate of 100-candidate requests from one GPU whose p99 holds and of which none failed."""

    def judge(results: Results) -> Verdict:
        good = [r for r in _alone(results, form="binary", batch=100)
                if r["system"] in OURS and r["p99_us"] < p99_ms * 1e3 and not r["failed"]]  # fmt: skip
        if not good:
            return NOTHING
        best = max(good, key=lambda r: r["requests_per_s"])
        figure = f"{best['requests_per_s']:.0f} requests/s, p99 {best['p99_us'] / 1e3:.1f} ms ({best['system']})"
        return Verdict(figure, best["requests_per_s"] >= least)

    return judge


def _rows_rate(results: Results) -> Verdict:
    rates = [r["rows_per_s"] for r in _alone(results, form="binary", batch=1000, rate=0) if r["system"] in OURS]
    return Verdict(f"{max(rates) / 1e6:.2f} M rows/s", max(rates) >= 5e6) if rates else NOTHING


def _low_load(system: str, most_us: float) -> Judge:
    def judge(results: Results) -> Verdict:
        lone = _alone(results, system=system, form="binary", batch=100, connections=1, rate=0)
        return Verdict(f"{lone[0]['p50_us']:.0f} us", lone[0]["p50_us"] <= most_us) if lone else NOTHING

    return judge


def _scaling(gpus: int, least: float, model: str) -> Judge:
    """Best rate with so many GPUs over the best with one, none of whose requests failed, of one run on one host.

    Beside it what the same cores gave to loops of pure Python: with more than that, cores were not the limit.
    """

    def judge(results: Results) -> Verdict:
        runs = []
        for file in dict.fromkeys(r["file"] for r in measured(results)):
            fixed = {"model": model, "form": "binary", "rate": 0, "file": file}
            best: dict[tuple[object, ...], dict[int, float]] = {}
            for r in measured(results, **fixed):
                rates = best.setdefault((r["system"], r["batch"]), {})
                if not r["failed"]:
                    rates[r["cell"]["gpus"]] = max(rates.get(r["cell"]["gpus"], 0.0), r["requests_per_s"])
            pairs = [(rates[gpus], rates[1]) for rates in best.values() if {1, gpus} <= rates.keys()]
            runs += [(many, one, _cores_over_one(results, gpus, file)) for many, one in pairs]
        if not runs:
            return NOTHING
        many, one, cores = max(runs, key=lambda run: run[0] / run[1])
        beside = f"; loops of Python on these cores: {cores:.2f}x" if cores else ""
        return Verdict(f"{many / one:.2f}x ({many:.0f} to {one:.0f} requests/s{beside})", many / one >= least)

    return judge


def _cores_over_one(results: Results, gpus: int, file: object) -> float:
    loops = {r["cell"]["gpus"]: r["turns_per_s"] for r in results.of("serving", system="python-loops", file=file)}
    return loops[gpus] / loops[1] if {1, gpus} <= loops.keys() else 0.0


def _reference(results: Results) -> Verdict:
    alone = _alone(results, batch=32, rate=0)
    lone = [r for r in alone if r["system"] == "dpiframe" and r["cell"]["form"] == "binary"]
    if not lone:
        return NOTHING
    best = max(r["requests_per_s"] for r in alone if r["system"] in OURS)
    low = min(lone, key=lambda r: r["cell"]["connections"])
    return Verdict(f"{best:.0f} requests/s, p50 {low['p50_us'] / 1e3:.2f} ms at low load", True)


def _has_profile(results: Results) -> Verdict:
    stages = results.of("lone_request", form="binary", batch=100)
    return Verdict(f"{stages[0]['p50_us']:.0f} us in the app, binary, 100 candidates", True) if stages else NOTHING


_SERVICES = tuple(peer for peer in PEERS if peer not in _BARE)
SERVING_CPU_AIMS = (
    Aim("over stock Ray Serve, FastAPI row JSON, @serve.batch; 100 candidates", ">= 10x the requests/s", _stock_ray(10)),
    Aim("over the other servers, same body form", "> 1x", _against(_SERVICES, 1.0)),
    Aim("against bare uvicorn and mosec, same body form", ">= 0.5x", _against(_BARE, 0.5)),
    Aim("a lone client's p50 over the engine's own time, binary", "<= 600 us", _overhead(600)),
    Aim("direct port: over stock Ray Serve's row JSON, 100 candidates", ">= 15x the requests/s", _stock_ray(15, DIRECT)),
    Aim("direct port: over bare mosec, same body form", "> 1x", _against(("mosec",), 1.0, DIRECT)),
    Aim("direct port: a lone client's p50 over the engine's own time, binary", "<= 400 us", _overhead(400, DIRECT)),
    Aim("where a request's time goes", "reported", _has_profile),
)
SERVING_GPU_AIMS = (
    Aim("100 candidates from one GPU, p99 under 10 ms", ">= 25,000 requests/s", _rate_within(25_000, 10)),
    Aim("1,000 candidates from one GPU", ">= 5 M rows/s", _rows_rate),
    Aim("a lone client, 100 candidates, colocated", "p50 <= 500 us", _low_load("dpiframe", 500)),
    Aim("a lone client, 100 candidates, fan-in", "p50 <= 800 us", _low_load("dpiframe-fanin", 800)),
    Aim("two GPUs over one, the demo model", ">= 1.8x", _scaling(2, 1.8, "demo")),
    Aim("four GPUs over one, the demo model", ">= 3.4x", _scaling(4, 3.4, "demo")),
    Aim("two GPUs over one, dense layers 4,096 wide", ">= 1.8x", _scaling(2, 1.8, WIDE)),
    Aim("four GPUs over one, dense layers 4,096 wide", ">= 3.4x", _scaling(4, 3.4, WIDE)),
    Aim(
        "32 candidates, beside Ray's published DLRM example (one L4: 1573 requests/s, p50 59 ms at low load)",
        "reported",
        _reference,
    ),
    Aim("where a request's time goes", "reported", _has_profile),
)
