"""Which rows are to come into a GPU's memory, and in whose places: those first that spare its links most time for each byte
that is copied. A row that goes is read over a link again: from the host, or from another GPU if it came from there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpiframe_core.embedding.hot_rows import HotRows, Ints, Move
from dpiframe_core.embedding.placement import Links
from dpiframe_core.replan.recent_reads import Floats

# A sample is no count: a row has to be read half as often again as the one whose place it takes, and once more than that.
_MARGIN, _ONCE = 1.5, 1.0


class _Pairs(NamedTuple):
    """Of a table: rows that are to come, slots whose rows they replace, and the seconds that each spares; falling."""

    rows: Ints
    slots: Ints
    gains: Floats


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
    tables = [i for i, hot in enumerate(moving) if hot is not None]
    if not tables:
        return []
    pairs = [_pairs(*counted[i], hot, *_seconds(row_bytes[i], gpus, links)) for i in tables if (hot := moving[i]) is not None]
    sizes = np.repeat([row_bytes[i] for i in tables], [len(p.rows) for p in pairs])
    of_pair = np.repeat(np.arange(len(tables)), [len(p.rows) for p in pairs])
    order = np.argsort(-np.concatenate([p.gains for p in pairs]) / sizes, kind="stable")
    taken = np.bincount(of_pair[order[np.cumsum(sizes[order]) <= most_bytes]], minlength=len(tables)).tolist()
    return [Move(i, p.rows[:n], p.slots[:n]) for i, p, n in zip(tables, pairs, taken, strict=True) if n]


def _seconds(row_bytes: int, gpus: int, links: Links) -> tuple[float, float]:
    """Of a link for a read of a row that is not near: of a warm one, of any other."""
    return (gpus - 1) / gpus * links.moved(row_bytes) / links.peer, links.host_s(row_bytes)


def _pairs(ids: Ints, counts: Floats, hot: HotRows, warm_s: float, host_s: float) -> _Pairs:
    each = np.where(hot.warm(ids), warm_s, host_s)
    spared = counts * each
    far = hot.far(ids)
    order = np.argsort(-spared[far], kind="stable")
    rows, wanted, least = ids[far][order], spared[far][order], each[far][order]
    slots = hot.at(ids[~far])
    own = hot.rows[slots] == ids[~far]  # rows of files have a place that is not theirs
    slots, reads = slots[own], spared[~far][own]
    unread = np.ones(len(hot.rows), np.bool_)
    unread[slots] = False
    # The last ones first: there lie rows that were planned to be read least, and those that came since.
    free = np.flatnonzero(unread)[::-1][: len(rows)]
    busy = np.argsort(reads, kind="stable")[: len(rows) - len(free)]
    given, lost = np.concatenate([free, slots[busy]]), np.concatenate([np.zeros(len(free)), reads[busy]])
    n = len(given)
    better = wanted[:n] > _MARGIN * lost + _ONCE * least[:n]
    n = n if better.all() else int(np.argmin(better))
    return _Pairs(rows[:n], given[:n], wanted[:n] - lost[:n])
