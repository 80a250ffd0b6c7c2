"""Draws a suite's figures beside its JSON, from the records alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.record import Record
from benchmarks.report.results import Results, any_of

_COLOURS = {
    "dpiframe": "#D1495B", "dpiframe-pinned": "#E8A0A8", "eager": "#8D99AE", "stacked-eager": "#5C677D", "compile": "#7EB09B",
    "compile-captured": "#2E7D5B", "fbgemm": "#8AB6D6", "fbgemm-captured": "#2B6CA3", "stacked-captured": "#3D4452",
}  # fmt: skip
_LANES = ("#EDB6BC", "#DE7F8A", "#D1495B", "#9A2E3D")
_OTHERS = ("#8D99AE", "#8AB6D6", "#2B6CA3", "#7EB09B", "#2E7D5B", "#E9B44C", "#B279A2", "#9D755D")
_NAMES = {"wide_deep": "Wide&Deep", "deepfm": "DeepFM", "dcn": "DCN", "dcnv2": "DCN-V2"}


def draw(suite: str, results: Results, folder: Path) -> list[Path]:
    """Writes the suite's PNGs and gives their paths; none for a suite that has no picture."""
    return [_saved(figure, folder / f"{name}.png") for name, figure in _FIGURES[suite](results)] if suite in _FIGURES else []


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


Named = Iterable[tuple[str, Figure]]


