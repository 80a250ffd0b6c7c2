"""Finds the placement with the least predicted lookup time. Plain Python over each table's few distinct counts.

Rows go by the bytes that lookups move for them, per byte that they take: the first are hot, the next warm, the rest cold. No
other order is better, whatever the links' speeds, but for the one row at which a tier ends. What is left to choose is how much
is hot. A row made hot relieves the link between GPUs, and takes the room of a warm row on each other GPU. No row lies on
another GPU to relieve the own memory: what is read most lies in its L2, and a far row costs latency (placed so, lookups by a
law of exponent 1.4 took 1.4 times as long as with those rows hot).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dpiframe_core.embedding.frequency import Frequencies, frequencies, frequency_ranks, in_order
from dpiframe_core.embedding.placement import RANK_BYTES, Links, Placement, TablePlacement, Tiers
from dpiframe_core.embedding.row_counts import Counts, RowCounts
from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.id_groups import id_groups
from dpiframe_core.features.schema import FeatureSchema
from kernels.runtime.cores import usable_cores

_ROUNDED = 1 + 1e-15  # what three roundings take from a count at most, so that a row is not wanted more than itself
_AS_GOOD = 1.0025  # within that more rows are made hot, which need no other GPU; 1 % was too much where the host's link bounds
_MOST_THREADS = 4  # each takes some 20 bytes a row of a table while it sorts
_ROOM = 4096  # ids that a table must have to spare for some of its rows to be in files
Rows = Sequence[int]  # of each table
_Made = TypeVar("_Made")


def place_rows(
    schema: FeatureSchema,
    counts: RowCounts,
    gpus: int,
    hbm_bytes: int,
    links: Links | None = None,
    host_bytes: int | None = None,
) -> Placement:
    """The placement with `hbm_bytes` of each GPU for tables that serves `counts` fastest, as far as the links to other GPUs and
    to the host say by `predicted_links`.

    A row lies no farther than it must: either HBM is full, or it holds all rows, as many as possible on every GPU. Rows are
    exchanged between tiers only within that; to leave room could relieve nothing but the local HBM, and a far row costs
    latency, which no bandwidth tells. Of placements within 0.25 % of the fastest it is the one with the most hot rows. With one
    GPU there are no warm rows. Every table has at least one hot row.

    Args:
        host_bytes: of the host's memory for warm and cold rows; those read least stay in files. None: it holds all. Tables
            whose ids have no room for slots (see `spare_slots`) are held whole.

    Raises:
        InputError: counts of another schema, no GPU, or too little HBM for one row of each table (and for the ranks of tables
            that are not in the order of falling frequency); or too little host memory for the warm rows.
    """
    counts.check(schema)
    if gpus < 1:
        raise InputError("gpus", gpus, "at least 1")
    scales = sum(t.scale_bytes for t in schema.tables)
    if sum(t.bytes_used for t in schema.tables) <= hbm_bytes:
        return Placement(gpus, tuple(TablePlacement(t.name, t.rows, t.rows, t.rows) for t in schema.tables), cold_reads=0.0)
    reads = [counts.tables[t.name] for t in schema.tables]
    ranked = sum(RANK_BYTES * t.rows for t, ordered in zip(schema.tables, _each(in_order, reads), strict=True) if not ordered)
    links = links or Links()
    room = hbm_bytes - scales - ranked
    row_bytes = tuple(t.row_bytes for t in schema.tables)
    if room < sum(row_bytes):
        need = f"{sum(row_bytes)} for a row of each of {len(row_bytes)} tables, {ranked} for ranks, {scales} for scales"
        got = f"{hbm_bytes / 2**30:.3g}, {hbm_bytes} bytes"
        raise InputError.worded("hbm_gib", got, f"at least {hbm_bytes - room + sum(row_bytes)} bytes: {need}")
    distinct = {id(own): own for own in reads}  # an estimate's tables have few
    found = dict(zip(distinct, _each(frequencies, distinct.values()), strict=True))
    by_table = tuple(found[id(own)] for own in reads)
    search = _Search(tuple(t.rows for t in schema.tables), row_bytes, by_table, gpus, room, links)
    hot, warm = search.best()
    held = search.rows if host_bytes is None else search.held(hot, _least_held(schema, warm), host_bytes)
    each = zip(schema.tables, hot, warm, held, strict=True)
    placed = [TablePlacement(t.name, t.rows, h, w, t.rows - k) for t, h, w, k in each]
    split = [(p.table, own) for p, own in zip(placed, reads, strict=True) if p.hot < p.rows]
    ranks = zip((name for name, _ in split), _each(frequency_ranks, (own for _, own in split)), strict=True)
    own_ranks = {name: own for name, own in ranks if own is not None}
    return Placement(gpus, tuple(placed), own_ranks, search.reads_behind(warm) / counts.rows)


def _least_held(schema: FeatureSchema, warm: Rows) -> Rows:
    """Where the ranks of each table end that memory has to hold."""
    may_be_in_files = {i for g in id_groups(schema) if g.spare > max(g.rows, _ROOM) for i in g.tables}
    return [w if i in may_be_in_files else t.rows for i, (t, w) in enumerate(zip(schema.tables, warm, strict=True))]


def _each(function: Callable[[Counts], _Made], arrays: Iterable[Counts]) -> list[_Made]:
    """NumPy frees the interpreter while it counts and sorts."""
    with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as pool:
        return list(pool.map(function, arrays))


@dataclass(frozen=True, eq=False)
class _Search:
    """The tables, each by its rows, the bytes of one, and how often they are read."""

    rows: Rows
    row_bytes: Rows
    reads: tuple[Frequencies, ...]
    gpus: int
    room: int
    links: Links

    def best(self) -> tuple[Rows, Rows]:
        """Where the hot and the warm rows of each table end."""
        least = sum(self.row_bytes)
        if self.gpus == 1:
            return self._tiers(self.room)
        # More hot bytes: the peers' link does less, the host's more. The least for which the peers' is not the
        # busiest, or one less; but not so few that rows could be nearer.
        first = _last(least, self.room, lambda hot: list(self._tiers(hot)[1]) == list(self.rows))
        crossed = 1 + _last(first - 1, self.room, lambda hot: self._peer_is_busiest(self._tiers(hot)))
        seconds, hot = min((self._seconds(hot), hot) for hot in {max(first, crossed - 1), min(crossed, self.room)})
        return self._tiers(_last(hot, self.room, lambda more: self._seconds(more) <= seconds * _AS_GOOD))

    def held(self, hot: Rows, least: Rows, room: int) -> Rows:
        """Where the rows of each table end that the host's memory holds behind the hot ones, at least `least`."""
        need = self._cost(hot, least, 1)
        if need > room:
            what = "small tables" if self.gpus == 1 else "rows of other GPUs and for small tables"
            raise InputError.worded("host_gib", f"{room / 2**30:.3g}, {room} bytes", f"at least {need} bytes for {what}")
        return self._filled(hot, least, 1, room)

    def reads_behind(self, ends: Rows) -> int:
        """Of all that were counted, those of each table's rows from a rank on."""
        each = zip(self.reads, self.rows, ends, strict=True)
        return sum(f.reads_of(rows) - f.reads_of(end) for f, rows, end in each)

    def _tiers(self, hot_bytes: int) -> tuple[Rows, Rows]:
        """With so many bytes for hot rows, and the rest of the room for warm ones."""
        hot = self._filled([0] * len(self.rows), [1] * len(self.rows), 1, hot_bytes)
        left = self.room - self._cost([0] * len(hot), hot, 1)
        return hot, hot if self.gpus == 1 else self._filled(hot, hot, self.gpus, left)

    def _filled(self, start: Rows, least: Rows, gpus: int, room: int) -> Rows:
        """The rows of each table up to which a tier goes that begins at `start`, lies on `gpus` GPUs and has `room` bytes on
        each; no table ends before `least`. No further row fits."""
        if self._cost(start, self.rows, gpus) <= room:
            return self.rows
        fits = bisect_left(self.wants, True, key=lambda want: self._cost(start, self._wanted(want, least), gpus) <= room)
        ends = list(self._wanted(self.wants[fits], least))  # all that are wanted more than this, and more than the next do not
        left = room - self._cost(start, ends, gpus)
        alike = self._wanted(self.wants[fits - 1], least) if fits else self.rows
        for most in (alike, self.rows):  # rows that are wanted alike, then any that is small enough
            for i in sorted(range(len(ends)), key=lambda i: -self._want(i, ends[i])):
                held = -(-(ends[i] - start[i]) // gpus)
                end = min(most[i], start[i] + (held + left // self.row_bytes[i]) * gpus)
                left -= (-(-(end - start[i]) // gpus) - held) * self.row_bytes[i]
                ends[i] = end
        return ends

    def _wanted(self, want: float, least: Rows) -> Rows:
        """The rows of each table that are wanted more than that, at least `least`."""
        each = zip(least, self.reads, self.row_bytes, self.cold_s, strict=True)
        return [max(few, f.rows_above(math.floor(want * b / s * _ROUNDED))) for few, f, b, s in each]

    def _want(self, table: int, rank: int) -> float:
        """Seconds that its reads would take in the host, for each byte of the row; behind the last one less than any."""
        if rank >= self.rows[table]:
            return -1.0
        return self.reads[table].count_at(rank) * self.cold_s[table] / self.row_bytes[table]

    @cached_property
    def cold_s(self) -> Sequence[float]:
        """Of each table, seconds that a read of a row takes in the host's memory, if no row lies on two GPUs."""
        left = max(0, sum(n * b for n, b in zip(self.rows, self.row_bytes, strict=True)) - self.gpus * self.room)
        return [self.links.host_s(b, left) for b in self.row_bytes]

    @cached_property
    def wants(self) -> npt.NDArray[np.float64]:
        """float64[k], rising: what `_want` gives, of all rows of all tables."""
        each = zip(self.reads, self.cold_s, self.row_bytes, strict=True)
        return np.unique(np.concatenate([f.negated * -s / b for f, s, b in each]))

    def _cost(self, start: Rows, ends: Rows, gpus: int) -> int:
        return sum(b * -(-(end - first) // gpus) for b, first, end in zip(self.row_bytes, start, ends, strict=True))

    def _busy(self, tiers: tuple[Rows, Rows]) -> Tiers:
        """How long each link is for all reads that were counted."""
        hot = warm = cold_s = 0.0
        spread = self._cost(tiers[1], self.rows, 1)
        for f, size, rows, first, last in zip(self.reads, self.row_bytes, self.rows, *tiers, strict=True):
            upto, beyond = f.reads_of(first), f.reads_of(last)
            hot += self.links.moved(size) * upto
            warm += self.links.moved(size) * (beyond - upto)
            cold_s += self.links.host_s(size, spread) * (f.reads_of(rows) - beyond)
        return self.links.seconds(self.gpus, hot, warm, cold_s)

    def _seconds(self, hot_bytes: int) -> float:
        return max(self._busy(self._tiers(hot_bytes))[1:])

    def _peer_is_busiest(self, tiers: tuple[Rows, Rows]) -> bool:
        _, peer, host = self._busy(tiers)
        return peer > host


def _last(low: int, high: int, true: Callable[[int], bool]) -> int:
    """The last of low, .., high for which `true` is, if it is for all before; `low` if it is for none."""
    if true(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if true(middle) else (low, middle)
    return low
