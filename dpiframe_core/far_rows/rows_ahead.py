"""Reads the rows that no memory holds ahead of the batches that need them, into slots of a memory that lookups read.

An id of such a row becomes the id `rows + slot`, which a lookup finds behind the table's own rows. One slot has the rows of all
tables that are read by the same id. A slot keeps its row until another row needs the slot, so what is read often stays.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.errors import InputError, Overloaded, Unavailable
from dpiframe_core.far_rows.row_slots import Read
from dpiframe_core.far_rows.row_source import RowIds, RowSource
from dpiframe_core.far_rows.spare import Spare
from dpiframe_core.features.row_block import RowBlock

_READERS = 8  # threads: a disk answers several reads at once
_ROWS_A_READ = 64
_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where in a block's column ids stand for slots: `view[at]` are those of `rows`."""

    spare: Spare
    view: npt.NDArray[Any]
    at: tuple[npt.NDArray[np.intp], ...]
    rows: RowIds
    default: int


class Lease:
    """A block whose rows lie in slots, or are being read into them, until it is closed.

    Attributes:
        block: to be scored; its rows are there when all `reads` are over.
    """

    def __init__(self, owner: "RowsAhead", block: RowBlock) -> None:
        self.block, self.reads = block, set[Read]()
        self._owner = owner
        self._held: list[tuple[Spare, list[int]]] = []
        self._places: list[_Place] = []

    def wait(self, seconds: float | None = None) -> None:
        """Until its rows are there; for `seconds` at most.

        Raises:
            Unavailable: some could not be read.
        """
        done, _ = wait_for(self.reads, seconds)
        self.check(done)

    def check(self, done: set[Read]) -> None:
        """Raises Unavailable if one of these reads failed."""
        for read in done:
            failure = read.exception()
            if failure is not None:
                raise Unavailable(f"rows in files: got {failure}, expected them to be readable") from failure

    def settle(self) -> int:
        """Has ids of rows that are not there yet read the row of their column's unknown values. How many ids these are."""
        with self._owner.lock:
            late = [np.array([not p.spare.slots.is_read(int(row)) for row in p.rows], np.bool_) for p in self._places]
        total = 0
        for p, own in zip(self._places, late, strict=True):
            p.view[tuple(axis[own] for axis in p.at)] = p.default
            total += int(own.sum())
        return total

    def close(self) -> None:
        """Its slots may go to other rows. The block is not to be scored any more."""
        with self._owner.lock:
            for spare, rows in self._held:
                spare.slots.give_back(rows)
        self._held = []


