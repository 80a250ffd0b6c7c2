"""What docs/performance*.md say of models and lookups, from the stored results: a function a generated part."""

from collections.abc import Sequence

from benchmarks.records.record import Record
from benchmarks.report.markdown import table, times_over, us
from benchmarks.report.results import Gain, Results, any_of, cell_name, mean, model_title
from benchmarks.report.results_page import aims_of
from benchmarks.systems.names import COMPILED, MODEL_TITLES, PAPER_MODELS, is_compiled

_CPU_LOOKUPS = ("dpiframe", "eager", "stacked-eager")


def models(results: Results, precision: str) -> list[str]:
    """A call of each of the four models: ours, the fastest peer, eager PyTorch, and the floor. The other models in short."""
    measured = [cell["dpiframe"] for cell in results.usual("floor", "dpiframe", precision=precision)]
    floors = {(r["model"], r["batch"]): f"{r['ratio']:.1f}x" for r in measured}
    found = [g for g in results.gains(precision=precision) if g.model in PAPER_MODELS]
    more = _more_models(results, precision)
    if not found:
        return more
    rows = [
        [
            g.title, g.batch, f"**{us(g.ours['p50_us'])}**\u00a0({us(g.ours['p99_us'])})", us(g.peer["p50_us"]),
            us(g.eager["p50_us"]) if g.eager else "", f"{g.over_peer:.2f}x", us(g.ours["device_us"]),
            floors.get((g.model, g.batch), ""),
        ]
        for g in found
    ]  # fmt: skip
    head = ["model", "candidates", "DPIFrame", "strongest peer", "eager", "over the peer", "device alone", "over the floor"]
    return [_over(found), "", *table(head, rows), *([""] if more else []), *more]


def _more_models(results: Results, precision: str) -> list[str]:
    """A row a model and number of contexts: a call of ours by candidates, and how many times as fast as the strongest peer."""
    cells = [c for c in results.usual("latency", "dpiframe", precision=precision) if c["dpiframe"]["model"] not in PAPER_MODELS]
    ours = {(model_title(c["dpiframe"]), c["dpiframe"]["batch"]): us(c["dpiframe"]["p50_us"]) for c in cells}
    if not ours:
        return []
    over = {(g.title, g.batch): g.over_peer for g in results.gains(precision=precision)}
    compiled = {(model_title(c["dpiframe"]), c["dpiframe"]["batch"]): list(filter(is_compiled, c)) for c in cells}
    narrow = {at for at, systems in compiled.items() if systems and all(s.endswith("(ATEN)") for s in systems)}
    batches = sorted({batch for _, batch in ours})
    rows = []
    for title in dict.fromkeys(title for title, _ in ours):
        figures = []
        for at in ((title, batch) for batch in batches):
            mark = r"\*" if at in narrow else ""
            gain = f" ({over[at]:.2f}x{mark})" if at in over else ""
            figures.append(f"**{ours[at]}**{gain}" if at in ours else "")
        own = [over[title, b] for b in batches if (title, b) in over]
        rows.append([title, *figures, f"{mean(own):.2f}x" if own else ""])
    note = "Other models. In brackets: over the strongest peer, where a compiled one was measured; last, its geometric mean."
    if narrow:
        note += " \\* Peers that chose among cuBLAS's products alone; Inductor's whole search may find faster ones."
    return [note, "", *table(["candidates", *batches, "over the peer"], rows)]


def _over(found: Sequence[Gain]) -> str:
    eager = [g.over_eager for g in found if g.over_eager]
    over_eager = f", over eager PyTorch {mean(eager):.0f}x ({min(eager):.1f}x to {max(eager):.0f}x)" if eager else ""
    return f"Over the strongest peer {times_over([g.over_peer for g in found])}{over_eager}."


def fp8(results: Results) -> list[str]:
    found = [cell["dpiframe"] for cell in results.usual("latency", "dpiframe", precision="fp8")]
    batches = sorted({r["batch"] for r in found})
    times = {(model_title(r), r["batch"]): us(r["p50_us"]) for r in found}
    rows = [[title, *(times.get((title, b), "") for b in batches)] for title in dict.fromkeys(t for t, _ in times)]
    return table(["candidates", *batches], rows)


def all_peers(results: Results) -> list[str]:
    """How far the captured, compiled model is behind the fastest of six peers of one run."""
    rows, behind = [], []
    measured = {r["system"] for r in results.of("latency")}
    peers = [s for s in ("eager", "stacked-eager", *COMPILED) if s in measured]
    for cell in results.usual("latency", "dpiframe", "compile-captured"):
        r, theirs = any_of(cell), {s: r for s, r in cell.items() if s != "dpiframe"}
        behind.append(theirs["compile-captured"]["p50_us"] / min(t["p50_us"] for t in theirs.values()))
        times = [us(theirs[s]["p50_us"]) if s in theirs else "" for s in peers]
        rows.append([model_title(r), r["precision"], r["batch"], us(cell["dpiframe"]["p50_us"]), *times])
    if not behind:
        return []
    first = sum(b == 1 for b in behind)
    note = (
        f"`compile-captured` is the fastest peer in {first} of {len(behind)} cells and at most {max(behind) - 1:.1%} behind it."
    )
    head = ["model", "", "candidates", "DPIFrame then", *peers]
    return [note, "", *table(head, rows, figures=2)]


def _is_shown(r: Record) -> bool:
    c = r["cell"]
    return not c["large"] and c["bag"] == 1 and c["ids"] == "zipf" and c["fields"] == 26 and c["dim"] in (16, 128)


