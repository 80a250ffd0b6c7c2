"""The aims of issues 3 and 20 as data: what was aimed at, and a function that finds in the records whether it was reached."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.records.record import Record
from benchmarks.report.results import Results, any_of, cell_name, mean
from benchmarks.report.tiers import by_collectives, by_placement, over_nccl, over_simple
from benchmarks.systems.embedding_cells import MIXED
from benchmarks.systems.names import BATCHES as ALL_BATCHES
from benchmarks.systems.names import MODEL_TITLES, PAPER_MODELS, architecture_of, cells_of

_PRODUCTS_RULE = ("xdeepfm", "din", "mlperf")  # architectures in which most time goes to products, from 1,024 rows on


@dataclass(frozen=True, slots=True)
class Verdict:
    """met None: not all cells were measured, and those that were do not decide it."""

    figure: str
    met: bool | None


NOTHING = Verdict("not measured", None)
Judge = Callable[[Results], Verdict]


@dataclass(frozen=True, slots=True)
class Aim:
    what: str
    rule: str
    judge: Judge


def _gains(values: Sequence[float], expected: int, *, average: float = 0.0, least: float = 0.0) -> Verdict:
    """Speed-ups over so many cells as were measured of those expected."""
    if not values:
        return NOTHING
    met: bool | None = min(values) >= least and mean(values) >= average
    if len(values) < expected and min(values) >= least:
        met = None  # the mean may still change
    return Verdict(f"geometric mean {mean(values):.2f}x, least {min(values):.2f}x ({len(values)} of {expected} cells)", met)


def _over(peer: str, precision: str, batches: Sequence[int], **limits: float) -> Judge:
    def judge(results: Results) -> Verdict:
        cells = results.usual("latency", "dpiframe", peer, precision=precision)
        pairs = [
            (c[peer], c["dpiframe"]) for c in cells if any_of(c)["batch"] in batches and any_of(c)["model"] in PAPER_MODELS
        ]
        return _gains([p["p50_us"] / ours["p50_us"] for p, ours in pairs], len(PAPER_MODELS) * len(batches), **limits)

    return judge


def _over_best(precisions: Sequence[str], batches: Sequence[int], **limits: float) -> Judge:
    def judge(results: Results) -> Verdict:
        found = [g for g in results.gains() if g.precision in precisions and g.batch in batches and g.model in PAPER_MODELS]
        return _gains([g.over_peer for g in found], len(PAPER_MODELS) * len(batches) * len(precisions), **limits)

    return judge


def _each_over_best(precision: str, average: float) -> Judge:
    """Every architecture by itself, over all its models, contexts and batches. Nothing where only the four are measured."""
    expected: dict[str, int] = {}
    for model in MODEL_TITLES:
        expected[architecture_of(model)] = expected.get(architecture_of(model), 0) + cells_of(model)

    def judge(results: Results) -> Verdict:
        over: dict[str, list[float]] = {}
        found = [g for g in results.gains(precision=precision) if g.batch in ALL_BATCHES and g.model in MODEL_TITLES]
        for g in found:
            over.setdefault(architecture_of(g.model), []).append(g.over_peer)
        if over.keys() <= set(PAPER_MODELS):
            return NOTHING
        means = {a: mean(v) for a, v in over.items()}
        slowest, worst = min(means, key=means.__getitem__), min(found, key=lambda g: g.over_peer)
        whole = {a: m for a, m in means.items() if len(over[a]) >= expected[a]}
        missed = worst.over_peer < 1.0 or min(whole.values(), default=average) < average
        figure = (
            f"least mean {means[slowest]:.2f}x ({slowest}), least {worst.over_peer:.2f}x ({worst.model} B={worst.batch}), "
            f"{len(found)} of {sum(expected.values())} cells"
        )
        return Verdict(figure, False if missed else True if whole.keys() == expected.keys() else None)

    return judge


def _own_bf16(least: float) -> Judge:
    """Our own tf32 time over our own bf16 time, where products rule."""
    models = [m for m in MODEL_TITLES if architecture_of(m) in _PRODUCTS_RULE]
    batches = tuple(b for b in ALL_BATCHES if b >= 1024)

    def judge(results: Results) -> Verdict:
        times: dict[tuple[object, ...], dict[str, float]] = {}
        for cell in results.usual("latency", "dpiframe"):
            r = cell["dpiframe"]
            if r["model"] in models and r["batch"] in batches:
                where = r["model"], r["cell"].get("contexts", 1), r["batch"]
                times.setdefault(where, {})[r["precision"]] = r["p50_us"]
        over = [t["tf32"] / t["bf16"] for t in times.values() if {"tf32", "bf16"} <= t.keys()]
        return _gains(over, sum(cells_of(m, batches) for m in models), least=least)

    return judge


def _floor(precision: str, most: float, batches: Callable[[int], bool], ratio: str = "ratio") -> Judge:
    def judge(results: Results) -> Verdict:
        found = [c["dpiframe"] for c in results.usual("floor", "dpiframe", precision=precision)]
        ratios = [r[ratio] for r in found if batches(r["batch"]) and ratio in r]
        if not ratios:
            return NOTHING
        expected = len(PAPER_MODELS) * sum(map(batches, ALL_BATCHES))
        met = max(ratios) <= most if len(ratios) >= expected or max(ratios) > most else None
        return Verdict(f"geometric mean {mean(ratios):.2f}x, most {max(ratios):.2f}x ({len(ratios)} of {expected} cells)", met)

    return judge


def _lookup(least: float, ours: str, peer: str, time: str, where: Callable[[Record], bool]) -> Judge:
    """A peer's time over ours, cell by cell of the one-hot Zipf sweep."""

    def judge(results: Results) -> Verdict:
        over = {}
        for cell in results.cells("embedding", bag=1, large=False, ids="zipf"):
            r = any_of(cell)
            if where(r) and all(s in cell and cell[s][time] for s in (ours, peer)):
                over[f"{r['cell']['dtype']} B={r['batch']}"] = cell[peer][time] / cell[ours][time]
        if not over:
            return NOTHING
        return Verdict(", ".join(f"{k} {v:.2f}x" for k, v in over.items()), min(over.values()) >= least)

    return judge