class RowsAhead:
    """Owns the slots and the threads that read. Thread-safe.

    Args:
        spares: as `spare_slots` makes them.

    Attributes:
        default: of each group's column, in the order of the groups: the id, of a slot if need be, that unknown values read.
    """

    def __init__(self, spares: Sequence[Spare], source: RowSource) -> None:
        self.lock = threading.Lock()
        self._spares, self._source = tuple(spares), source
        self._pool = ThreadPoolExecutor(_READERS, "dpiframe-rows")
        self._kept: dict[tuple[int, int], int] = {}
        for i, spare in enumerate(self._spares):
            needed = np.unique([oov for _, oov in spare.group.columns]).astype(np.int64)
            needed = needed[spare.is_far(needed)]
            found = self._take(spare, needed.tolist())
            if found is None:
                where = f"placement: {len(needed)} rows of unknown values in files"
                raise InputError(where, f"{spare.slots.slots} slots", "room for them")
            slots, reads = found
            wait_for(reads)
            for read in reads:
                read.result()
            self._kept |= {(i, int(row)): spare.group.rows + slot for row, slot in zip(needed, slots, strict=True)}

    def unknown(self, table: int, oov: int) -> int:
        """The id that stands for a table's row of unknown values."""
        for i, spare in enumerate(self._spares):
            if table in spare.group.tables:
                return self._kept.get((i, oov), oov)
        return oov

    def lease(self, block: RowBlock) -> Lease:
        """A block of the same rows, for lookups; its reads begin now.

        Raises:
            Overloaded: other requests hold the slots. TooLarge: there never are so many.
        """
        lease = Lease(self, block)
        try:
            own: RowBlock | None = None
            for i, spare in enumerate(self._spares):
                columns = [(column, oov, block.column(column)) for column, oov in spare.group.columns]
                for column, _, ids in columns:
                    if (outside := spare.is_outside(ids)).any():
                        own = own or _copied(block)
                        own.column(column)[outside] = spare.outside
                places = [(column, oov, ids, np.nonzero(spare.is_far(ids))) for column, oov, ids in columns]
                places = [place for place in places if len(place[3][0])]
                if not places:
                    continue
                own = own or _copied(block)
                every = np.concatenate([ids[at] for _, _, ids, at in places]).astype(np.int64)
                wanted, inverse = np.unique(every, return_inverse=True)
                found = self._take(spare, wanted.tolist())
                if found is None:
                    raise spare.too_full(len(wanted))
                slots, reads = found
                lease._held.append((spare, wanted.tolist()))
                lease.reads |= reads
                ids_of_slots = (np.asarray(slots, np.int64) + spare.group.rows)[inverse]
                end = 0
                for column, oov, _, at in places:
                    start, end = end, end + len(at[0])
                    view = own.column(column)
                    view[at] = ids_of_slots[start:end]
                    lease._places.append(_Place(spare, view, at, every[start:end], self._kept.get((i, oov), oov)))
            lease.block = own or _as_staged(block)
            lease.block.staged = True
        except BaseException:
            lease.close()
            raise
        return lease

    def close(self) -> None:
        """Nothing is read any more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, spare: Spare, rows: list[int]) -> tuple[list[int], set[Read]] | None:
        """The slots of the rows, and the reads to wait for."""
        with self.lock:
            found = spare.slots.take(rows)
            if found is None:
                return None
            reads = found.reads
            for start in range(0, len(found.missing), _ROWS_A_READ):
                part = found.missing[start : start + _ROWS_A_READ]
                read: Read = Future()
                read.set_running_or_notify_cancel()  # from now on nobody who waits for it can end it
                spare.slots.reading([row for row, _ in part], read)
                reads.add(read)
                self._pool.submit(self._read, spare, part, read)
        return found.slots, reads

    def _read(self, spare: Spare, part: list[tuple[int, int]], read: Read) -> None:
        ids, slots = (np.array(column, np.int64) for column in zip(*part, strict=True))
        try:
            for table, rows in zip(spare.group.tables, spare.rows, strict=True):
                rows[torch.from_numpy(slots)] = self._source.read(table, ids)
        except Exception as failure:  # whatever it is, who waits is told
            with self.lock:
                for row in ids.tolist():
                    spare.slots.forget(row)
            read.set_exception(failure)
            return
        with self.lock:
            spare.slots.arrived(ids.tolist())
        read.set_result(None)


@contextlib.contextmanager
def leased(ahead: RowsAhead | None, blocks: Sequence[RowBlock]) -> Iterator[Sequence[RowBlock]]:
    """The blocks with all their rows there, for the time of the context; as they are if no rows lie in files.

    Raises:
        Overloaded, TooLarge, Unavailable: see `Lease`.
    """
    if ahead is None:
        yield blocks
        return
    with contextlib.ExitStack() as open_ones:
        leases = {}
        for i, block in enumerate(blocks):
            if not block.staged:
                leases[i] = _patient(ahead, block)
                open_ones.callback(leases[i].close)
        for lease in leases.values():
            lease.wait()
        yield [leases[i].block if i in leases else block for i, block in enumerate(blocks)]


def _patient(ahead: RowsAhead, block: RowBlock) -> Lease:
    """A lease, waited for while batches on other lanes hold the slots."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ahead.lease(block)
        except Overloaded:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.001)


def _copied(block: RowBlock) -> RowBlock:
    own = RowBlock.allocate(block.layout, block.rows, block.contexts, block.oov_count)
    own.fill((block,))
    return own


def _as_staged(block: RowBlock) -> RowBlock:
    return RowBlock(block.layout, block.rows, block.contexts, block.buffer, block.places, block.base)
