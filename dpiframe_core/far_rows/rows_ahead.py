"""Reads the rows that no memory holds ahead of the batches that need them, into slots of a memory that lookups read.

An id of such a row becomes the id `rows + slot`, which a lookup finds behind the table's own rows. One slot has the rows of all
tables that are read by the same id. A slot keeps its row until another row needs the slot, so what is read often stays.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

import numpy as np
import torch

from dpiframe_core.errors import Overloaded, TooLarge
from dpiframe_core.far_rows.lease import Lease, Read, Written
from dpiframe_core.far_rows.row_slots import Ints, RowSlots
from dpiframe_core.far_rows.row_source import RowSource, Wanted
from dpiframe_core.far_rows.spare import Side, Spare, sides
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock

_READERS = 8  # threads
_RETRY_S = 0.01


class RowsAhead:
    """Owns the slots and the threads that read. Thread-safe.

    Args:
        spares: whose tables' rows are read. layout: of the blocks.
    """

    def __init__(self, spares: Sequence[Spare], layout: BlockLayout, source: RowSource) -> None:
        self._lock = threading.Lock()
        self._spares, self._source = tuple(spares), source
        self._slots = RowSlots([s.group.rows for s in spares], [s.slots for s in spares])
        self._behind = np.array([s.group.rows for s in spares]) - self._slots.first_slots[:-1]  # of a slot: its id
        self._pool = ThreadPoolExecutor(_READERS, "dpiframe-rows")
        self._reads: dict[int, tuple[Read, ...]] = {}
        self._number = 0
        self._kept: dict[int, int] = {}  # by key, the ids of slots with rows of unknown values
        widths = {name: len(getattr(layout, name).widths) for name in ("context_ids", "candidate_ids")}
        try:
            self._sides = tuple(self._with_defaults(side) for side in sides(spares, widths))  # type: ignore[arg-type]
        except BaseException:
            self.close()
            raise

    def unknown(self, table: int, oov: int) -> int:
        """The id by which a lookup finds a table's row of unknown values."""
        for group, spare in enumerate(self._spares):
            key = int(self._slots.first_keys[group]) + oov
            if table in spare.group.tables and key in self._kept:
                return self._kept[key]
        return oov

    def lease(self, block: RowBlock) -> Lease:
        """A block of the same rows, for lookups; its reads begin now.

        Raises:
            Overloaded: other requests hold the slots. TooLarge: there never are so many.
        """
        found, misled = [], False
        for side in self._sides:
            ids = block.wide_ids(side.section)
            misleading = side.misleading(ids)
            if misleading.any():
                ids[misleading] = np.broadcast_to(side.outside, ids.shape)[misleading]
                misled = True
            at = side.far(ids)
            found.append((side, ids, at, ids[at] + self._slots.first_keys[side.group[at[1]]]))
        if not misled and not any(len(keys) for *_, keys in found):
            own = RowBlock(block.layout, block.rows, block.contexts, block.buffer, block.places, block.base, staged=True)
            return Lease(self, own, (), np.zeros(0, np.int64), np.zeros(0, np.int64), frozenset())
        keys, inverse = np.unique(np.concatenate([keys for *_, keys in found]), return_inverse=True)
        slots, reads = self._take(keys)
        try:
            own = RowBlock.allocate(block.layout, block.rows, block.contexts, block.oov_count)
            own.fill((block,))
            own.staged = True
            written, end = [], 0
            for side, ids, at, mine in found:
                start, end = end, end + len(mine)
                which = inverse[start:end]
                ids[at] = slots[which] + self._behind[side.group[at[1]]]
                own.set_ids(side.section, ids)
                written.append(Written(side, at, which))
            return Lease(self, own, tuple(written), keys, slots, reads)
        except BaseException:
            self.give_back(slots)
            raise

    def late(self, keys: Ints, slots: Ints) -> "np.ndarray":
        """bool[k]: which of the rows do not lie in their slots."""
        with self._lock:
            return ~self._slots.lies(keys, slots)

    def give_back(self, slots: Ints) -> None:
        """Who took them is done with them."""
        with self._lock:
            self._slots.give_back(slots)

    @property
    def held(self) -> int:
        """Slots that somebody holds, but for rows of unknown values."""
        with self._lock:
            return sum(map(self._slots.held, range(len(self._spares)))) - len(self._kept)

    def close(self) -> None:
        """Nothing is read any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def _take(self, keys: Ints) -> tuple[Ints, frozenset[Read]]:
        """The slots of the rows, and the reads to wait for."""
        with self._lock:
            self._number += 1
            found = self._slots.take(keys, self._number)
            if isinstance(found, int):
                raise self._full(found, keys)
            reads = [read for number in found.reads.tolist() for read in self._reads.get(number, ())]
            lost = np.flatnonzero(found.missing)
            if len(lost):
                of_group = np.searchsorted(self._slots.first_keys, keys[lost], side="right") - 1
                parts = [lost[own] for own in self._source.parts(keys[lost] - self._slots.first_keys[of_group])]
                own = tuple(self._begun(self._number, keys[part], found.slots[part]) for part in parts)
                self._reads[self._number] = own
                reads += own
        return found.slots, frozenset(reads)

    def _begun(self, number: int, keys: Ints, slots: Ints) -> Read:
        read: Read = Future()
        read.set_running_or_notify_cancel()  # from now on nobody who waits for it can end it
        self._pool.submit(self._read, number, keys, slots, read)
        return read

    def _read(self, number: int, keys: Ints, slots: Ints, read: Read) -> None:
        failure: Exception | None = None
        try:
            ends = np.searchsorted(keys, self._slots.first_keys)
            wanted, places = [], []
            for group in np.flatnonzero(ends[1:] > ends[:-1]).tolist():
                span, spare = slice(ends[group], ends[group + 1]), self._spares[group]
                ids = keys[span] - self._slots.first_keys[group]
                to = torch.from_numpy(slots[span] - self._slots.first_slots[group])
                wanted += [Wanted(table, ids) for table in spare.group.tables]
                places += [(rows, to) for rows in spare.rows]
            for (rows, to), values in zip(places, self._source.read(wanted), strict=True):
                rows.index_copy_(0, to, values)
        except Exception as error:  # whatever it is, who waits is told
            failure = error
        with self._lock:
            if failure is None:
                self._slots.arrived(slots)
            else:
                self._slots.forget(slots)
            self._reads[number] = left = tuple(other for other in self._reads.get(number, ()) if other is not read)
            if not left:
                del self._reads[number]
        if failure is None:
            read.set_result(None)
        else:
            read.set_exception(failure)

    def _with_defaults(self, side: Side) -> Side:
        """With ids of slots for the rows of unknown values that only files hold: those are read now, and kept."""
        default = side.default.copy()
        for i, (group, oov) in enumerate(zip(side.group.tolist(), side.default.tolist(), strict=True)):
            key = int(self._slots.first_keys[group]) + oov
            row = np.zeros((1, len(default)), np.int64)
            row[0, i] = oov
            if side.outside[i] and i in side.far(row)[1].tolist():
                if key not in self._kept:
                    slots, reads = self._take(np.array([key]))
                    wait_for(reads)
                    for read in reads:
                        read.result()
                    self._kept[key] = int(slots[0] + self._behind[group])
                default[i] = self._kept[key]
        return replace(side, default=default)

    def _full(self, group: int, keys: Ints) -> Overloaded | TooLarge:
        wanted, slots = (
            int(np.diff(np.searchsorted(keys, self._slots.first_keys[group : group + 2]))[0]),
            self._spares[group].slots,
        )
        if wanted > slots:
            return TooLarge("candidates", f"{wanted} rows in files of one table", f"at most {slots}, or more `ahead_mib`")
        held = self._slots.held(group)
        return Overloaded(f"rows in files: got {wanted} to be read, {held} of {slots} slots held", _RETRY_S)
