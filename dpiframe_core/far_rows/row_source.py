"""Where rows come from that no memory of this process holds: the bundle's files, or whatever else can read a row by its id."""

import ctypes
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)
_PAGE = 4096
_RANDOM = 1  # MADV_RANDOM

_READERS = 8  # at once: a disk answers several reads at once
_LEAST_ROWS = 32  # that a thread is woken for

RowIds = npt.NDArray[np.int64]


class Wanted(NamedTuple):
    """Rows of a table, ids within it."""

    table: int
    ids: RowIds


class RowSource(Protocol):
    """Several threads read at once.

    Attributes:
        mapped: the tables, [rows, dim] each, if this process has them mapped: slots are filled from there, without `read`.
    """

    mapped: Sequence[torch.Tensor] | None

    def parts(self, ids: RowIds) -> Sequence[npt.NDArray[np.intp]]:
        """Which of them, whatever their tables, are asked for together: each part is one `read`, which fails for itself."""

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """[k, dim] of each, as its table stores them.

        Raises:
            Exception: they cannot be had now. Who waits for them is told, and who asks again has them read again.
        """

    def close(self) -> None:
        """Nothing is read any more."""


class FileRows:
    """Rows of memory-mapped files: the kernel reads those pages that are touched, and forgets them when memory is short.

    Args:
        tables: [rows, dim] each, memory-mapped.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        self.mapped: Sequence[torch.Tensor] | None = tables
        self._tables = tables

    def advise(self, table: int) -> None:
        """No row tells which is read next: a read is to bring its own pages alone, not 128 KB around them."""
        rows = self._tables[table]
        start = -(-rows.data_ptr() // _PAGE) * _PAGE
        length = rows.data_ptr() + rows.nbytes - start
        if length > 0 and ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _RANDOM):
            log.info("table %d: madvise: error %d", table, ctypes.get_errno())

    def parts(self, ids: RowIds) -> Sequence[npt.NDArray[np.intp]]:
        return np.array_split(np.arange(len(ids)), min(_READERS, -(-len(ids) // _LEAST_ROWS)))

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [self._tables[table].index_select(0, torch.from_numpy(ids)) for table, ids in wanted]

    def close(self) -> None:
        """The files are the bundle's."""
