"""Where rows come from that no memory of this process holds: the bundle's files, or whatever else can read a row by its id."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)
_PAGE = 4096
_RANDOM = 1  # MADV_RANDOM

RowIds = npt.NDArray[np.int64]


class RowSource(Protocol):
    """Several threads read at once."""

    def read(self, table: int, ids: RowIds) -> torch.Tensor:
        """[k, dim] as the table stores them, of ids within it.

        Raises:
            Exception: they cannot be had now. Who waits for them is told, and who asks again has them read again.
        """


class FileRows:
    """Rows of memory-mapped files: the kernel reads those pages that are touched, and forgets them when memory is short.

    Args:
        tables: [rows, dim] each, memory-mapped.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        self._tables = tables

    def advise(self, table: int) -> None:
        """No row tells which is read next: a read is to bring its own pages alone, not 128 KB around them."""
        rows = self._tables[table]
        start = -(-rows.data_ptr() // _PAGE) * _PAGE
        length = rows.data_ptr() + rows.nbytes - start
        if length > 0 and ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _RANDOM):
            log.info("table %d: madvise: error %d", table, ctypes.get_errno())

    def read(self, table: int, ids: RowIds) -> torch.Tensor:
        return self._tables[table].index_select(0, torch.from_numpy(ids))
