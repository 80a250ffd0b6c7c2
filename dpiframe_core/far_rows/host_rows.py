"""Rows of tables in the host's memory, which the GPU reads in place: one copy for all processes of the host that want the same
ones. They are filled and locked at the same time, each of which takes tens of seconds for some 100 GB.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dpiframe_core.errors import Unavailable
from dpiframe_core.far_rows.row_copies import RowCopies
from kernels.runtime.host_memory import DeviceReadable, PrivateMemory, SharedMemory

log = logging.getLogger(__name__)
_LINE = 128  # bytes, to which tables begin aligned: what crosses the bus at once


@dataclass(frozen=True, eq=False)
class RowSpan:
    """The rows of ranks [start, end) of a table on the host; `order` as `RowCopies.add` has it."""

    table: torch.Tensor
    order: torch.Tensor | None
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.table.shape[1] * self.table.element_size()


class HostRows:
    """
    Args:
        spans: the tables are not needed any more afterwards.
        folder: where memory files may be made, that other processes find by `name`; None: this process keeps its own.
        beside: copies of the same tables that are under way.

    Attributes:
        tables: of each span, [end - start, dim] of the table's type. nbytes: of them.

    Raises:
        Unavailable: the host has no such memory, or it may not be locked.
    """

    def __init__(self, spans: Sequence[RowSpan], folder: Path | None, name: str, beside: RowCopies | None = None) -> None:
        self.nbytes = sum(_lines(span) for span in spans)
        self._memory: SharedMemory | PrivateMemory = PrivateMemory(0)
        self._readable: DeviceReadable | None = None
        self.tables: list[torch.Tensor] = []
        try:
            if not self.nbytes or folder is None or not self._share(spans, folder, name, beside):
                self._keep(spans, beside)
        except BaseException:
            self.close()
            raise

    def _share(self, spans: Sequence[RowSpan], folder: Path, name: str, beside: RowCopies | None) -> bool:
        """Whether the folder has memory for all processes; who comes first fills it."""
        while True:
            try:
                self._memory = memory = SharedMemory.claim(folder, name, self.nbytes)
                self._fill(spans, beside)
            except (OSError, MemoryError, RuntimeError) as e:
                log.warning("%s: %s: this process keeps %.1f GiB of rows for itself", folder, e, self.nbytes / 2**30)
                self.close()
                return False
            if memory.fresh:
                memory.publish()
            if memory.filled():
                return True
            self.close()  # who was to fill it has died

    def _keep(self, spans: Sequence[RowSpan], beside: RowCopies | None) -> None:
        try:
            self._memory = PrivateMemory(self.nbytes)
            self._fill(spans, beside)
        except (OSError, MemoryError, RuntimeError) as e:
            raise Unavailable(f"host tables: got {e}, expected memory for {self.nbytes / 2**30:.1f} GiB of rows") from e

    def _fill(self, spans: Sequence[RowSpan], beside: RowCopies | None) -> None:
        """Locks the memory, and copies the rows meanwhile if it is this process's to fill."""
        at = 0
        with RowCopies(beside) as copies:  # if it cannot be locked none is under way any more behind this block
            for span in spans:
                view = self._memory.bytes[at : at + span.nbytes].view(span.table.dtype).view(-1, span.table.shape[1])
                self.tables.append(view)
                if self._memory.fresh:
                    copies.add(span.table, span.order, span.start, span.end, view)
                at += _lines(span)
            if self.nbytes:
                self._readable = DeviceReadable(self._memory.bytes)
            copies.wait()

    def close(self) -> None:
        """Gives the memory back. No lookup may run any more."""
        self.tables = []
        if self._readable is not None:
            self._readable.close()
            self._readable = None
        self._memory.close()


def _lines(span: RowSpan) -> int:
    """Its bytes, with those that align the next one."""
    return -(-span.nbytes // _LINE) * _LINE
