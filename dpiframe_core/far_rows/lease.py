"""A block of rows for lookups, with the slots that its far rows lie in."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import Overloaded, Unavailable
from dpiframe_core.far_rows.row_slots import Ints
from dpiframe_core.far_rows.spare import Side
from dpiframe_core.features.row_block import RowBlock

Read = Future[None]
_PATIENCE_S = 1.0


class Written(NamedTuple):
    """Ids of slots in a block: on which side, at which places, and of which of the lease's rows."""

    side: Side
    at: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]
    which: npt.NDArray[np.intp]


class Lender(Protocol):
    """`RowsAhead`."""

    def lease(self, block: RowBlock) -> "Lease": ...
    def late(self, keys: Ints, slots: Ints) -> npt.NDArray[np.bool_]: ...
    def give_back(self, slots: Ints) -> None: ...


class Lease:
    """Filled by `RowsAhead.lease`; to be closed.

    Attributes:
        block: to be scored; its rows are there when all `reads` are over.
    """

    def __init__(
        self, lender: Lender, block: RowBlock, written: Sequence[Written], keys: Ints, slots: Ints, reads: frozenset[Read]
    ) -> None:
        self.block, self.reads = block, reads
        self._lender, self._written, self._keys, self._slots = lender, written, keys, slots

    def wait(self, seconds: float | None = None) -> None:
        """Until its rows are there; for `seconds` at most.

        Raises:
            Unavailable: some could not be read.
        """
        done, _ = wait_for(self.reads, seconds)
        self.check(done)

    def check(self, done: Iterable[Read]) -> None:
        """Raises Unavailable if one of these reads failed."""
        for read in done:
            failure = read.exception()
            if failure is not None:
                raise Unavailable(f"rows in files: got {failure}, expected them to be readable") from failure

    def settle(self) -> int:
        """Has ids of rows that are not there yet read the row of their column's unknown values. How many ids these are."""
        late = self._lender.late(self._keys, self._slots)
        total = 0
        for side, (rows, columns), which in self._written:
            own = late[which]
            if own.any():
                ids = self.block.wide_ids(side.section)
                ids[rows[own], columns[own]] = side.default[columns[own]]
                self.block.set_ids(side.section, ids)
                total += int(own.sum())
        return total

    def close(self) -> None:
        """Its slots may go to other rows. The block is not to be scored any more."""
        if len(self._slots):
            self._lender.give_back(self._slots)
            self._slots = self._slots[:0]


@contextlib.contextmanager
def leased(lender: Lender | None, blocks: Sequence[RowBlock]) -> Iterator[Sequence[RowBlock]]:
    """The blocks with all their rows there, for the time of the context; as they are if no rows lie in files.

    Raises:
        Overloaded, TooLarge, Unavailable: see `RowsAhead.lease`, `Lease`.
    """
    if lender is None:
        yield blocks
        return
    with contextlib.ExitStack() as open_ones:
        leases = {}
        for i, block in enumerate(blocks):
            if not block.staged:
                leases[i] = _patient(lender, block)
                open_ones.callback(leases[i].close)
        for lease in leases.values():
            lease.wait()
        yield [leases[i].block if i in leases else block for i, block in enumerate(blocks)]


def _patient(lender: Lender, block: RowBlock) -> Lease:
    """A lease, waited for while batches on other lanes hold the slots."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return lender.lease(block)
        except Overloaded:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.001)
