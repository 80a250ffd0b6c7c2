"""Draws a bundle's plan: operators by level and stream, and beside them the waves that a GPU may run instead."""

from collections.abc import Sequence
from pathlib import Path

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.describe.canvas import FAINT, INK, Canvas, legend_height
from dpiframe_core.describe.label_text import text_width
from dpiframe_core.describe.launch_box import DETAIL, LINE, NAME, Box
from dpiframe_core.describe.module_colors import module_colors, text_color
from dpiframe_core.describe.plan_launches import launches
from dpiframe_core.describe.plan_layout import MOST_WIDTH, PlanLayout, plan_layout
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.schedule import breadth_first, sequential
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.model_graph import model_graph

Section = tuple[str, PlanLayout]  # with its title
_MARGIN, _APART, _TITLE, _HEADING = 22.0, 44.0, 34.0, 30.0
_TITLE_SIZE, _HEADING_SIZE, _NOTE_SIZE = 15.0, 12.0, 10.5
_LANE, _FRAME = "#F3F4F6", "#FFFFFF"
_NOTE = (
    "dashed: from another stream, which takes an event    a stream runs a level from left to right    →: widths of what is made"
)


def plot_plan(bundle: Bundle, path: str | Path) -> None:
    """Writes the picture; the file's ending picks the format (PNG, SVG, PDF)."""
    graph, m = place(fuse(model_graph(bundle))), bundle.manifest
    colors = module_colors(n.module for n in graph.nodes)
    draw_plan(f"{m.name} ({m.architecture.type})", plan_sections(graph), colors).save(path)


def plan_sections(graph: Graph) -> list[Section]:
    """The plan on streams; the waves too, where one of them holds several operators."""
    plan, waves = breadth_first(graph), group_waves(graph)
    streams = "1 stream" if plan.streams == 1 else f"{plan.streams} streams"
    sections = [(f"{plan.policy} plan, {streams}", plan_layout(launches(graph, plan)))]
    if any(len(n.attrs.members) > 1 for n in waves.nodes):
        sections.append(("waves, which a GPU runs where they are faster", plan_layout(launches(waves, sequential(waves)))))
    return sections


def section_places(sections: Sequence[Section]) -> list[tuple[float, float]]:
    """Where the headings begin: side by side as far as the page is wide enough, else below."""
    places, x, y, below = list[tuple[float, float]](), _MARGIN, _MARGIN + _TITLE, 0.0
    for title, layout in sections:
        width = _section_width(title, layout)
        if x > _MARGIN and x + width > MOST_WIDTH + _MARGIN:
            x, y = _MARGIN, below + _APART / 2
        places.append((x, y))
        x, below = x + width + _APART, max(below, y + _HEADING + layout.height)
    return places


def draw_plan(title: str, sections: Sequence[Section], colors: dict[str, str]) -> Canvas:
    places = section_places(sections)
    ends = [(x + _section_width(*s), y + _HEADING + s[1].height) for s, (x, y) in zip(sections, places, strict=True)]
    least = max(text_width(title, _TITLE_SIZE, bold=True), text_width(_NOTE, _NOTE_SIZE)) + _MARGIN
    right, bottom = max(least, *(x for x, _ in ends)), max(y for _, y in ends)
    legend = legend_height(list(colors), right - _MARGIN)
    canvas = Canvas(right + _MARGIN, bottom + 14 + legend + 22 + _MARGIN / 2)
    canvas.text(_MARGIN, _MARGIN + 8, title, _TITLE_SIZE, across="left", bold=True)
    for (heading, layout), (x, y) in zip(sections, places, strict=True):
        canvas.text(x, y + 8, heading, _HEADING_SIZE, FAINT, across="left")
        _draw(canvas, layout, colors, x, y + _HEADING)
    canvas.legend(_MARGIN, bottom + 14, right - _MARGIN, colors)
    canvas.text(_MARGIN, bottom + 14 + legend + 12, _NOTE, _NOTE_SIZE, FAINT, across="left")
    return canvas


def _section_width(title: str, layout: PlanLayout) -> float:
    return max(layout.width, text_width(title, _HEADING_SIZE))


def _draw(canvas: Canvas, layout: PlanLayout, colors: dict[str, str], x: float, y: float) -> None:
    for lane in (box.moved(x, y) for box in layout.lanes):
        canvas.rectangle(lane.x, lane.y, lane.width, lane.height, _LANE, rounded=8)
    for label in layout.labels:
        canvas.text(x + label.x, y + label.y, label.text, _NOTE_SIZE, FAINT)
    for frame in (box.moved(x, y) for box in layout.frames):
        canvas.rectangle(frame.x, frame.y, frame.width, frame.height, _FRAME, FAINT, rounded=7)
        canvas.text(frame.x + frame.width / 2, frame.y + 11, frame.name[0], _NOTE_SIZE, INK)
    for arrow in sorted(layout.arrows, key=lambda a: not a.crosses):
        canvas.arrow([(x + px, y + py) for px, py in arrow.points], dashed=arrow.crosses)
    for box in (box.moved(x, y) for box in layout.boxes):
        fill = colors[box.module]
        canvas.rectangle(box.x, box.y, box.width, box.height, fill)
        _write(canvas, box, text_color(fill))


def _write(canvas: Canvas, box: Box, color: str) -> None:
    lines = [(t, NAME) for t in box.name] + [(t, DETAIL) for t in box.detail]
    y = box.y + (box.height - LINE * sum(size for _, size in lines)) / 2
    for text, size in lines:
        canvas.text(box.x + box.width / 2, y + LINE * size / 2, text, size, color, bold=size == NAME)
        y += LINE * size
