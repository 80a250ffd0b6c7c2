"""Copies rows of files to the memories that hold them, several parts at once: a disk answers several reads at a time, and a
thread that copies waits for each of its own.

with RowCopies() as copies:
    copies.add(table, None, 0, 1000, hot)   # begins
    copies.wait()
"""

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

_THREADS = 8
_PART_BYTES = 16 << 20
_PAGE = 4096
_FEW = 16  # a page has about so many rows: who wants more than one in so many of a table reads nearly all its pages
Rows = npt.NDArray[np.uint8]


class RowCopies:
    """Copies under way. None is any more at the end of its block, whatever has failed in it.

    beside: others, whose tables need not be read twice.
    """

    def __init__(self, beside: "RowCopies | None" = None) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "row-copies")
        self._parts: list[Future[None]] = []
        # Where tables begin that are read from front to back.
        self._whole: set[int] = set() if beside is None else beside._whole

    def add(self, table: torch.Tensor, order: torch.Tensor | None, start: int, end: int, to: torch.Tensor) -> None:
        """Begins to copy the rows of ranks [start, end).

        Args:
            table: [rows, dim] on the host, rows without gaps; memory-mapped is fine.
            order: int64[rows], the row at each rank; None: they lie in order of ids.
            to: [end - start, dim] of the table's type, on the host or a GPU. Not to be read before `wait`.
        """
        source: Rows = table.view(torch.uint8).numpy()
        step = max(1, _PART_BYTES // max(1, source.shape[1]))
        if order is not None and (end - start) * _FEW >= len(source) and table.data_ptr() not in self._whole:
            self._whole.add(table.data_ptr())
            self._parts += [self._pool.submit(_read, source[a : a + step]) for a in range(0, len(source), step)]
        for a in range(start, end, step):
            b = min(end, a + step)
            ids = None if order is None else order[a:b].numpy()
            self._parts.append(self._pool.submit(_copy, source[a:b] if ids is None else source, ids, to[a - start : b - start]))

    def wait(self) -> None:
        """Returns when all are there that were added. Raises what a copy of them raised."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)


def _read(source: Rows) -> None:
    """Has the kernel read the pages in their order, ahead of who wants the rows in another."""
    source[:: max(1, _PAGE // source.shape[1]), 0].max()


def _copy(source: Rows, ids: npt.NDArray[np.int64] | None, to: torch.Tensor) -> None:
    if not to.is_cuda:
        _put(source, ids, to.view(torch.uint8).numpy())
        return
    with torch.cuda.device(to.device):
        # The driver would copy from pageable memory by one thread, which then also waits for the disk.
        staged = torch.empty(len(to), source.shape[1], dtype=torch.uint8, pin_memory=True)
        _put(source, ids, staged.numpy())
        to.view(torch.uint8).copy_(staged)


def _put(source: Rows, ids: npt.NDArray[np.int64] | None, to: Rows) -> None:
    if ids is None:
        np.copyto(to, source)
        return
    # In the order of the file, which is read ahead; only then as they are to lie.
    by_place = np.argsort(ids)
    back = np.empty_like(by_place)
    back[by_place] = np.arange(len(ids))
    np.take(np.take(source, ids[by_place], axis=0), back, axis=0, out=to, mode="clip")  # in place: not by a copy of `to`
