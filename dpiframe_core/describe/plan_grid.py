"""Rows and columns of a plan's picture: which launch lies in which cell, and where cells lie once arrows have their room."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dpiframe_core.describe.arrow_routes import Cell, Route, channel_tracks, gap_spans, ports, tracks
from dpiframe_core.describe.plan_launches import Launch

LANE = 8.0  # of a stream's lane around its launches
TOP = 26.0  # above them, for its name
LEVEL = 28.0  # left of a band, for the levels' numbers
_TRACK = 7.0  # from one track of arrows to the next
_CHANNEL, _BAND, _GAP = 22.0, 30.0, 10.0  # between columns, between bands; above and below the first and last row
_ABOVE, _BELOW = 9.0, 15.0  # of tracks in a gap; below them is an arrow's head


@dataclass(frozen=True, slots=True)
class Cells:
    """of: a launch's cell. levels: (band, level) -> its rows. lanes: (band, stream) -> its columns."""

    of: Mapping[str, Cell]
    levels: Mapping[tuple[int, int], range]
    lanes: Mapping[tuple[int, int], range]

    @property
    def rows(self) -> int:
        return 1 + max(c.row for c in self.of.values())

    @property
    def first(self) -> dict[int, int]:
        """Band -> its first column."""
        return {band: min(lane[0] for (b, _), lane in self.lanes.items() if b == band) for band, _ in self.lanes}


def cells(plan: Sequence[Launch], bands: int, beside: int) -> Cells:
    """Levels from top to bottom, cut into bands of nearly equally many rows; a stream that a band lacks has no column there.

    What a stream runs in one level lies from left to right, at most so many `beside` one another, the rest below.
    """
    levels: dict[int, dict[int, list[str]]] = {}
    for launch in plan:
        levels.setdefault(launch.level, {}).setdefault(launch.stream, []).append(launch.name)
    high = {level: max(-(-len(names) // beside) for names in levels[level].values()) for level in sorted(levels)}
    begun = dict(zip(high, accumulate(high.values(), initial=0), strict=False))
    band_of = {level: begun[level] * bands // sum(high.values()) for level in high}
    of, rows, lanes, column = dict[str, Cell](), dict[tuple[int, int], range](), dict[tuple[int, int], range](), 0
    for band in sorted(set(band_of.values())):
        mine = [level for level in high if band_of[level] == band]
        for stream in sorted({s for level in mine for s in levels[level]}):
            most = max(len(levels[level].get(stream, ())) for level in mine)
            lanes[band, stream] = range(column, column + min(most, beside))
            column = lanes[band, stream].stop
        for level in mine:
            row = begun[level] - begun[mine[0]]
            rows[band, level] = range(row, row + high[level])
            for stream, names in levels[level].items():
                left = lanes[band, stream][0]
                of |= {n: Cell(band, left + i % beside, row + i // beside) for i, n in enumerate(names)}
    return Cells(of, rows, lanes)


@dataclass(frozen=True, slots=True)
class Grid:
    """Pixels. left, wide: of a column. top, high: of a row. center: of a launch, which lies in the middle of its cell.

    ways: the corners of each arrow's way, from the lower edge of a launch to the upper edge of another.
    """

    left: Mapping[int, float]
    wide: Mapping[int, float]
    top: Sequence[float]
    high: Sequence[float]
    center: Mapping[str, float]
    ways: Mapping[Route, tuple[tuple[float, float], ...]]

    @property
    def width(self) -> float:
        return max(self.right(k) for k in self.left) + LANE

    def right(self, column: int) -> float:
        return self.left[column] + self.wide[column]

    @property
    def height(self) -> float:
        return self.top[-1]


def grid(at: Cells, found: Sequence[Route], width: Mapping[str, float], height: Mapping[str, float]) -> Grid:
    """width, height: of each launch."""
    columns = sorted({c.column for c in at.of.values()})
    wide = {k: max(width[n] for n, c in at.of.items() if c.column == k) for k in columns}
    high = [max((height[n] for n, c in at.of.items() if c.row == row), default=0) for row in range(at.rows)]
    left, channels = _columns(at, found, wide)
    center = {n: left[c.column] + wide[c.column] / 2 for n, c in at.of.items()}
    turns = {r: center[r.source] if r.channel is None else channels[r.channel, r.source] for r in found}
    enters = ports(found, at.of, center, turns, width)
    on_gap = {gap: tracks(spans, _TRACK) for gap, spans in gap_spans(found, center, turns, enters).items()}
    gaps = [_gap(on_gap.get(gap, {}), edge=gap in (0, at.rows)) for gap in range(at.rows + 1)]
    top = list(accumulate((row + gap for row, gap in zip(high, gaps[1:], strict=True)), initial=TOP + gaps[0]))

    def y(gap: int, source: str) -> float:
        return top[gap] - gaps[gap] + _ABOVE + _TRACK * on_gap.get(gap, {}).get(source, 0)

    ways = {}
    for r in found:
        out, back = at.of[r.source].row, at.of[r.target].row
        begin = (center[r.source], top[out] + (high[out] + height[r.source]) / 2)
        end = (enters[r], top[back] + (high[back] - height[r.target]) / 2)
        turn = [] if r.channel is None else [(begin[0], y(r.leaves, r.source)), (turns[r], y(r.leaves, r.source))]
        over = [(turns[r], y(r.enters, r.source)), (end[0], y(r.enters, r.source))] if turns[r] != end[0] else []
        ways[r] = (begin, *turn, *over, end)
    return Grid(left, wide, top, high, center, ways)


def _columns(
    at: Cells, found: Sequence[Route], wide: Mapping[int, float]
) -> tuple[dict[int, float], dict[tuple[int, str], float]]:
    """The left edge of each column, and the x of each track in the channels between them."""
    left, channels, x = dict[int, float](), dict[tuple[int, str], float](), 0.0
    on_channel, first = channel_tracks(found), at.first.values()
    for column in sorted(wide):
        mine = {source: t for (channel, source), t in on_channel.items() if channel == column}
        x += (_BAND if column else 0.0) if column in first else _CHANNEL / 2
        channels |= {(column, source): x + _TRACK * t for source, t in mine.items()}
        x += _TRACK * max(mine.values(), default=0)
        left[column] = x = x + (LEVEL if column in first else _CHANNEL / 2)
        x += wide[column]
    return left, channels


def _gap(on_tracks: Mapping[str, int], edge: bool) -> float:
    if not on_tracks:
        return _GAP if edge else _ABOVE + _BELOW - 2
    return _ABOVE + _TRACK * max(on_tracks.values()) + _BELOW