def _centre(r: Record, dim: int, batches: Iterable[int], dtype: str | None = None) -> bool:
    c = r["cell"]
    return (
        c["dim"] == dim
        and c["fields"] == 26
        and r["batch"] in batches
        and c["dtype"] in ((dtype,) if dtype else ("float32", "float16"))
    )


def _int8(results: Results) -> Verdict:
    times: dict[int, dict[str, float]] = {}
    for r in results.of("embedding", system="dpiframe", bag=1, large=False, ids="zipf", dim=16, fields=26):
        times.setdefault(r["batch"], {})[r["cell"]["dtype"]] = r["device_us"] or r["p50_us"]
    over = {b: t["float16"] / t["int8"] for b, t in times.items() if {"float16", "int8"} <= t.keys() and b >= 1024}
    if not over:
        return NOTHING
    return Verdict(", ".join(f"B={b} {g:.2f}x" for b, g in over.items()), min(over.values()) > 1)


def _bandwidth(**cells: object) -> Judge:
    def judge(results: Results) -> Verdict:
        shares = {}
        for cell in results.cells("embedding", **cells):
            gathers = [r["bytes_per_s"] for s, r in cell.items() if s.startswith("gather")]
            if gathers and "dpiframe" in cell:
                r = any_of(cell)
                name = f"{r['cell']['dtype']} dim {r['cell']['dim']}" + (f" B={r['batch']}" if not r["cell"]["large"] else "")
                shares[name] = cell["dpiframe"]["bytes_per_s"] / max(gathers)
        if not shares:
            return NOTHING
        return Verdict(", ".join(f"{k} {v:.0%}" for k, v in shares.items()), min(shares.values()) >= 0.85)

    return judge


def _lanes(results: Results) -> Verdict:
    over = {}
    for r in results.of("utilisation", system="dpiframe", lanes=1):
        if cell_name(r):
            continue
        same = results.of("utilisation", system="dpiframe", model=r["model"], batch=r["batch"], precision=r["precision"])
        more = [o["rows_per_s"] for o in same if o["cell"]["lanes"] > 1 and not cell_name(o)]
        if more:
            over[f"{r['model']} {r['precision']} B={r['batch']}"] = max(more) / r["rows_per_s"]
    if not over:
        return NOTHING
    return Verdict(", ".join(f"{k} {v:.2f}x" for k, v in over.items()), min(over.values()) > 1)


