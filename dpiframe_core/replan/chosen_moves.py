"""Which rows are to come into a GPU's memory, and in whose places: those first that spare its links most time for each byte
that is copied. A row that goes is read over a link again: from the host, or from another GPU if it came from there. A row that
only files hold is read over the host's link as well, in its slot; it comes in all tables that its id reads there, or in none.
"""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from dpiframe_core.embedding.hot_rows import HotRows, Ints, Move
from dpiframe_core.embedding.placement import Links
from dpiframe_core.replan.recent_reads import Floats

# A sample is no count: a row has to be read half as often again as the one whose place it takes, and once more than that.
_MARGIN, _ONCE = 1.5, 1.0


class _Pairs(NamedTuple):
    """Of tables that share slots: rows that are to come, of which table each, and the seconds that each spares, falling. They
    replace rows that nobody reads, whichever, then those in `busy`, in this order."""

    tables: Ints
    rows: Ints
    gains: Floats
    free: Ints
    busy: Ints


def chosen_moves(
    counted: Sequence[tuple[Ints, Floats]],
    moving: Sequence[HotRows | None],
    row_bytes: Sequence[int],
    most_bytes: int,
    gpus: int = 1,
    links: Links | None = None,
    together: Sequence[Sequence[int]] = (),
) -> list[Move]:
    """At most so many bytes of rows.

    Args:
        counted: of each table, rows that were read, and how often; others were not. moving: its hot rows, None: they stay.
        gpus: of the host, each of which has a share of the warm rows. together: tables with rows in files that may come, those
            that are read by the same ids.
    """
    links = links or Links()
    sharing: dict[int, dict[int, HotRows]] = {}
    for i, hot in enumerate(moving):
        if hot is not None:
            sharing.setdefault(id(hot.slots), {})[i] = hot
    if not sharing:
        return []
    promoted = {table for tables in together for table in tables}
    pairs = [_pairs(counted, tables, promoted, *_seconds(row_bytes[min(tables)], gpus, links)) for tables in sharing.values()]
    ends = np.cumsum([len(p.rows) for p in pairs])
    sizes = np.repeat([row_bytes[min(tables)] for tables in sharing.values()], np.diff(ends, prepend=0))
    of, rows, gains = (np.concatenate(own) for own in zip(*((p.tables, p.rows, p.gains) for p in pairs), strict=True))
    values = _values(of, rows, gains, sizes, moving, together)
    order = np.lexsort((rows, -values))[: np.count_nonzero(values > 0)]
    taken = np.zeros(len(rows), np.bool_)
    taken[order[np.cumsum(sizes[order]) <= most_bytes]] = True
    found = []
    for tables, p, which in zip(sharing.values(), pairs, np.split(taken, ends[:-1]), strict=True):
        given = _given(tables, p.tables[which], p.free, p.busy)
        for table in tables:
            own = p.tables[which] == table
            if own.any():
                found.append(Move(table, p.rows[which][own], given[own]))
    return whole(found, moving, together)


def _values(
    of: Ints, rows: Ints, gains: Floats, sizes: Ints, moving: Sequence[HotRows | None], together: Sequence[Sequence[int]]
) -> Floats:
    """Seconds that each row spares for a byte; those of a row in files and of all that come with it, or 0 if one would not."""
    values = gains / sizes
    for tables in together:
        own = {table: hot for table in tables if (hot := moving[table]) is not None}
        at = {table: np.flatnonzero(of == table) for table in own}
        at = {table: which[own[table].in_files(rows[which])] for table, which in at.items()}
        every = np.concatenate([*at.values()])
        ids, where = np.unique(rows[every], return_inverse=True)
        comes = np.ones(len(ids), np.bool_)
        for table, hot in own.items():
            comes &= ~hot.in_files(ids) | np.isin(ids, rows[at[table]])
        spared, size = (np.bincount(where, each[every], len(ids)) for each in (gains, sizes))
        values[every] = (comes * spared / size)[where]
    return values


