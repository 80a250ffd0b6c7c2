"""Reads the rows that no memory holds ahead of the batches that need them, into slots of a memory that lookups read.

An id of such a row becomes the id `rows + slot`, which a lookup finds behind the table's own rows. One slot has the rows of all
tables that are read by the same id. A slot keeps its row until another row needs the slot, so what is read often stays.

Of rows that lie in a nearer memory for a while (`NearRows`) the id stays as it is.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

import numpy as np
import torch

from dpiframe_core.errors import Overloaded, TooLarge
from dpiframe_core.far_rows.far_reads import FarReads
from dpiframe_core.far_rows.lease import Lease, Read, Written
from dpiframe_core.far_rows.near_rows import NearRows
from dpiframe_core.far_rows.row_slots import Ints, RowSlots
from dpiframe_core.far_rows.row_source import RowSource, Wanted
from dpiframe_core.far_rows.slot_rows import SlotRows
from dpiframe_core.far_rows.spare import Side, Spare, sides
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock

log = logging.getLogger(__name__)
_READERS, _AT_ONCE = 8, 4096  # threads; rows that are fetched at once
_RETRY_S = 0.01
_KEPT, _MOST_KEYS = 128, 1 << 16  # leases whose rows nobody has counted yet; rows of them that are counted at a time


class RowsAhead:
    """Owns the slots and the threads that read. Thread-safe.

    Args:
        spares: whose tables' rows are read. layout: of the blocks. near: how many rows may lie in a nearer memory at a time.

    Attributes:
        spares: their order numbers groups. near: the rows that need no slot.
    """

    def __init__(self, spares: Sequence[Spare], layout: BlockLayout, source: RowSource, near: int = 0) -> None:
        self._lock = threading.Lock()
        self.spares, self._source = tuple(spares), source
        self._slots = RowSlots([s.group.rows for s in spares], [s.slots for s in spares], near)
        self._rows = SlotRows(self.spares, source, self._slots)
        self._asked: deque[Ints] | None = None
        self._found = np.zeros(3, np.int64)  # promoted, memory, file
        self.near = NearRows(self._lock, self._slots)
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
        for group, spare in enumerate(self.spares):
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
            return Lease(self, _as_it_is(block), (), np.zeros(0, np.int64), np.zeros(0, np.int64), frozenset())
        keys, inverse = np.unique(np.concatenate([keys for *_, keys in found]), return_inverse=True)
        slots, reads = self._take(keys, asked=True)
        if not misled and (slots >= self._slots.total).all():
            return Lease(self, _as_it_is(block), (), keys, slots, reads)
        try:
            own = RowBlock.allocate(block.layout, block.rows, block.contexts, block.oov_count)
            own.fill((block,))
            own.staged = True
            written, end = [], 0
            for side, ids, at, mine in found:
                start, end = end, end + len(mine)
                which = inverse[start:end]
                far = slots[which] < self._slots.total
                ids[at] = np.where(far, slots[which] + self._behind[side.group[at[1]]], ids[at])
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
            return sum(map(self._slots.held, range(len(self.spares)))) - len(self._kept)

    def close(self) -> None:
        """Nothing is read any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def restore(self, block: RowBlock) -> None:
        """Puts ids of rows in the place of those of their slots, in a copy of a lease's block that is not closed."""
        for side in self._sides:
            ids = block.wide_ids(side.section)
            at = np.nonzero(side.misleading(ids))
            if not len(at[0]):
                continue
            group = side.group[at[1]]
            with self._lock:
                own = self._slots.keys_of(ids[at] - self._behind[group]) - self._slots.first_keys[group]
            ids[at] = np.where(own >= 0, own, ids[at])
            block.set_ids(side.section, ids)

    def count(self) -> None:
        """From now on `asked` tells which rows leases ask for."""
        self._asked = deque(maxlen=_KEPT)

    def asked(self) -> list[Ints]:
        """Since the last call: of each lease, or of the last of many, the keys of its rows (`RowSlots`), distinct."""
        found: list[Ints] = []
        kept = self._asked
        while kept and sum(map(len, found)) < _MOST_KEYS:
            found.append(kept.pop())
        if kept:
            kept.clear()
        return found

    @property
    def found(self) -> FarReads:
        with self._lock:
            promoted, memory, file = self._found.tolist()
            return FarReads(promoted, memory, file, self.near.count, self._slots.staying)

    def keep(self, keys: Ints) -> None:
        """Has these rows stay in their slots, and no others; a row that has none from when it is asked for next."""
        with self._lock:
            self._slots.stay(keys)

    def fetch(self, ids: Ints, tables: Sequence[int]) -> tuple["np.ndarray", list[torch.Tensor]]:
        """bool[k], which rows could be read, and those of each of the tables, [number of them, dim]; (): none."""
        there, places, read = np.zeros(len(ids), np.bool_), [np.zeros(0, np.intp)], []
        for part in self._source.parts(ids):
            try:
                for start in range(0, len(part), _AT_ONCE):
                    own = part[start : start + _AT_ONCE]
                    read.append(self._source.read([Wanted(table, ids[own]) for table in tables]))
                    there[own] = True
                    places.append(own)
            except Exception as failure:  # as in `_read`: whatever it is, they stay where they are
                log.info("of %d rows in files some are not promoted: %s", len(part), failure)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return there, [torch.cat(own)[order] for own in zip(*read, strict=True)]

    def _take(self, keys: Ints, *, asked: bool = False) -> tuple[Ints, frozenset[Read]]:
        """The slots of the rows, and the reads to wait for."""
        with self._lock:
            self._number += 1
            found = self._slots.take(keys, self._number)
            if isinstance(found, int):
                raise self._full(found, keys)
            if asked:
                near, missing = int((found.slots >= self._slots.total).sum()), int(found.missing.sum())
                self._found += (near, len(keys) - near - missing, missing)
                if self._asked is not None:
                    self._asked.append(keys)
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
            self._rows.fill(keys, slots)
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
            self.spares[group].slots,
        )
        if wanted > slots:
            return TooLarge("candidates", f"{wanted} rows in files of one table", f"at most {slots}, or more `ahead_mib`")
        held = self._slots.held(group)
        return Overloaded(f"rows in files: got {wanted} to be read, {held} of {slots} slots held", _RETRY_S)


def _as_it_is(block: RowBlock) -> RowBlock:
    """Over the same memory: its ids lead to its rows."""
    return RowBlock(block.layout, block.rows, block.contexts, block.buffer, block.places, block.base, staged=True)