def _grid(title: str, columns: int, *, rows: int = 1, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for a in axes:
        a.spines[["top", "right"]].set_visible(False)
        a.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        a.set_axisbelow(True)
        a.tick_params(labelsize=8)
    return figure, axes


def _values(records: Iterable[Record], key: str) -> list:  # type: ignore[type-arg]
    """The values of a field, or of the cell's, in order of appearance."""
    return list(dict.fromkeys(r.get(key, r["cell"].get(key)) for r in records))


def _lines(axes: Axes, lines: Mapping[str, Mapping[float, float]], label: str, *, log: bool = True) -> None:
    """One line a name over common x values, which are spaced evenly: they grow by factors."""
    at = sorted({x for line in lines.values() for x in line})
    for i, (name, line) in enumerate(lines.items()):
        ours = name.startswith("dpiframe")
        axes.plot(
            [at.index(x) for x in sorted(line)], [line[x] for x in sorted(line)], label=name, marker="o", markersize=3.5,
            linewidth=2.2 if ours else 1.3, color=_COLOURS.get(name, _OTHERS[i % len(_OTHERS)]), zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_xticks(range(len(at)), [f"{x:g}" for x in at])
    axes.set_xlabel(label, fontsize=8)
    if log and lines:
        _log_scale(axes)


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One for all panels, below them."""
    handles = {label: handle for a in axes for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(5 if len(handles) > 7 else 7, len(handles)),
        frameon=False,
        fontsize=8,
    )


def _bars(axes: Axes, groups: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], form: str) -> None:
    """Groups of bars, one colour a name, each with its figure above it."""
    names = list(dict.fromkeys(n for g in groups.values() for n in g))
    width = 0.84 / max(1, len(names))
    for i, name in enumerate(names):
        at = [(j, g[name]) for j, g in enumerate(groups.values()) if name in g]
        places = [j + (i - (len(names) - 1) / 2) * width for j, _ in at]
        bars = axes.bar(
            places, [v for _, v in at], width * 0.94, label=name, color=colours.get(name, _OTHERS[i % len(_OTHERS)])
        )
        axes.bar_label(bars, fmt=form, fontsize=6, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))


def _latency(results: Results) -> Named:
    for precision in _values(results.of("latency"), "precision"):
        records = [r for r in results.of("latency", precision=precision) if _usual(r)]
        models = _values(records, "model")
        figure, axes = _grid(f"Latency of a call, host to host, {precision} (median, microseconds)", max(1, len(models)))
        for a, model in zip(axes, models, strict=False):
            own = [r for r in records if r["model"] == model]
            lines = {s: {r["batch"]: r["p50_us"] for r in own if r["system"] == s} for s in _values(own, "system")}
            _lines(a, lines, "rows")
            a.set_title(_NAMES.get(model, model), fontsize=9)
        _legend(figure, axes)
        yield f"latency-{precision}", figure
        yield from _speedup(results, precision)


def _speedup(results: Results, precision: str) -> Named:
    """The paper's first picture: how many times faster than eager, by model and batch."""
    cells = [
        c for c in results.cells("latency", precision=precision) if {"dpiframe", "eager"} <= c.keys() and _usual(any_of(c))
    ]
    if not cells:
        return
    groups: dict[str, dict[str, float]] = {}
    for cell in cells:
        r = any_of(cell)
        gain = cell["eager"]["p50_us"] / cell["dpiframe"]["p50_us"]
        groups.setdefault(_NAMES.get(r["model"], r["model"]), {})[f"{r['batch']} rows"] = gain
    figure, axes = _grid(f"Speed-up over eager PyTorch with a table per field, {precision}", 1, width=8.5)
    _bars(axes[0], groups, {}, "%.0fx")
    _legend(figure, axes)
    yield f"speedup-{precision}", figure


def _usual(r: Record) -> bool:
    return r["cell"].get("ids") != "uniform" and r["cell"].get("buckets") != "default"


def _embedding(results: Results) -> Named:
    dtypes = [d for d in _values(results.of("embedding"), "dtype") if d != "int8"]
    axes_of = {"batch": "rows", "dim": "dim", "fields": "fields"}
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
        figure, axes = _grid(f"The lookup alone, {what} (microseconds)", 3, rows=max(1, len(dtypes)))
        panels = iter(axes)
        for dtype in dtypes:
            records = [
                r for r in results.of("embedding", dtype=dtype, bag=1, large=False, ids="zipf") if r["system"] in systems
            ]
            for axis, label in axes_of.items():
                a = next(panels)
                own = [r for r in records if _on_axis(r, axis)]
                lines = {s: {_at(r, axis): r[key] for r in own if r["system"] == s and r[key]} for s in _values(own, "system")}
                _lines(a, lines, label)
                a.set_title(f"{dtype} tables, by {label}", fontsize=9)
        _legend(figure, axes)
        yield f"embedding-{'device' if key == 'device_us' else 'call'}", figure


def _at(r: Record, axis: str) -> int:
    return r["batch"] if axis == "batch" else r["cell"][axis]


def _on_axis(r: Record, axis: str) -> bool:
    """Whether all but one axis stand at the centre of the sweep."""
    centre = {"batch": 1024, "dim": 16, "fields": 26}
    return all(_at(r, k) == v for k, v in centre.items() if k != axis)


def _stages(suite: str, title: str) -> Callable[[Results], Named]:
    def figures(results: Results) -> Named:
        batches = _values(results.of(suite), "batch")
        figure, axes = _grid(title, 1, rows=len(batches), width=9.5, height=2.6)
        for a, batch in zip(axes, batches, strict=True):
            groups: dict[str, dict[str, float]] = {}
            for r in results.of(suite, batch=batch):
                groups.setdefault(f"{_NAMES.get(r['model'], r['model'])}, {r['precision']}", {})[r["system"]] = r["p50_us"]
            *_, last = dict.fromkeys(name for g in groups.values() for name in g)
            _bars(a, groups, {last: _COLOURS["dpiframe"]}, "%.0f")  # what serving runs
            _log_scale(a)
            a.set_ylim(bottom=10)  # one baseline for all
            a.set_title(f"{batch} rows", fontsize=9)
        _legend(figure, axes)
        yield suite, figure

    return figures


def _utilisation(results: Results) -> Named:
    records = results.of("utilisation")
    figure, axes = _grid("Saturated: as many callers as lanes, no pause", 2, width=4.8)
    names = {id(r): f"{_NAMES.get(r['model'], r['model'])} {r['precision']}, {r['batch']} rows" for r in records}
    lines: dict[str, dict[float, float]] = {}
    active: dict[str, dict[str, float]] = {}
    for r in records:
        share = r["sm_active"] if r["sm_active"] is not None else r["kernel_union"]
        if r["system"] == "dpiframe":
            lines.setdefault(names[id(r)], {})[r["cell"]["lanes"]] = r["rows_per_s"] / 1e6
        if share is not None:
            name = f"dpiframe, lanes: {r['cell']['lanes']}" if r["system"] == "dpiframe" else r["system"]
            active.setdefault(names[id(r)].replace(", ", "\n"), {})[name] = share * 100
    _lines(axes[0], lines, "lanes", log=False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_title("million rows a second", fontsize=9)
    if active:
        ours = sorted({n for g in active.values() for n in g if n.startswith("dpiframe")})
        _bars(axes[1], active, _COLOURS | dict(zip(ours, _LANES, strict=False)), "%.0f")
    _legend(figure, axes)
    counters = any(r["sm_active"] is not None for r in records)
    axes[1].set_title("multiprocessors active, % of cycles" if counters else "some kernel running, % of time", fontsize=9)
    yield "utilisation", figure


def _floor(results: Results) -> Named:
    records = results.latest("floor", system="dpiframe")
    precisions = _values(records, "precision")
    figure, axes = _grid("Median latency over the hardware's floor", max(1, len(precisions)))
    for a, precision in zip(axes, precisions, strict=False):
        own = [r for r in records if r["precision"] == precision]
        lines = {_NAMES.get(m, m): {r["batch"]: r["ratio"] for r in own if r["model"] == m} for m in _values(own, "model")}
        _lines(a, lines, "rows", log=False)
        a.axhline(1.0, color="#444444", linewidth=0.8, linestyle="--")
        a.set_ylim(bottom=0)
        a.set_title(precision, fontsize=9)
    _legend(figure, axes)
    yield "floor", figure


_FIGURES: Mapping[str, Callable[[Results], Named]] = {
    "latency": _latency,
    "embedding": _embedding,
    "ablation": _stages("ablation", "A component added at a time, host to host (median, microseconds)"),
    "first_op": _stages("first_op", "From the first operator's launch to the end (median, microseconds)"),
    "utilisation": _utilisation,
    "floor": _floor,
}