def whole(moves: Sequence[Move], moving: Sequence[HotRows | None], together: Sequence[Sequence[int]]) -> list[Move]:
    """The moves without rows in files that do not come in each of the tables in which they lie in files."""
    left = {move.table: move for move in moves}
    for tables in together:
        own = {table: hot for table in tables if (hot := moving[table]) is not None}
        files = {table: rows_in_files(left[table], hot) for table, hot in own.items() if table in left}
        ids = np.unique(np.concatenate([np.zeros(0, np.int64), *files.values()]))
        lost = np.zeros(len(ids), np.bool_)
        for table, hot in own.items():
            lost |= hot.in_files(ids) & ~np.isin(ids, files.get(table, ids[:0]))
        for table in files:
            left[table] = left[table].of(~np.isin(left[table].rows, ids[lost]))
    return [move for move in left.values() if len(move.rows)]


def rows_in_files(move: Move, hot: HotRows) -> Ints:
    """Those of a move's rows that only files hold."""
    return move.rows[hot.in_files(move.rows)]


def _seconds(row_bytes: int, gpus: int, links: Links) -> tuple[float, float]:
    """Of a link for a read of a row that is not near: of a warm one, of any other."""
    return (gpus - 1) / gpus * links.moved(row_bytes) / links.peer, links.host_s(row_bytes)


def _pairs(
    counted: Sequence[tuple[Ints, Floats]], tables: Mapping[int, HotRows], promoted: Set[int], warm_s: float, host_s: float
) -> _Pairs:
    slots = next(iter(tables.values())).slots
    spared_by_slot, unread = np.zeros(len(slots.rows)), np.ones(len(slots.rows), np.bool_)
    come: list[tuple[Ints, Ints, Floats, Floats]] = []
    for table, hot in tables.items():
        ids, counts = counted[table]
        each = np.where(hot.warm(ids), warm_s, host_s)
        near = hot.slot_of(ids)
        far, own = near < 0, near[near >= 0]
        spared_by_slot[own], unread[own] = (counts * each)[~far], False
        if table not in promoted:
            far &= ~hot.in_files(ids)
        come.append((np.full(int(far.sum()), table), ids[far], (counts * each)[far], each[far]))
    of, rows, spared, least = (np.concatenate(column) for column in zip(*come, strict=True))
    order = np.argsort(-spared, kind="stable")
    of, rows, wanted, least = of[order], rows[order], spared[order], least[order]
    read = np.flatnonzero(~unread)
    free, busy = np.flatnonzero(unread), read[np.argsort(spared_by_slot[read], kind="stable")]
    lost = np.concatenate([np.zeros(len(free)), spared_by_slot[busy]])[: len(rows)]
    n = len(lost)
    better = wanted[:n] > _MARGIN * lost + _ONCE * least[:n]
    n = n if better.all() else int(np.argmin(better))
    return _Pairs(of[:n], rows[:n], wanted[:n] - lost[:n], free, busy)


def _given(tables: Mapping[int, HotRows], of: Ints, free: Ints, busy: Ints) -> Ints:
    """A slot for each row: where it can, of those that were its table's at first, which a lookup looks at first."""

    def own(table: int, slots: Ints) -> Ints:
        begin, end = tables[table].slots.own[table]
        return np.flatnonzero((slots >= begin) & (slots < end))

    n = min(len(of), len(free))
    # The last ones first: there lie rows that were planned to be read least, and those that came since.
    near = [own(table, free)[::-1][: np.count_nonzero(of == table)] for table in tables]
    first = np.concatenate([*near, np.setdiff1d(np.arange(len(free)), np.concatenate(near))[::-1]])[:n]
    slots = np.concatenate([free[first], busy[: len(of) - n]])
    found, left = np.full(len(slots), -1), np.ones(len(slots), np.bool_)
    for table in tables:
        rows = np.flatnonzero(of == table)
        taken = own(table, slots)[: len(rows)]
        found[rows[: len(taken)]], left[taken] = slots[taken], False
    found[found < 0] = slots[left]
    return found
