"""Which rows are to come into a GPU's memory, and in whose places: those first that spare the link to the host most, for each
byte that is copied.
"""

from collections.abc import Sequence

import numpy as np

from dpiframe_core.embedding.hot_rows import HotRows, Ints, Move
from dpiframe_core.embedding.placement import Links
from dpiframe_core.replan.recent_reads import Floats

# A sample is no count: a row has to be read half as often again as the one whose place it takes, and once more than that.
_MARGIN, _ONCE = 1.5, 1.0


def chosen_moves(
    counted: Sequence[tuple[Ints, Floats]],
    moving: Sequence[HotRows | None],
    row_bytes: Sequence[int],
    most_bytes: int,
    links: Links | None = None,
) -> list[Move]:
    """At most so many bytes of rows.

    Args:
        counted: of each table, rows that were read, and how often; others were not. moving: its hot rows, None: they stay.
    """
    links = links or Links()
    pairs = [_pairs(ids, counts, hot) if hot is not None else None for (ids, counts), hot in zip(counted, moving, strict=True)]
    tables = [i for i, pair in enumerate(pairs) if pair is not None]
    gains = [pair[2] * links.moved_by_host(row_bytes[i]) / row_bytes[i] for i in tables if (pair := pairs[i]) is not None]
    if not gains:
        return []
    of_table = np.repeat(tables, [len(own) for own in gains])
    order = np.argsort(-np.concatenate(gains), kind="stable")
    within = np.cumsum(np.asarray(row_bytes)[of_table[order]]) <= most_bytes
    taken = np.bincount(of_table[order[within]], minlength=len(pairs))
    return [Move(i, pair[0][:n], pair[1][:n]) for i, pair in enumerate(pairs) if pair is not None and (n := int(taken[i]))]


def _pairs(ids: Ints, counts: Floats, hot: HotRows) -> tuple[Ints, Ints, Floats]:
    """Rows that are to come, slots whose rows they replace, and by how much more they are read; falling."""
    far = hot.far(ids)
    order = np.argsort(-counts[far], kind="stable")
    rows, wanted = ids[far][order], counts[far][order]
    near = ~far
    slots = hot.at(ids[near])
    # Rows of files have a place that is not theirs.
    own = hot.rows[slots] == ids[near]
    slots, reads = slots[own], counts[near][own]
    unread = np.ones(len(hot.rows), np.bool_)
    unread[slots] = False
    free = np.flatnonzero(unread)[::-1][
        : len(rows)
    ]  # the last ones first: there lie what was planned to be read least, and what came since
    busy = np.argsort(reads, kind="stable")[: len(rows) - len(free)]
    given = np.concatenate([free, slots[busy]])
    lost = np.concatenate([np.zeros(len(free)), reads[busy]])
    n = len(given)
    better = wanted[:n] > _MARGIN * lost + _ONCE
    n = int(np.count_nonzero(better))  # a head of them: one side falls, the other rises
    return rows[:n], given[:n], wanted[:n] - lost[:n]