def lookup(results: Results) -> list[str]:
    """Device time beside FBGEMM's, 26 fields, Zipf ids."""
    rows = []
    for cell in results.cells("embedding"):
        r = any_of(cell)
        ours, theirs = (cell[s]["device_us"] if s in cell else None for s in ("dpiframe", "fbgemm-captured"))
        if not _is_shown(r) or not ours or not theirs:
            continue
        name = [r["cell"]["dtype"], r["cell"]["dim"], r["batch"]]
        rows.append([*name, f"**{ours:.1f}**", f"{theirs:.1f}", f"{theirs / ours:.1f}x", us(cell["dpiframe"]["p50_us"])])
    rows.sort(key=lambda row: (("float32", "float16", "int8").index(row[0]), row[1], row[2]))
    return table(["tables", "dim", "rows", "DPIFrame", "FBGEMM", "over it", "a call of ours"], rows)


def large_tables(results: Results) -> list[str]:
    rows = []
    for cell in results.cells("embedding", large=True):
        gather = max((r["bytes_per_s"] for s, r in cell.items() if s.startswith("gather")), default=0)
        if not gather or "dpiframe" not in cell:
            continue
        ours = cell["dpiframe"]["bytes_per_s"]
        c = any_of(cell)["cell"]
        rows.append([c["dtype"], c["dim"], f"{ours / 1e9:.0f}", f"{gather / 1e9:.0f}", f"{ours / gather:.0%}"])
    return table(["tables", "dim", "GB/s", "a plain gather's GB/s", "share"], rows)


def ablation(results: Results) -> list[str]:
    stages = list(dict.fromkeys(r["system"] for r in results.of("ablation")))
    rows = []
    for cell in results.usual("ablation"):
        r = any_of(cell)
        rows.append([model_title(r), r["batch"], *(us(cell[s]["p50_us"]) if s in cell else "" for s in stages)])
    return table(["model", "candidates", *stages], rows)


def lanes(results: Results) -> list[str]:
    rows = []
    for r in (r for r in results.of("utilisation") if not cell_name(r)):
        who = (
            f"DPIFrame, {r['cell']['lanes']} lane" + "s" * (r["cell"]["lanes"] > 1)
            if r["system"] == "dpiframe"
            else r["system"]
        )
        active = f"{r['sm_active']:.0%}" if r["sm_active"] is not None else ""
        figures = [f"{r['rows_per_s'] / 1e6:.2f}", f"{us(r['p50_us'])} ({us(r['p99_us'])})", active]
        rows.append([model_title(r), r["batch"], who, *figures])
    return table(["model", "candidates", "", "M rows/s", "p50 (p99) us", "multiprocessors active"], rows, figures=3)


def precision(results: Results) -> list[str]:
    rows = [
        [r["precision"], f"{r['max_abs_err']:.1e}", f"{r['kendall_tau']:.5f}", f"{r['auc']:.5f}", f"{r['auc_delta']:+.1e}"]
        for r in results.of("precision")
    ]
    return table(["", "largest deviation", "Kendall's tau", "AUC", "AUC against fp32"], rows)


def warmup(results: Results) -> list[str]:
    seconds = {(r["model"], r["cell"]["start"]): f"{r['seconds']:.1f} s" for r in results.of("warmup")}
    found = [(m, [seconds.get((m, start), "") for start in ("cold", "again")]) for m in MODEL_TITLES]
    rows = [[MODEL_TITLES[m], *starts] for m, starts in found if any(starts)]
    return table(["model", "no caches", "a second start"], rows)


def cpu_models(machines: Sequence[tuple[str, str, Results]]) -> list[str]:
    """Models on the CPU, a row a machine and precision, and one for each model beside the four. machines: (name, link to its
    record, results).
    """
    rows = []
    for name, link, results in machines:
        for kind in ("fp32", "bf16"):
            over: dict[str, dict[str, list[float]]] = {}  # models -> peer -> how many times its time is ours
            for peer in ("eager", "compile"):
                for c in results.usual("latency", "dpiframe", peer, precision=kind):
                    model = c["dpiframe"]["model"]
                    title = "the four" if model in PAPER_MODELS else MODEL_TITLES[model]
                    over.setdefault(title, {}).setdefault(peer, []).append(c[peer]["p50_us"] / c["dpiframe"]["p50_us"])
            for title, peers in sorted(over.items(), key=lambda of_models: of_models[0] != "the four"):
                figures = (times_over(peers[peer]) if peer in peers else "" for peer in ("eager", "compile"))
                rows.append([f"[{name}]({link}#{kind})", title, kind, *figures])
    return table(["two cores of", "", "", "over eager", "over `torch.compile`"], rows, figures=2)


def cpu_lookup(machines: Sequence[tuple[str, str, Results]]) -> list[str]:
    times = {}
    for name, link, results in machines:
        for r in results.of("embedding", dtype="float32", dim=16, fields=26, bag=1, ids="zipf", large=False):
            times.setdefault((f"[{name}]({link}#embedding)", r["system"]), {})[r["batch"]] = us(r["p50_us"])
    batches = sorted({batch for of_batch in times.values() for batch in of_batch})
    rows = [[*who, *(times[who].get(batch, "") for batch in batches)] for who in times if who[1] in _CPU_LOOKUPS]
    return table(["two cores of", "rows", *batches], rows, figures=2)


def missed(machines: Sequence[tuple[str, str, Results]]) -> list[str]:
    """Every aim that was missed, on whichever machine."""
    rows = []
    for name, link, results in machines:
        for aim in aims_of(results):
            verdict = aim.judge(results)
            if verdict.met is False:
                rows.append([f"[{name}]({link}#aims)", aim.what, aim.rule, verdict.figure])
    return table(["machine", "", "aim", "measured"], rows, figures=4)
