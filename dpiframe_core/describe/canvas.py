"""A page that matplotlib draws on, in pixels from its upper left corner: rectangles, lines, text, the legend of modules."""

from collections.abc import Mapping, Sequence
from math import floor
from pathlib import Path

from dpiframe_core.describe.label_text import text_width

INK, FAINT = "#22262B", "#6B7280"
_DPI = 100  # a pixel of the page is one of the PNG
_ROUND = 4.0
_SWATCH, _LEGEND, _LEGEND_ROW = 14.0, 11.0, 22.0


class Canvas:
    """One picture. The later is drawn over the earlier."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self._figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str = "none", edge: str = "none",
                  rounded: float = _ROUND) -> None:  # fmt: skip
        from matplotlib.patches import FancyBboxPatch

        style = f"round,pad=0,rounding_size={min(rounded, width / 2, height / 2)}"
        self._axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=fill, ec=edge, lw=1))

    def stripes(self, x: float, y: float, width: float, height: float, fills: Sequence[str]) -> None:
        """A bar of several colours, one below the other."""
        part = height / len(fills)
        for i, fill in enumerate(fills):
            self.rectangle(x, y + i * part, width, part, fill, rounded=1.5 if len(fills) == 1 else 0)

    def text(self, x: float, y: float, text: str, size: float, color: str = INK, *, across: str = "center", bold: bool = False,
             degrees: float = 0) -> None:  # fmt: skip
        """across: where in the text x is, "left", "center" or "right"; y is its middle."""
        self._axes.text(
            x, y, text, fontsize=size * 72 / _DPI, color=color, ha=across, va="center_baseline" if not degrees else "center",
            weight="bold" if bold else "normal", family="DejaVu Sans", rotation=degrees, rotation_mode="anchor",
            parse_math=False,
        )  # fmt: skip

    def line(self, points: Sequence[tuple[float, float]], color: str = INK, *, dashed: bool = False, wide: float = 1.2) -> None:
        """Along the points, its corners rounded."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        points = [(floor(x) + 0.5, floor(y) + 0.5) for x, y in points]  # the middle of a pixel, so that lines are sharp
        corners, codes = [points[0]], [Outline.MOVETO]
        for before, at, after in zip(points, points[1:], points[2:], strict=False):
            corners += [_towards(at, before), at, _towards(at, after)]
            codes += [Outline.LINETO, Outline.CURVE3, Outline.CURVE3]
        outline = Outline([*corners, points[-1]], [*codes, Outline.LINETO])
        style = (0, (4, 2.2)) if dashed else "-"
        self._axes.add_patch(PathPatch(outline, fc="none", ec=color, lw=wide * 72 / _DPI, ls=style, capstyle="butt"))

    def arrow(self, points: Sequence[tuple[float, float]], *, dashed: bool = False) -> None:
        """As `line`, with a head that points down at its end."""
        from matplotlib.patches import Polygon

        *way, (x, y) = points
        x = floor(x) + 0.5
        self.line([*way, (x, y - 6)], dashed=dashed)
        self._axes.add_patch(Polygon([(x - 3.6, y - 7.5), (x + 3.6, y - 7.5), (x, y - 0.5)], fc=INK, ec="none"))

    def legend(self, x: float, y: float, room: float, colors: Mapping[str, str]) -> None:
        """The modules' names, each beside its colour."""
        for (name, color), (dx, row) in zip(colors.items(), _flow(list(colors), room), strict=True):
            self.rectangle(x + dx, y + row * _LEGEND_ROW + 4, _SWATCH, _SWATCH, color, rounded=3)
            self.text(x + dx + _SWATCH + 6, y + row * _LEGEND_ROW + 11, name, _LEGEND, across="left")

    def save(self, path: str | Path) -> None:
        """The file's ending picks the format (PNG, SVG, PDF)."""
        self._figure.savefig(path)


def legend_height(names: Sequence[str], room: float) -> float:
    return _LEGEND_ROW * (1 + max((row for _, row in _flow(names, room)), default=-1))


def _flow(names: Sequence[str], room: float) -> list[tuple[float, int]]:
    """The x and the row of each entry of a legend."""
    places, x, row = list[tuple[float, int]](), 0.0, 0
    for name in names:
        width = _SWATCH + 6 + text_width(name, _LEGEND) + 18
        if x and x + width > room:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += width
    return places


def _towards(corner: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    (x, y), (x1, y1) = corner, other
    length = max(abs(x1 - x), abs(y1 - y), 1e-9)
    part = min(_ROUND, length / 2) / length
    return x + (x1 - x) * part, y + (y1 - y) * part
