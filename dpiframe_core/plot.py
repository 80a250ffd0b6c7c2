"""Draws a bundle's plan as a picture: operators by level and stream, arrows for data, dashed where an event crosses streams."""

from pathlib import Path

from dpiframe_core.bundle import Bundle
from dpiframe_core.fusion import fuse
from dpiframe_core.model_graph import model_graph
from dpiframe_core.schedule import breadth_first

_COLOURS = ("#4C78A8", "#F58518", "#54A24B", "#B279A2", "#E45756", "#72B7B2", "#9D755D", "#BAB0AC")
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
