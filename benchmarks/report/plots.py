"""Draws a suite's figures beside its JSON, from the records alone."""

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.records.record import Record
from benchmarks.report import panels, tiers
from benchmarks.report.results import Results, any_of, cell_name, model_title
from benchmarks.systems.names import MODEL_TITLES, SYSTEMS, known_as

_COLUMNS = 5  # of panels, a model each
_MODELS_A_ROW = 7  # of bars: a page has no room for more


def draw(suite: str, results: Results, folder: Path) -> list[Path]:
    """Writes the suite's PNGs and gives their paths; none for a suite that has no picture."""
    return [_saved(figure, folder / f"{name}.png") for name, figure in figures(suite, results)]


Named = Iterable[tuple[str, Figure]]


def figures(suite: str, results: Results) -> Named:
    """The suite's figures by name, not drawn yet."""
    return _FIGURES[suite](results) if suite in _FIGURES else ()


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def _values(records: Iterable[Record], key: str) -> list:  # type: ignore[type-arg]
    """The values of a field, or of the cell's, in order of appearance."""
    return list(dict.fromkeys(r.get(key, r["cell"].get(key)) for r in records))


def _latency(results: Results) -> Named:
    for precision in _values(results.of("latency"), "precision"):
        cells = results.usual("latency", precision=precision)
        if not cells:
            continue
        titles = list(dict.fromkeys(model_title(any_of(c)) for c in cells))
        columns = min(len(titles), _COLUMNS)
        rows = -(-len(titles) // columns)
        title = f"Latency of a call, host to host, {precision} (median, microseconds)"
        figure, axes = panels.grid(title, columns, rows=rows)
        for a in axes[len(titles) :]:
            a.set_axis_off()
        axes = axes[: len(titles)]
        for a, model in zip(axes, titles, strict=True):
            own = [c for c in cells if model_title(any_of(c)) == model]
            systems = sorted({s for c in own for s in c}, key=lambda s: (SYSTEMS.index(known_as(s)), s))
            times = {s: {c[s]["batch"]: c[s]["p50_us"] for c in own if s in c} for s in systems}
            panels.lines(a, times, "rows", also_at=_values(map(any_of, cells), "batch"))
            a.set_title(model, fontsize=9)
        panels.same_heights(axes)
        panels.legend(figure, axes)
        yield f"latency-{precision}", figure
        yield from _speedup(results, precision)


def _speedup(results: Results, precision: str) -> Named:
    """The paper's first picture: how many times faster than eager, by model and batch."""
    cells = results.usual("latency", "dpiframe", "eager", precision=precision)
    if not cells:
        return
    groups: dict[str, dict[str, float]] = {}
    for cell in cells:
        r = any_of(cell)
        gain = cell["eager"]["p50_us"] / cell["dpiframe"]["p50_us"]
        groups.setdefault(model_title(r), {})[f"B = {r['batch']}"] = gain
    title = f"Speed-up over eager PyTorch with a table per field, {precision}"
    rows = ceil(len(groups) / _MODELS_A_ROW)
    across = ceil(len(groups) / rows)
    figure, axes = panels.grid(title, 1, rows=rows, width=max(8.5, 1.7 * across))
    sizes = list(dict.fromkeys(name for g in groups.values() for name in g))
    colours = dict(zip(sizes, panels.SHADES, strict=False))
    for i, panel in enumerate(axes):
        panels.bars(panel, dict(list(groups.items())[i * across : (i + 1) * across]), colours, "%.0fx", sizes)
    panels.same_heights(axes)
    panels.legend(figure, axes)
    yield f"speedup-{precision}", figure


def _embedding(results: Results) -> Named:
    dtypes = [d for d in _values(results.of("embedding"), "dtype") if d != "int8"]
    axes_of = {"batch": "rows", "dim": "dim", "fields": "fields"}
    if not dtypes:
        return
    timed = any(r["device_us"] for r in results.of("embedding"))
    shown = ("dpiframe", "fbgemm-captured", "stacked-captured") if timed else ("dpiframe", "eager", "stacked-eager", "fbgemm")
    for key, what in (("device_us", "device time"), ("p50_us", "a call")):
        if key == "device_us" and not timed:
            continue
        systems = (
            shown
            if key == "device_us"
            else ("dpiframe", "dpiframe-pinned", "eager", "stacked-eager", "fbgemm", "fbgemm-captured")
        )
        figure, axes = panels.grid(f"The lookup alone, {what} (microseconds)", 3, rows=len(dtypes))
        places = iter(axes)
        for dtype in dtypes:
            records = [
                r for r in results.of("embedding", dtype=dtype, bag=1, large=False, ids="zipf") if r["system"] in systems
            ]
            for axis, label in axes_of.items():
                a = next(places)
                own = [r for r in records if _on_axis(r, axis)]
                lines = {s: {_at(r, axis): r[key] for r in own if r["system"] == s and r[key]} for s in _values(own, "system")}
                panels.lines(a, lines, label)
                a.set_title(f"{dtype} tables, by {label}", fontsize=9)
        panels.legend(figure, axes)
        yield f"embedding-{'device' if key == 'device_us' else 'call'}", figure


def _at(r: Record, axis: str) -> int:
    return r["batch"] if axis == "batch" else r["cell"][axis]


def _on_axis(r: Record, axis: str) -> bool:
    """Whether all but one axis stand at the centre of the sweep."""
    centre = {"batch": 1024, "dim": 16, "fields": 26}
    return all(_at(r, k) == v for k, v in centre.items() if k != axis)


def _stages(suite: str, title: str) -> Callable[[Results], Named]:
    def figures(results: Results) -> Named:
        records = [r for r in results.of(suite) if not cell_name(r)]
        batches = _values(records, "batch")
        if not batches:
            return
        figure, axes = panels.grid(title, 1, rows=len(batches), width=9.5, height=2.6)
        for a, batch in zip(axes, batches, strict=True):
            groups: dict[str, dict[str, float]] = {}
            for r in (r for r in records if r["batch"] == batch):
                groups.setdefault(f"{MODEL_TITLES.get(r['model'], r['model'])}, {r['precision']}", {})[r["system"]] = r[
                    "p50_us"
                ]
            *_, last = dict.fromkeys(name for g in groups.values() for name in g)
            panels.bars(a, groups, {last: panels.COLOURS["dpiframe"]}, "%.0f")  # what serving runs
            panels.log_scale(a)
            a.set_ylim(bottom=10)  # one baseline for all
            a.set_title(f"{batch} rows", fontsize=9)
        panels.legend(figure, axes)
        yield suite, figure

    return figures


def _utilisation(results: Results) -> Named:
    records = [r for r in results.of("utilisation") if not cell_name(r)]
    if not records:
        return
    figure, axes = panels.grid("Saturated: as many callers as lanes, no pause", 2, width=4.8)
    names = {id(r): f"{MODEL_TITLES.get(r['model'], r['model'])} {r['precision']}, {r['batch']} rows" for r in records}
    lines: dict[str, dict[float, float]] = {}
    active: dict[str, dict[str, float]] = {}
    for r in records:
        share = r["sm_active"] if r["sm_active"] is not None else r["kernel_union"]
        if r["system"] == "dpiframe":
            lines.setdefault(names[id(r)], {})[r["cell"]["lanes"]] = r["rows_per_s"] / 1e6
        if share is not None:
            name = f"dpiframe, lanes: {r['cell']['lanes']}" if r["system"] == "dpiframe" else r["system"]
            active.setdefault(names[id(r)].replace(", ", "\n"), {})[name] = share * 100
    panels.lines(axes[0], lines, "lanes", log=False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_title("million rows a second", fontsize=9)
    if active:
        ours = sorted({n for g in active.values() for n in g if n.startswith("dpiframe")})
        panels.bars(axes[1], active, panels.COLOURS | dict(zip(ours, panels.LANES, strict=False)), "%.0f")
    panels.legend(figure, axes)
    counters = any(r["sm_active"] is not None for r in records)
    axes[1].set_title("multiprocessors active, % of cycles" if counters else "some kernel running, % of time", fontsize=9)
    yield "utilisation", figure


def _floor(results: Results) -> Named:
    records = [cell["dpiframe"] for cell in results.usual("floor", "dpiframe")]
    precisions = _values(records, "precision")
    if not precisions:
        return
    figure, axes = panels.grid("Median latency over the hardware's floor", len(precisions))
    for a, precision in zip(axes, precisions, strict=False):
        own = [r for r in records if r["precision"] == precision]
        lines = {
            MODEL_TITLES.get(m, m): {r["batch"]: r["ratio"] for r in own if r["model"] == m} for m in _values(own, "model")
        }
        panels.lines(a, lines, "rows", log=False)
        a.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
        a.set_ylim(bottom=0)
        a.set_title(precision, fontsize=9)
    panels.legend(figure, axes)
    yield "floor", figure


def _serving_stages(results: Results) -> Named:
    """A bar a form and way, of the stages' CPU time; a panel a number of candidates."""
    records = results.of("serving_stages")
    sizes = _values(records, "batch")
    if not sizes:
        return
    figure, axes = panels.grid(
        "CPU time of a request under load, by stage (microseconds)", 2, rows=-(-len(sizes) // 2), width=6
    )
    for a, size in zip(axes, sizes, strict=False):
        own = [r for r in records if r["batch"] == size]
        named = {f"{r['cell']['form']}, {r['cell']['way']}": {k: sum(v) for k, v in r["cpu_us"].items()} for r in own}
        panels.stacked(a, named)
        a.set_title(f"{size} candidates", fontsize=9)
    panels.legend(figure, axes)
    yield "serving-stages", figure


_FIGURES: Mapping[str, Callable[[Results], Named]] = {
    "latency": _latency,
    "embedding": _embedding,
    "ablation": _stages("ablation", "A component added at a time, host to host (median, microseconds)"),
    "first_op": _stages("first_op", "From the first operator's launch to the end (median, microseconds)"),
    "utilisation": _utilisation,
    "floor": _floor,
    "tiers": tiers.figures,
    "serving_stages": _serving_stages,
}
