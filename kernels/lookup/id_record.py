"""How the ids of one row lie side by side: as few bytes a column as its tables need, the widest columns first; and what a
lookup on a CPU takes of a batch. Plain NumPy, no torch: host code fills such records, a lookup on a GPU reads them in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

_DTYPES: dict[int, np.dtype[Any]] = {n: np.dtype(name) for n, name in ((1, "<u1"), (2, "<u2"), (4, "<i4"), (8, "<i8"))}
_COLUMN = np.dtype([*((name, np.int32) for name in ("source", "at", "width", "lowest")), ("span", np.uint64)])

Records = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


def id_bytes(rows: int) -> int:
    """Bytes of an id of a table of `rows` rows. The one of all ones is no row: it means -1, the padding of a bag."""
    return 1 if rows < 2**8 else 2 if rows < 2**16 else 4 if rows < 2**31 else 8


@dataclass(frozen=True)
class IdRecord:
    """The id columns of one side, context or candidate. `widths`: bytes of each column's id: 1, 2, 4 or 8."""

    widths: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each column: aligned to its width, as wider columns come first and equal ones keep their order."""
        at, out = 0, [0] * len(self.widths)
        for column in self._order:
            out[column] = at
            at += self.widths[column]
        return tuple(out)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a record: whole 4-byte words (8, with int64 ids), so that columns are aligned in every record."""
        word = max(4, *self.widths, 0)
        return -(-sum(self.widths) // word) * word

    def column(self, records: Records, start: int, count: int) -> npt.NDArray[Any]:
        """Columns [start, start + count), equally wide, of uint8[n, nbytes]: a writable view in their own dtype."""
        at, width = self.offsets[start], self.widths[start]
        return records[:, at : at + count * width].view(_DTYPES[width])

    def pack(self, ids: npt.NDArray[np.integer[Any]], records: Records) -> None:
        """Writes ids[n, columns], which must fit, into uint8[n, nbytes]."""
        for columns, span, dtype in self._runs:
            records[:, span].view(dtype)[:] = ids[:, columns]

    def legal(self, lowest: Sequence[int], above: Sequence[int]) -> bytes:
        """The columns as blocks.c packs them, each with its legal ids: from `lowest` (0 or -1) to one below `above`."""
        columns = range(len(self.widths))
        spans = (high - low for low, high in zip(lowest, above, strict=True))
        rows = zip(columns, self.offsets, self.widths, lowest, spans, strict=True)
        return np.array(sorted(rows, key=lambda row: row[1]), _COLUMN).tobytes()

    @cached_property
    def columns(self) -> bytes:
        """The columns as blocks.c packs them."""
        return self.legal([0] * len(self.widths), [0] * len(self.widths))

    def widened(self, records: Records, dtype: npt.DTypeLike) -> Ids:
        """All ids as dtype[n, columns], in the order of the columns, -1 for all ones."""
        out = np.empty((len(records), len(self.widths)), dtype)
        for columns, span, own in self._runs:
            ids = records[:, span].view(own)
            out[:, columns] = ids if own.kind == "i" else (ids + own.type(1)).astype(dtype) - 1
        return out

    @cached_property
    def _order(self) -> npt.NDArray[np.intp]:
        return np.argsort(-np.array(self.widths, np.intp), kind="stable")

    @cached_property
    def _runs(self) -> list[tuple[slice | npt.NDArray[np.intp], slice, np.dtype[Any]]]:
        """For each width: its columns (a slice if they lie side by side, which takes no gather), its bytes, its dtype."""
        runs: list[tuple[slice | npt.NDArray[np.intp], slice, np.dtype[Any]]] = []
        at = 0
        for width in sorted(set(self.widths), reverse=True):
            columns = np.flatnonzero(np.array(self.widths) == width)
            first, count = int(columns[0]), len(columns)
            together = int(columns[-1]) - first + 1 == count
            runs.append((slice(first, first + count) if together else columns, slice(at, at + count * width), _DTYPES[width]))
            at += count * width
        return runs


class RowAddresses(NamedTuple):
    """Where a batch's rows lie, in the order in which lookup.c takes them; request: None if all rows are of one context.

    widths: bytes of a row's request, a context's ids, a row's ids, a context's numbers, a row's numbers.
    """

    rows: int
    candidate_ids: int
    context_ids: int
    request: int | None
    contexts: int
    candidate_numbers: int
    context_numbers: int
    widths: tuple[int, ...]


class Rows(Protocol):
    """A batch as a lookup on a CPU takes it: a row block, or `RowArrays`. C reads where they lie: arrays of a block, which are
    made when they are asked for, would take as long as a lookup of a few rows.
    """

    @property
    def request_of_row(self) -> npt.NDArray[np.int32]: ...
    @property
    def candidate_ids(self) -> Records: ...
    @property
    def context_ids(self) -> Records: ...
    @property
    def candidate_dense(self) -> Numbers: ...
    @property
    def context_dense(self) -> Numbers: ...
    @property
    def addresses(self) -> RowAddresses: ...


@dataclass(frozen=True, eq=False)
class RowArrays:
    """A batch of arrays that need not lie together; `of` makes one."""

    request_of_row: npt.NDArray[np.int32]
    candidate_ids: Records
    context_ids: Records
    candidate_dense: Numbers
    context_dense: Numbers

    @classmethod
    def of(cls, *arrays: npt.NDArray[Any]) -> Self:
        """In the order of the fields.

        Raises:
            ValueError: not as many rows, or contexts, of each.
        """
        made = cls(*(np.ascontiguousarray(array) for array in arrays))
        rows, own, of_contexts, own_numbers, numbers = map(len, arrays)
        if not (rows == own == own_numbers and of_contexts == numbers):
            raise ValueError(f"lookup rows: got {[a.shape for a in arrays]}, expected as many of rows, and as many of contexts")
        return made

    @property
    def addresses(self) -> RowAddresses:
        request, contexts = self.request_of_row, len(self.context_ids)
        sides = self.context_ids, self.candidate_ids, self.context_dense, self.candidate_dense
        of_context, own, numbers, own_numbers = [address(side) for side in sides]
        widths = request.itemsize, *(a.shape[1] * a.itemsize for a in sides)
        given = None if contexts == 1 else address(request)
        return RowAddresses(len(request), own, of_context, given, contexts, own_numbers, numbers, widths)


def address(array: npt.NDArray[np.generic]) -> int:
    """Of the first byte; quicker than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])
