"""Rows of many tables copied into slots by one call, which does not hold Python's lock while it waits for pages."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.runtime.c_build import cpu_library

Ints = npt.NDArray[np.int64]
Groups = Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]


class RowCopies:
    """Of groups of tables that are read by the same ids. A row's key is its id behind all rows of the groups before, and so are
    slots numbered. Any thread may copy.

    Args:
        groups: of each table of each group its rows, [rows, dim], and its slots, [slots, dim] of the same dtype.

    Raises:
        ValueError: the tables of a group have not equally many rows, or fewer slots than the first, or are not contiguous.
    """

    def __init__(self, library: ctypes.CDLL, groups: Groups) -> None:
        for number, group in enumerate(groups):
            rows, slots = ({len(pair[i]) for pair in group} for i in (0, 1))
            alike = all(r.shape[1:] == s.shape[1:] and r.dtype == s.dtype for r, s in group)
            if (
                len(rows) != 1
                or min(slots) < len(group[0][1])
                or not alike
                or not all(t.is_contiguous() for pair in group for t in pair)
            ):
                shapes = [(tuple(rows.shape), tuple(slots.shape)) for rows, slots in group]
                raise ValueError(f"group {number}: got {shapes}, expected equally many rows, and slots like them, contiguous")
        self._library, self._groups = library, groups  # the tensors stay while their addresses are used
        sizes_of = [(len(rows), len(slots), len(group)) for group in groups for rows, slots in group[:1]]
        self._firsts = np.vstack([np.zeros((1, 3), np.int64), np.cumsum(np.array(sizes_of, np.int64).reshape(-1, 3), 0)])
        addresses = [(r.data_ptr(), s.data_ptr(), r.shape[1] * r.itemsize) for group in groups for r, s in group]
        self._addresses = np.array(addresses, np.int64)

    def copy(self, keys: Ints, slots: Ints) -> None:
        """int64[k] both: rows of these keys, which ascend and are some tables', to these slots of the same groups."""
        given = np.ascontiguousarray(keys, np.int64), np.ascontiguousarray(slots, np.int64)
        self._library.dpi_copy_rows(*(a.ctypes.data for a in (self._firsts, self._addresses, *given)), len(keys))


def row_copies(groups: Groups) -> RowCopies | None:
    """None where there is no C compiler. Raises as `RowCopies`."""
    library = cpu_library()
    return None if library is None else RowCopies(library, groups)
