"""Panels of lines and bars, drawn alike in every picture: one colour a system, one legend below."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.systems.names import known_as

COLOURS = {
    "dpiframe": "#D1495B", "dpiframe-in-place": "#9A2E3D", "dpiframe-pinned": "#E8A0A8",
    "eager": "#8D99AE", "stacked-eager": "#5C677D", "compile": "#7EB09B",
    "compile-captured": "#2E7D5B", "compile-mapped": "#14532D",
    "fbgemm": "#8AB6D6", "fbgemm-captured": "#2B6CA3", "stacked-captured": "#3D4452",
}  # fmt: skip
SHADES = ("#F2C4C9", "#E8959E", "#DC6573", "#BE3A4C", "#7F2433")  # light to dark: few rows to many
LANES = ("#EDB6BC", "#DE7F8A", "#D1495B", "#9A2E3D")
STAGES = (
    "#C9CED8", "#8D99AE", "#5C677D", "#2B6CA3", "#8AB6D6", "#2E7D5B", "#7EB09B", "#E9B44C", "#D1495B", "#E8A0A8", "#B279A2",
    "#9D755D", "#E5DED3",
)  # fmt: skip
OTHERS = ("#8D99AE", "#8AB6D6", "#2B6CA3", "#7EB09B", "#2E7D5B", "#E9B44C", "#B279A2", "#9D755D")


def grid(title: str, columns: int, *, rows: int = 1, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * columns, height * rows + 0.7), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for a in axes:
        a.spines[["top", "right"]].set_visible(False)
        a.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        a.set_axisbelow(True)
        a.tick_params(labelsize=8)
    return figure, axes


def lines(
    axes: Axes, lines: Mapping[str, Mapping[float, float]], label: str, *, log: bool = True, also_at: Sequence[float] = ()
) -> None:
    """One line a name over common x values, evenly spaced: they grow by factors. also_at: x values without a point."""
    at = sorted({x for line in lines.values() for x in line} | set(also_at))
    for i, (name, line) in enumerate(lines.items()):
        ours = name.startswith("dpiframe")
        axes.plot(
            [at.index(x) for x in sorted(line)], [line[x] for x in sorted(line)], label=name, marker="o", markersize=3.5,
            linewidth=2.2 if ours else 1.3, color=COLOURS.get(known_as(name), OTHERS[i % len(OTHERS)]),
            linestyle="--" if name.endswith(")") else "-", zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_xticks(range(len(at)), [f"{x:g}" if x < 10_000 else f"{x / 1024:g}k" for x in at])
    axes.set_xlim(-0.2, len(at) - 0.8)
    axes.set_xlabel(label, fontsize=8)
    if log and lines:
        log_scale(axes)


def log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def same_heights(panels: Sequence[Axes]) -> None:
    """One scale for all, so that panels can be compared."""
    limits = [a.get_ylim() for a in panels]
    for a in panels:
        a.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One for all panels, below them. None where nothing was drawn."""
    handles = {label: handle for a in axes for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    if not handles:
        return
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), int(figure.get_figwidth() / (0.6 + 0.08 * max(map(len, handles))))),
        frameon=False,
        fontsize=8,
    )


def bars(
    axes: Axes, groups: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], form: str, order: Sequence[str] = ()
) -> None:
    """Groups of bars, one colour a name, each with its figure above it. order: names that come first, and keep their place."""
    names = list(dict.fromkeys([*order, *(n for g in groups.values() for n in g)]))
    width = 0.84 / max(1, len(names))
    for i, name in enumerate(names):
        at = [(j, g[name]) for j, g in enumerate(groups.values()) if name in g]
        places = [j + (i - (len(names) - 1) / 2) * width for j, _ in at]
        drawn = axes.bar(places, [v for _, v in at], width * 0.94, label=name, color=colours.get(name, OTHERS[i % len(OTHERS)]))
        axes.bar_label(drawn, fmt=form, fontsize=6, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))


def stacked(axes: Axes, named: Mapping[str, Mapping[str, float]]) -> None:
    """A horizontal bar a name, of parts in the order of the first, one colour a part, its sum behind it."""
    places = range(len(named), 0, -1)
    parts = list(dict.fromkeys(part for values in named.values() for part in values))
    left = [0.0] * len(named)
    for i, part in enumerate(parts):
        widths = [values.get(part, 0.0) for values in named.values()]
        axes.barh(places, widths, 0.8, left=left, label=part, color=STAGES[i % len(STAGES)])
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        axes.text(total, place, f" {total:.0f}", fontsize=6, va="center")
    axes.set_yticks(places, list(named))
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.grid(visible=False, axis="y")
