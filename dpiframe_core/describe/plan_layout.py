"""Where everything of a plan's picture lies, in pixels from its upper left corner: plain data, which `plan_plot` draws.

Streams are columns, levels go down. Operators of one stream and level lie side by side, in the order in which the stream runs
them. A plan that would be too long goes on in a further band beside the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dpiframe_core.describe.arrow_routes import routes
from dpiframe_core.describe.launch_box import Box, launch_boxes
from dpiframe_core.describe.plan_grid import LANE, LEVEL, TOP, cells, grid
from dpiframe_core.describe.plan_launches import Launch

MOST_WIDTH = 1540.0  # what a page shows without scrolling sideways
_WANTED_HEIGHT = 1000.0
_MOST_COLUMNS = 8  # of operators, where streams run several in a level


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text, its middle at x and y."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """points: the corners of its way. crosses: from one stream to another, which takes an event."""

    source: str
    target: str
    points: tuple[tuple[float, float], ...]
    crosses: bool


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """boxes: a box an operator. frames: around the operators of a launch that has several. lanes: a stream in a band."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    frames: tuple[Box, ...]
    lanes: tuple[Box, ...]
    labels: tuple[Label, ...]
    arrows: tuple[Arrow, ...]


def plan_layout(plan: Sequence[Launch]) -> PlanLayout:
    """In as few bands as keep it within a screen's height, as far as a page is wide enough for them."""
    streams = len({launch.stream for launch in plan})
    for beside in range(max(1, _MOST_COLUMNS // streams), 0, -1):
        layout = _in_bands(plan, 1, beside)
        if layout.width <= MOST_WIDTH:
            break
    for bands in range(2, len({launch.level for launch in plan}) + 1):
        if layout.height <= _WANTED_HEIGHT:
            break
        wider = _in_bands(plan, bands, beside)
        if wider.width > MOST_WIDTH:
            break
        layout = wider
    return layout


def _in_bands(plan: Sequence[Launch], bands: int, beside: int) -> PlanLayout:
    at, inside = cells(plan, bands, beside), launch_boxes(plan)
    found = routes(at.of, [(source, launch.name) for launch in plan for source in launch.reads])
    width, height = ({n: getattr(b.frame, side) for n, b in inside.items()} for side in ("width", "height"))
    g = grid(at, found, width, height)
    placed = {
        n: b.moved(g.center[n] - width[n] / 2, g.top[at.of[n].row] + (g.high[at.of[n].row] - height[n]) / 2)
        for n, b in inside.items()
    }
    stream = {launch.name: launch.stream for launch in plan}
    lanes = {
        lane: Box(g.left[k[0]] - LANE, 0, g.right(k[-1]) - g.left[k[0]] + 2 * LANE, g.height) for lane, k in at.lanes.items()
    }
    labels = [Label(box.x + box.width / 2, TOP / 2, f"stream {s}") for (_, s), box in lanes.items()]
    for (band, level), rows in at.levels.items():
        middle = g.top[rows[0]] + g.high[rows[0]] / 2  # of its first row, where no arrow passes
        labels.append(Label(g.left[at.first[band]] - LANE - LEVEL / 3, middle, str(level)))
    return PlanLayout(
        g.width,
        g.height,
        boxes=tuple(m for b in placed.values() for m in b.members),
        frames=tuple(b.frame for b in placed.values() if len(b.members) > 1),
        lanes=tuple(lanes.values()),
        labels=tuple(labels),
        arrows=tuple(Arrow(r.source, r.target, way, stream[r.source] != stream[r.target]) for r, way in g.ways.items()),
    )
