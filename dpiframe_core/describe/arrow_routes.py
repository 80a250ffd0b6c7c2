"""The way of every arrow of a plan over its grid: down from its launch, along the gaps between rows and the channels between
columns, into the top of the launch that reads. No arrow crosses a launch, and none lies on one from elsewhere.

Decided before any size is known: which gap and channel an arrow takes, and on which track of it. The tracks then say how wide
gaps and channels must be.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

PORT = 12.0  # between the arrows that enter a launch
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Cell:
    """A launch's place. Bands lie side by side, so that `column` counts on through them and `row` begins anew in each."""

    band: int
    column: int
    row: int


@dataclass(frozen=True, slots=True)
class Route:
    """An arrow. Gap k is above row k, channel k left of column k. channel: None if it goes down in its own column."""

    source: str
    target: str
    leaves: int
    enters: int
    channel: int | None


def routes(cells: Mapping[str, Cell], edges: Sequence[tuple[str, str]]) -> tuple[Route, ...]:
    """One for each edge."""
    taken = {(c.column, c.row) for c in cells.values()}
    first = {band: min(c.column for c in cells.values() if c.band == band) for band in {c.band for c in cells.values()}}
    out = []
    for source, target in edges:
        a, b = cells[source], cells[target]
        channel: int | None
        if a.band != b.band:
            channel = first[b.band]
        elif not any((a.column, row) in taken for row in range(a.row + 1, b.row)):
            channel = None
        else:
            channel = b.column + (b.column < a.column)
        out.append(Route(source, target, a.row + 1, b.row, channel))
    return tuple(out)


def tracks(spans: Mapping[_K, tuple[float, float]], apart: float) -> dict[_K, int]:
    """The first track of each span on which none comes nearer to it than `apart`."""
    ends: list[float] = []
    found = {}
    for key, (low, high) in sorted(spans.items(), key=lambda item: item[1]):
        track = next((i for i, end in enumerate(ends) if end + apart <= low), len(ends))
        ends[track : track + 1] = [high]
        found[key] = track
    return found


def channel_tracks(found: Sequence[Route]) -> dict[tuple[int, str], int]:
    """(channel, source) -> its track there; the arrows of one source share it."""
    gaps: dict[int, dict[str, tuple[float, float]]] = {}
    for r in found:
        if r.channel is not None:
            sources = gaps.setdefault(r.channel, {})
            low, high = sources.get(r.source, (r.enters, r.enters))
            sources[r.source] = (min(low, r.leaves, r.enters), max(high, r.leaves, r.enters))
    return {(channel, source): t for channel, sources in gaps.items() for source, t in tracks(sources, 1).items()}


def ports(found: Sequence[Route], cells: Mapping[str, Cell], center: Mapping[str, float], arrives: Mapping[Route, float],
          width: Mapping[str, float]) -> dict[Route, float]:  # fmt: skip
    """Where each arrow enters its launch, in the order in which they come from left to right.

    The middle is for the arrow that comes straight from above, and left free where another passes or leaves there.
    """
    lowest = {(cells[r.source].column, r.leaves): r.source for r in found}
    for r in found:
        if r.channel is None:
            lowest |= {(cells[r.source].column, gap): r.source for gap in range(r.leaves, r.enters + 1)}
    at: dict[Route, float] = {}
    for target in dict.fromkeys(r.target for r in found):
        cell, middle = cells[target], center[target]
        entering = sorted((r for r in found if r.target == target), key=lambda r: arrives[r])
        straight = [r for r in entering if r.channel is None and cells[r.source].column == cell.column]
        at |= dict.fromkeys(straight, middle)
        rest = [r for r in entering if r not in straight]
        step = min(PORT, (width[target] / 2 - 8) / max(1, len(rest)))
        if not straight and (cell.column, cell.row) not in lowest:
            at |= {r: middle + step * (i - (len(rest) - 1) / 2) for i, r in enumerate(rest)}
        else:
            left = sum(arrives[r] < middle for r in rest)
            at |= {r: middle + step * (i - left + (i >= left)) for i, r in enumerate(rest)}
    return at


def gap_spans(found: Sequence[Route], center: Mapping[str, float], arrives: Mapping[Route, float],
              enters_at: Mapping[Route, float]) -> dict[int, dict[str, tuple[float, float]]]:  # fmt: skip
    """Gap -> source -> from where to where its arrows run along it; absent: straight through."""
    xs: dict[tuple[int, str], set[float]] = {}
    for r in found:
        xs.setdefault((r.enters, r.source), set()).update((arrives[r], enters_at[r]))
        if r.channel is not None:
            xs.setdefault((r.leaves, r.source), set()).update((center[r.source], arrives[r]))
    spans: dict[int, dict[str, tuple[float, float]]] = {}
    for (gap, source), found_xs in xs.items():
        if len(found_xs) > 1:
            spans.setdefault(gap, {})[source] = (min(found_xs), max(found_xs))
    return spans
