"""Where the names of a row of bars are written so that none lies on another: in the bar, else in the free room right of it,
else at a slant above it, moved aside as far as the names beside it need. Plain data, in pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dpiframe_core.describe.label_text import text_width

SIZE = 10.5  # of letters
SLOPE = 0.7071  # sine and cosine of the slant
_AROUND = 4.0  # on either side of a name
SPACING = SIZE * 1.3 / SLOPE  # along the row, between names at a slant


@dataclass(frozen=True, slots=True)
class Bar:
    """From `left` to `right` along its row."""

    left: float
    right: float
    text: str

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2


@dataclass(frozen=True, slots=True)
class BarLabel:
    """The name of bar number `bar`. x: its middle if it stands `in` the bar, else where it begins."""

    bar: int
    place: Literal["in", "beside", "above"]
    x: float


def bar_labels(bars: Sequence[Bar], room: float) -> tuple[BarLabel, ...]:
    """Of bars from left to right, none on another, that end before `room`.

    Where names at a slant are more than the row takes, the shortest bars get none.
    """
    found, above = list[BarLabel](), list[int]()
    for i, bar in enumerate(bars):
        width = text_width(bar.text, SIZE) + 2 * _AROUND
        free = bars[i + 1].left if i + 1 < len(bars) else room
        if width <= bar.right - bar.left:
            found.append(BarLabel(i, "in", bar.middle))
        elif bar.right + width <= free:
            found.append(BarLabel(i, "beside", bar.right + _AROUND))
        else:
            above.append(i)
    reach = {i: text_width(bars[i].text, SIZE) * SLOPE + SPACING for i in above}
    most = int((room - max(reach.values(), default=0)) / SPACING)
    above = sorted(sorted(above, key=lambda i: bars[i].left - bars[i].right)[:most])
    places = _spread([bars[i].middle for i in above], [room - reach[i] for i in above])
    found += [BarLabel(i, "above", x) for i, x in zip(above, places, strict=True)]
    return tuple(sorted(found, key=lambda label: label.bar))


def headroom(bars: Sequence[Bar], labels: Sequence[BarLabel]) -> float:
    """How far the names at a slant reach up."""
    return max((text_width(bars[n.bar].text, SIZE) * SLOPE + SIZE for n in labels if n.place == "above"), default=0.0)


def _spread(wanted: Sequence[float], most: Sequence[float]) -> list[float]:
    """Places in order and `SPACING` apart, near the wanted ones (whose neighbours that are too close are moved equally far to
    either side) and nowhere beyond `most`.
    """
    groups: list[list[float]] = []  # of what is wanted less what comes before it takes: the mean of a group is its first place
    for i, x in enumerate(wanted):
        groups.append([x - i * SPACING])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1].extend(last)
    places = [max(0.0, _mean(group)) for group in groups for _ in group]
    places = [x + i * SPACING for i, x in enumerate(places)]
    limit = float("inf")
    for i in range(len(places) - 1, -1, -1):
        places[i] = limit = min(places[i], most[i], limit)
        limit -= SPACING
    return places


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
