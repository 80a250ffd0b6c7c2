"""Which rows are to come into a GPU's memory, and in whose places: those first that spare its links most time for each byte
that is copied. A row that goes is read over a link again: from the host, or from another GPU if it came from there.
"""

from collections.abc import Mapping, Sequence
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
) -> list[Move]:
    """At most so many bytes of rows.

    Args:
        counted: of each table, rows that were read, and how often; others were not. moving: its hot rows, None: they stay.
        gpus: of the host, each of which has a share of the warm rows.
    """
    links = links or Links()
    sharing: dict[int, dict[int, HotRows]] = {}
    for i, hot in enumerate(moving):
        if hot is not None:
            sharing.setdefault(id(hot.slots), {})[i] = hot
    if not sharing:
        return []
    pairs = [_pairs(counted, tables, *_seconds(row_bytes[min(tables)], gpus, links)) for tables in sharing.values()]
    sizes = np.repeat([row_bytes[min(tables)] for tables in sharing.values()], [len(p.rows) for p in pairs])
    of_pair = np.repeat(np.arange(len(pairs)), [len(p.rows) for p in pairs])
    order = np.argsort(-np.concatenate([p.gains for p in pairs]) / sizes, kind="stable")
    taken = np.bincount(of_pair[order[np.cumsum(sizes[order]) <= most_bytes]], minlength=len(pairs)).tolist()
    found = []
    for tables, p, n in zip(sharing.values(), pairs, taken, strict=True):
        given = _given(tables, p.tables[:n], p.free, p.busy)
        for table in tables:
            own = p.tables[:n] == table
            if own.any():
                found.append(Move(table, p.rows[:n][own], given[own]))
    return found


def _seconds(row_bytes: int, gpus: int, links: Links) -> tuple[float, float]:
    """Of a link for a read of a row that is not near: of a warm one, of any other."""
    return (gpus - 1) / gpus * links.moved(row_bytes) / links.peer, links.host_s(row_bytes)


def _pairs(counted: Sequence[tuple[Ints, Floats]], tables: Mapping[int, HotRows], warm_s: float, host_s: float) -> _Pairs:
    slots = next(iter(tables.values())).slots
    spared_by_slot, unread = np.zeros(len(slots.rows)), np.ones(len(slots.rows), np.bool_)
    come: list[tuple[Ints, Ints, Floats, Floats]] = []
    for table, hot in tables.items():
        ids, counts = counted[table]
        each = np.where(hot.warm(ids), warm_s, host_s)
        far = hot.far(ids)
        come.append((np.full(int(far.sum()), table), ids[far], (counts * each)[far], each[far]))
        near = hot.slot_of(ids[~far])
        own = (slots.rows[near] == ids[~far]) & (slots.tables[near] == table)  # rows of files have a place that is not theirs
        spared_by_slot[near[own]], unread[near[own]] = (counts * each)[~far][own], False
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