def _warmup(results: Results) -> Verdict:
    seconds = {f"{r['model']} {r['precision']}": r["seconds"] for r in results.of("warmup", start="cold")}
    if not seconds:
        return NOTHING
    return Verdict(", ".join(f"{k} {v:.1f} s" for k, v in seconds.items()), max(seconds.values()) < 15)


def _pairs(precision: str, millions: float) -> Judge:
    def judge(results: Results) -> Verdict:
        records = results.of("mlperf", system="dpiframe", precision=precision)
        found = [
            (r["rows_per_s"] / 1e6, r["cell"]["lanes"], r["cell"].get("tables", "")) for r in records if r["batch"] >= 8192
        ]
        if not found:
            return NOTHING
        best: dict[str, str] = {}  # by what the tables hold, the slowest first
        for rate, lanes, tables in sorted(found):
            best[tables] = f"{rate:.1f} M ({lanes} lanes{f', {tables} tables' if tables else ''})"
        return Verdict(", ".join(best.values()), max(found)[0] >= millions)

    return judge


def _pairs_p99(results: Results) -> Verdict:
    found = [r["p99_us"] for r in results.of("mlperf", system="dpiframe", precision="bf16", batch=1024, lanes=1)]
    return Verdict(f"{max(found):.0f} us", max(found) < 200) if found else NOTHING


def _reported(results: Results) -> Verdict:
    lower = [r for r in results.of("precision") if r["precision"] != "fp32"]
    if not lower:
        return NOTHING
    figures = (
        f"{r['precision']}: deviation {r['max_abs_err']:.1e}, tau {r['kendall_tau']:.5f}, AUC {r['auc_delta']:+.1e}"
        for r in lower
    )
    return Verdict("; ".join(figures), True)


def _cpu_lookup(results: Results) -> Verdict:
    return _lookup(6.0, "dpiframe", "eager", "p50_us", lambda r: _centre(r, 16, (1, 16, 64, 256), "float32"))(results)


