"""The boxes of one launch: an operator with its name and what it computes, or a frame around the several that it has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpiframe_core.describe.label_text import text_width, wrapped
from dpiframe_core.describe.plan_launches import Launch, Operator

NAME, DETAIL = 12.0, 10.5  # sizes of letters, in pixels
LINE = 1.3  # a line, by the size of its letters
_TEXT_WIDTH, _LEAST_WIDTH = 156.0, 84.0  # what is longer is broken into lines
_PAD_X, _PAD_Y = 9.0, 5.0  # around the text
_BESIDE, _MOST_BESIDE = 6.0, 4  # operators of one launch: their distance, and how many lie in a row
_FRAME, _TITLE = 7.0, 20.0


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels; y grows downwards. name, detail: the lines in it. module, launch: whose it is."""

    x: float
    y: float
    width: float
    height: float
    name: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()
    module: str = ""
    launch: str = ""

    def moved(self, x: float, y: float) -> "Box":
        return replace(self, x=self.x + x, y=self.y + y)


@dataclass(frozen=True, slots=True)
class LaunchBox:
    """A launch at x = y = 0. frame: all of it; members: its operators."""

    frame: Box
    members: tuple[Box, ...]

    def moved(self, x: float, y: float) -> "LaunchBox":
        return LaunchBox(self.frame.moved(x, y), tuple(m.moved(x, y) for m in self.members))


def launch_boxes(plan: Sequence[Launch]) -> dict[str, LaunchBox]:
    """Of each launch by its name; all operators equally wide."""
    texts = [_operator(o) for launch in plan for o in launch.operators]
    width = max([_LEAST_WIDTH, *(box.width for box in texts)])
    return {launch.name: _launch(launch, width) for launch in plan}


def _operator(operator: Operator) -> Box:
    name, detail = wrapped(operator.name, NAME, _TEXT_WIDTH, bold=True), wrapped(operator.detail, DETAIL, _TEXT_WIDTH)
    widths = [text_width(t, NAME, bold=True) for t in name] + [text_width(t, DETAIL) for t in detail]
    height = LINE * (NAME * len(name) + DETAIL * len(detail)) + 2 * _PAD_Y
    return Box(0, 0, max(widths) + 2 * _PAD_X, height, name, detail, operator.module)


def _launch(launch: Launch, width: float) -> LaunchBox:
    """Operators that need nothing of one another side by side, the ones after them below."""
    boxes = [replace(_operator(o), width=width, launch=launch.name) for o in launch.operators]
    if len(boxes) == 1:
        return LaunchBox(boxes[0], tuple(boxes))
    members, y, wide = list[Box](), _TITLE, 0.0
    for step in sorted({o.step for o in launch.operators}):
        at_once = [box for box, o in zip(boxes, launch.operators, strict=True) if o.step == step]
        for first in range(0, len(at_once), _MOST_BESIDE):
            beside = at_once[first : first + _MOST_BESIDE]
            high = max(box.height for box in beside)
            members += [replace(box, x=_FRAME + i * (width + _BESIDE), y=y, height=high) for i, box in enumerate(beside)]
            y += high + _BESIDE
            wide = max(wide, members[-1].x + width)
    frame = Box(0, 0, wide + _FRAME, y - _BESIDE + _FRAME, (f"{launch.name}: one launch",), launch=launch.name)
    return LaunchBox(frame, tuple(members))
