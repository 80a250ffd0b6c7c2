"""Where everything of a timeline's picture lies, in pixels from its upper left corner: plain data; `timeline_plot` draws it."""

from dataclasses import dataclass

from dpiframe_core.describe.bar_labels import SIZE, Bar, bar_labels, headroom
from dpiframe_core.describe.trace import Trace

WIDTH = 1500.0
_LEFT, _RIGHT = 110.0, 30.0  # of the bars: the rows' names, and a margin
_BAR, _APART = 22.0, 9.0  # a bar's height, between rows
_LEADER, _MOST_LEADER, _STEEP = 7.0, 40.0, 0.15  # from a bar to its name above: at least, at most, by how far aside that is
_TITLE, _AXIS, _SECTIONS = 30.0, 24.0, 18.0
_MOST_TICKS = 12


@dataclass(frozen=True, slots=True)
class DrawnBar:
    """A span. module: `deep+fm` if it belongs to several."""

    x: float
    y: float
    width: float
    height: float
    module: str


@dataclass(frozen=True, slots=True)
class Text:
    """place: "in" its bar, "beside" or "above" it (x where it begins, at a slant), or of the page: "row", "tick" or "title"."""

    x: float
    y: float
    text: str
    place: str
    module: str = ""


@dataclass(frozen=True, slots=True)
class TimelineLayout:
    """leaders: from a bar to its name above it. ticks: lines of the same time, x and from y to y."""

    width: float
    height: float
    bars: tuple[DrawnBar, ...]
    texts: tuple[Text, ...]
    leaders: tuple[tuple[tuple[float, float], tuple[float, float]], ...]
    ticks: tuple[tuple[float, float, float], ...]


def timeline_layout(trace: Trace) -> TimelineLayout:
    """A section below the other, each with its own scale of time, a row below the other."""
    bars, texts, leaders, ticks, y = [], [], [], [], 0.0
    for section in trace.sections:
        rows = trace.rows(section)
        whole = max(s.end_us for spans in rows.values() for s in spans)
        texts.append(Text(0, y + 10, f"{section}: {whole:.1f} us", "title"))
        y += _TITLE
        top, scale = y, (WIDTH - _LEFT - _RIGHT) / whole
        for row, spans in rows.items():
            placed = [Bar(s.start_us * scale, s.end_us * scale, str(s.details.get("node", s.name))) for s in spans]
            labels = bar_labels(placed, WIDTH - _LEFT)
            aside = [abs(n.x - placed[n.bar].middle) for n in labels if n.place == "above"]
            leader = min(_MOST_LEADER, max([_LEADER, *(_STEEP * a for a in aside)]))
            y += headroom(placed, labels) + (leader if aside else 0)
            for bar, s in zip(placed, spans, strict=True):
                bars.append(DrawnBar(_LEFT + bar.left, y, bar.right - bar.left, _BAR, s.module))
            for label in labels:
                bar, module = placed[label.bar], spans[label.bar].module
                high = y - leader if label.place == "above" else y + _BAR / 2
                texts.append(Text(_LEFT + label.x, high, bar.text, label.place, module))
                if label.place == "above":
                    leaders.append(((_LEFT + bar.middle, y), (_LEFT + label.x, y - leader)))
            texts.append(Text(_LEFT - 12, y + _BAR / 2, row, "row"))
            unnamed = len(spans) - len(labels)
            if unnamed:
                texts.append(Text(_LEFT - 12, y + _BAR / 2 + SIZE * 1.3, f"{unnamed} without name", "row"))
            y += _BAR + _APART
        for at in tick_times(whole):
            ticks.append((_LEFT + at * scale, top, y))
            texts.append(Text(_LEFT + at * scale, y + 9, f"{at:g}", "tick"))
        texts.append(Text(_LEFT - 12, y + 9, "us", "row"))
        y += _AXIS + _SECTIONS
    return TimelineLayout(WIDTH, y - _SECTIONS, tuple(bars), tuple(texts), tuple(leaders), tuple(ticks))


def tick_times(whole: float) -> list[float]:
    """Round times from 0 to the whole, at most a dozen."""
    step = next(s for s in (m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5)) if whole / s < _MOST_TICKS)
    return [i * step for i in range(int(whole / step) + 1)]
