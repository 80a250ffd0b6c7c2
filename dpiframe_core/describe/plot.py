"""Draws a bundle's plan (operators by level and stream, dashed where an event crosses streams) and a request's timeline."""

from pathlib import Path
from typing import Any

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.describe.trace import Span, Trace
from dpiframe_core.graph.fusion import fuse
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.models.model_graph import model_graph

_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2", "#E45756", "#72B7B2", "#9D755D", "#BAB0AC")
_HOST = "#7F7F7F"
_X, _Y, _WIDTH, _HEIGHT = 2.6, 1.3, 2.0, 0.62


def plot_plan(bundle: Bundle, path: str | Path, max_streams: int = 4) -> None:
    """Writes the picture; the file's ending picks the format (PNG, SVG, PDF)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    graph = fuse(model_graph(bundle))
    plan = breadth_first(graph, max_streams)
    at = {s.node: (s.level * _X, -s.stream * _Y) for s in plan.steps}
    stream = {s.node: s.stream for s in plan.steps}
    modules = {m: _COLOURS[i % len(_COLOURS)] for i, m in enumerate(dict.fromkeys(n.module for n in graph.nodes))}
    levels = 1 + max(s.level for s in plan.steps)
    figure = Figure(figsize=(1.6 + 1.55 * levels, 1.5 + 0.95 * plan.streams), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for n in graph.nodes:
        x, y = at[n.name]
        box = FancyBboxPatch(
            (x - _WIDTH / 2, y - _HEIGHT / 2), _WIDTH, _HEIGHT, boxstyle="round,pad=0.04", fc=modules[n.module], ec="none"
        )
        axes.add_patch(box)
        label = n.op if n.op == n.name else f"{n.name}\n{n.op}"
        axes.text(x, y, label, ha="center", va="center", color="white", fontsize=7)
    for name, inputs in graph.predecessors().items():
        for i in inputs:
            crosses = stream[i] != stream[name]
            (x0, y0), (x1, y1) = at[i], at[name]
            arrow = {"arrowstyle": "->", "color": "#444", "linestyle": "--" if crosses else "-", "shrinkA": 0, "shrinkB": 0}
            # An edge that skips levels on its own stream bends around the boxes between.
            if not crosses and x1 - x0 > 1.5 * _X:
                arrow["connectionstyle"] = "arc3,rad=-0.35"
            axes.annotate("", (x1 - _WIDTH / 2 - 0.05, y1), (x0 + _WIDTH / 2 + 0.05, y0), arrowprops=arrow)
    axes.set_xlim(-_WIDTH / 2 - 0.3, (levels - 1) * _X + _WIDTH / 2 + 0.3)
    axes.set_ylim(-(plan.streams - 1) * _Y - 0.7, 0.9)
    axes.set_yticks([-s * _Y for s in range(plan.streams)], [f"stream {s}" for s in range(plan.streams)])
    axes.set_xticks([k * _X for k in range(levels)], [f"level {k}" for k in range(levels)])
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    m = bundle.manifest
    axes.set_title(f"{m.name} ({m.architecture.type}): {plan.policy} plan; dashed: an event crosses streams", fontsize=9)
    figure.savefig(path)


def plot_trace(trace: Trace, path: str | Path) -> None:
    """Writes the picture of a trace: an axis of time for each section, a bar for each span, in rows by stream."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = {section: trace.rows(section) for section in trace.sections}
    modules = dict.fromkeys(s.module for s in trace.spans if s.module)
    colours = {m: _COLOURS[i % len(_COLOURS)] for i, m in enumerate(modules)}
    heights = [0.9 + 0.75 * len(r) for r in rows.values()]
    figure = Figure(figsize=(13, 0.9 + sum(heights)), dpi=150, layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)
    for axes, (section, by_row) in zip(grid[:, 0], rows.items(), strict=True):
        whole = max(s.end_us for spans in by_row.values() for s in spans)
        for y, spans in enumerate(by_row.values()):
            for s in spans:
                axes.barh(-y, s.end_us - s.start_us, 0.42, s.start_us, color=colours.get(s.module, _HOST), ec="white", lw=0.4)
                _label(axes, s, -y, whole)
        axes.set_xlim(0, whole * 1.005)
        axes.set_ylim(-len(by_row) + 0.6, 0.8)
        axes.set_yticks([-y for y in range(len(by_row))], list(by_row))
        axes.tick_params(length=0, labelsize=8)
        axes.grid(axis="x", color="#DDD", lw=0.6)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
        axes.set_title(f"{section}: {whole:.1f} us", fontsize=9, loc="left")
    grid[-1, 0].set_xlabel("microseconds since the request began", fontsize=8)
    f = trace.facts
    figure.suptitle(
        f"{f['model']} ({f['architecture']}), {f['rows']} rows, {f['precision']} on {f['gpu'] or f['device']}", fontsize=10
    )
    handles = [Patch(color=c, label=m) for m, c in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), fontsize=8, frameon=False)
    figure.savefig(path)


def _label(axes: Any, span: Span, y: float, whole: float) -> None:
    """The span's name in its bar where it fits, at a slant above it where it does not."""
    name = str(span.details.get("node", span.name))
    share = (span.end_us - span.start_us) / whole  # of some 1,700 columns of pixels, 8 a letter
    x = (span.start_us + span.end_us) / 2
    if share * 1700 > 8 * len(name):
        axes.text(x, y, name, ha="center", va="center", color="white", fontsize=6.5, clip_on=True)
    else:
        axes.text(x, y + 0.23, name, ha="left", va="bottom", rotation=25, rotation_mode="anchor", color="#333", fontsize=6)