GPU_AIMS = (
    Aim("four models over eager, tf32, B = 256, 1024", ">= 20x in geometric mean, none under 12x",
        _over("eager", "tf32", (256, 1024), average=20, least=12)),
    Aim("over the best peer, tf32", ">= 1.5x in geometric mean, never below 1.0x",
        _over_best(("tf32",), ALL_BATCHES, average=1.5, least=1.0)),
    Aim("over the best peer, bf16", ">= 1.5x in geometric mean, never below 1.0x",
        _over_best(("bf16",), ALL_BATCHES, average=1.5, least=1.0)),
    Aim("over the best peer, strict fp32", "never below 1.0x", _over_best(("fp32",), ALL_BATCHES, least=1.0)),
    Aim("every architecture over the best peer, tf32", ">= 1.5x in geometric mean for each, never below 1.0x",
        _each_over_best("tf32", 1.5)),
    Aim("every architecture over the best peer, bf16", ">= 1.5x in geometric mean for each, never below 1.0x",
        _each_over_best("bf16", 1.5)),
    Aim("bf16 over our own tf32 where products rule, B >= 1024", ">= 1.3x", _own_bf16(1.3)),
    Aim("strict fp32 against the floor, B >= 1024", "<= 1.3x", _floor("fp32", 1.3, lambda b: b >= 1024)),
    Aim("bf16 against the floor, B >= 1024", "<= 2.0x", _floor("bf16", 2.0, lambda b: b >= 1024)),
    Aim("bf16 against the floor, B < 1024", "<= 2.5x", _floor("bf16", 2.5, lambda b: b < 1024)),
    Aim("bf16 against its chain's floor, B >= 1024", "<= 2.0x", _floor("bf16", 2.0, lambda b: b >= 1024, "chain_ratio")),
    Aim("bf16 against its chain's floor, B < 1024", "<= 2.5x", _floor("bf16", 2.5, lambda b: b < 1024, "chain_ratio")),
    Aim("lookup against FBGEMM, device time, dim 16, B = 1024", ">= 3x",
        _lookup(3, "dpiframe", "fbgemm-captured", "device_us", lambda r: _centre(r, 16, (1024,)))),
    Aim("lookup against FBGEMM, device time, dim 16, B = 16384", ">= 10x",
        _lookup(10, "dpiframe", "fbgemm-captured", "device_us", lambda r: _centre(r, 16, (16384,)))),
    Aim("lookup against FBGEMM, device time, dim 128 fp32, B >= 4096", ">= 1.5x",
        _lookup(1.5, "dpiframe", "fbgemm-captured", "device_us", lambda r: _centre(r, 128, range(4096, 65537), "float32"))),
    Aim("lookup against FBGEMM, device time, dim 128 fp16, B >= 4096", ">= 2.5x",
        _lookup(2.5, "dpiframe", "fbgemm-captured", "device_us", lambda r: _centre(r, 128, range(4096, 65537), "float16"))),
    Aim("int8 lookup over fp16, device time, dim 16", "faster", _int8),
    Aim("lookup, a call, over eager table-per-field, B = 1024", ">= 40x",
        _lookup(40, "dpiframe", "eager", "p50_us", lambda r: _centre(r, 16, (1024,)))),
    Aim("lookup bandwidth, B = 65536, against a plain gather", ">= 85 %", _bandwidth(large=True)),
    Aim("lookup bandwidth, bags of 1 to 100, against a plain gather", ">= 85 %", _bandwidth(bag=MIXED)),
    Aim("lower precision: deviation and ranking", "reported", _reported),
    Aim("two or more lanes over one, saturated", "more rows a second", _lanes),
    Aim("MLPerf's DLRM-DCNv2, pairs a second, bf16, saturated", ">= 13.2 M", _pairs("bf16", 13.2)),
    Aim("MLPerf's DLRM-DCNv2, pairs a second, fp8, saturated", ">= 21.5 M", _pairs("fp8", 21.5)),
    Aim("MLPerf's DLRM-DCNv2, 1,024 pairs, bf16, p99", "under 200 us", _pairs_p99),
    Aim("warm-up of all buckets, without caches", "under 15 s", _warmup),
)  # fmt: skip
CPU_AIMS = (
    Aim("lookup over per-table lookups, B <= 256", ">= 6x", _cpu_lookup),
    Aim("four models over eager, fp32, B = 1", ">= 1.8x", _over("eager", "fp32", (1,), least=1.8)),
    Aim("over eager, fp32, any batch", "never below 1.0x", _over("eager", "fp32", ALL_BATCHES, least=1.0)),
    Aim("over compiled, fp32, any batch", "never below 1.0x", _over("compile", "fp32", ALL_BATCHES, least=1.0)),
    Aim("over the best peer, bf16", "reported", _over_best(("bf16",), ALL_BATCHES)),
)  # fmt: skip


def _each_cell(found: Callable[[Results], Sequence[float]], least: float) -> Judge:
    def judge(results: Results) -> Verdict:
        over = found(results)
        if not over:
            return NOTHING
        fewer = sum(o < least for o in over)
        figure = f"geometric mean {mean(over):.2f}x, least {min(over):.2f}x, most {max(over):.2f}x"
        return Verdict(f"{figure} (below it in {fewer} of {len(over)} cells)", not fewer)

    return judge


def _nccl(most_rows: int) -> Callable[[Results], Sequence[float]]:
    return lambda results: [over_nccl(c) for (*_, batch), c in by_collectives(results).items() if batch <= most_rows]


def _placed(above: float) -> Callable[[Results], Sequence[float]]:
    return lambda results: [over_simple(c) for (size, *_), c in by_placement(results).items() if size > above]


TIERS_SUITES = {"tiers", "links", "tiers-large", "tiers-load"}
TIERS_AIMS = (
    Aim("rows that GPUs share, over NCCL, B <= 1024", ">= 5x", _each_cell(_nccl(1024), 5.0)),
    Aim("rows that GPUs share, over NCCL, any batch", "never below 1.0x", _each_cell(_nccl(1 << 30), 1.0)),
    Aim("the plan over the better of two simple placements", "never below 0.95x", _each_cell(_placed(0), 0.95)),
    Aim("the same where tables exceed a GPU's memory", ">= 1.5x", _each_cell(_placed(1), 1.5)),
)
