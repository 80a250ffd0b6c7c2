"""Draws the timeline of a request: a bar for each span, in rows by stream."""

from pathlib import Path

from dpiframe_core.describe.bar_labels import SIZE
from dpiframe_core.describe.canvas import FAINT, INK, Canvas, legend_height
from dpiframe_core.describe.label_text import text_width
from dpiframe_core.describe.module_colors import HOST, module_colors, parts, text_color
from dpiframe_core.describe.timeline_layout import Text, TimelineLayout, timeline_layout
from dpiframe_core.describe.trace import Trace

_MARGIN, _TITLE = 22.0, 42.0
_DEGREES = 45
_TICK = "#E5E7EB"


def plot_trace(trace: Trace, path: str | Path) -> None:
    """Writes the picture; the file's ending picks the format (PNG, SVG, PDF)."""
    f = trace.facts
    title = f"{f['model']} ({f['architecture']}), {f['rows']} rows, {f['precision']} on {f['gpu'] or f['device']}"
    draw_timeline(title, timeline_layout(trace), module_colors(s.module for s in trace.spans)).save(path)


def draw_timeline(title: str, layout: TimelineLayout, colors: dict[str, str]) -> Canvas:
    bottom = _MARGIN + _TITLE + layout.height
    canvas = Canvas(layout.width + 2 * _MARGIN, bottom + 14 + legend_height(list(colors), layout.width) + _MARGIN / 2)
    canvas.text(_MARGIN, _MARGIN + 8, title, 15, across="left", bold=True)
    x, y = _MARGIN, _MARGIN + _TITLE
    for at, top, low in layout.ticks:
        canvas.line([(x + at, y + top), (x + at, y + low)], _TICK, wide=1)
    for leader in layout.leaders:
        canvas.line([(x + px, y + py) for px, py in leader], FAINT, wide=0.8)
    for bar in layout.bars:
        fills = [colors[m] for m in parts(bar.module)] or [HOST]
        canvas.stripes(x + bar.x, y + bar.y, max(bar.width - 0.6, 0.6), bar.height, fills)
    for text in layout.texts:
        _write(canvas, text, x + text.x, y + text.y, colors)
    canvas.legend(_MARGIN, bottom + 14, layout.width, colors)
    return canvas


def _write(canvas: Canvas, text: Text, x: float, y: float, colors: dict[str, str]) -> None:
    match text.place:
        case "in":
            fills = [colors[m] for m in parts(text.module)] or [HOST]
            if len(fills) > 1:
                wide = text_width(text.text, SIZE) + 6
                canvas.rectangle(x - wide / 2, y - 7.5, wide, 15, "white")
            canvas.text(x, y, text.text, SIZE, text_color(fills[0] if len(fills) == 1 else "#FFFFFF"))
        case "above":
            canvas.text(x + 1, y - 4, text.text, SIZE, across="left", degrees=_DEGREES)
        case "row":
            canvas.text(x, y, text.text, SIZE, INK if text.text != "us" else FAINT, across="right")
        case "tick":
            canvas.text(x, y, text.text, SIZE, FAINT)
        case _:
            canvas.text(x, y, text.text, 12 if text.place == "title" else SIZE, across="left", bold=text.place == "title")
