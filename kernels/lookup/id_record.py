"""How the ids of one row lie side by side: as few bytes a column as its tables need, the widest columns first, and sequences
behind all others; and what a lookup on a CPU takes of a batch. Plain NumPy, no torch: host code fills such records, a lookup on
a GPU reads them in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

MOST_CARRIED = 64  # bytes, see `carried_bytes`
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
    """The id columns of one side, context or candidate.

    widths: bytes of each column's id: 1, 2, 4 or 8. behind: the columns that lie behind all others, so that these are a prefix.
    """

    widths: tuple[int, ...] = ()
    behind: frozenset[int] = frozenset()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each column: aligned to its width, as wider columns come first and equal ones keep their order."""
        out = [0] * len(self.widths)
        for columns, at, width in self._runs:
            for i, column in enumerate(columns):
                out[column] = at + i * width
        return tuple(out)

    @cached_property
    def prefix_bytes(self) -> int:
        """Of the columns that are not behind, in whole words, as `nbytes` has them."""
        return self._whole(sum(width for column, width in enumerate(self.widths) if column not in self.behind))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a record: whole 4-byte words (8, with int64 ids), so that columns are aligned in every record."""
        return self.prefix_bytes + self._whole(sum(self.widths[column] for column in self.behind))

    def _whole(self, size: int) -> int:
        word = max(4, *self.widths, 0)
        return -(-size // word) * word

    def column(self, records: Records, start: int, count: int) -> npt.NDArray[Any]:
        """Columns [start, start + count), equally wide, of uint8[n, nbytes]: a writable view in their own dtype."""
        at, width = self.offsets[start], self.widths[start]
        return records[:, at : at + count * width].view(_DTYPES[width])

    def pack(self, ids: npt.NDArray[np.integer[Any]], records: Records) -> None:
        """Writes ids[n, columns], which must fit, into uint8[n, nbytes]."""
        for columns, at, width in self._runs:
            records[:, at : at + len(columns) * width].view(_DTYPES[width])[:] = ids[:, _together(columns)]

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
        for columns, at, width in self._runs:
            own = _DTYPES[width]
            ids = records[:, at : at + len(columns) * width].view(own)
            out[:, _together(columns)] = ids if own.kind == "i" else (ids + own.type(1)).astype(dtype) - 1
        return out

    @cached_property
    def _runs(self) -> list[tuple[list[int], int, int]]:
        """Columns that lie side by side, all of one width, with the first one's byte and that width."""
        runs: list[tuple[list[int], int, int]] = []
        for is_behind, at in ((False, 0), (True, self.prefix_bytes)):
            own = [column for column in range(len(self.widths)) if (column in self.behind) == is_behind]
            for width in (8, 4, 2, 1):
                if columns := [column for column in own if self.widths[column] == width]:
                    runs.append((columns, at, width))
                    at += len(columns) * width
        return runs


def carried_bytes(context_ids: IdRecord, numbers: int) -> int:
    """Bytes of a context that a GPU's batch has beside each row: the prefix of its ids, and its numbers; 0 where they are many.
    So a row's block makes no second trip over the bus for them, to lines that other blocks read, too.
    """
    size = context_ids.prefix_bytes + 4 * numbers
    return size if size <= MOST_CARRIED else 0


def _together(columns: list[int]) -> slice | list[int]:
    """A slice of columns that follow one another takes no gather."""
    first, end = columns[0], columns[-1] + 1
    return slice(first, end) if end - first == len(columns) else columns


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
