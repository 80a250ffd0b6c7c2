"""What crosses layers: the rows of a request or a batch, and the result of a batch. Plain NumPy, no torch, no CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import BlockLayout, Column, IdSection
from kernels.lookup.batch_header import HEADER_WORDS, HeaderWord
from kernels.lookup.id_record import IdRecord, Ids, Records, RowAddresses, address
from kernels.runtime import c_build

# Marks among ids: real ids are >= 0 and -1 is padding.
UNKNOWN, MISSING = -2, -3
_MAGIC = 0x44504902  # "DPI", layout version 2
_WORD = Struct("=i")
_HEADER = Struct(f"={HeaderWord.OOV_COUNT + 1}i")  # a microsecond less than an assignment of NumPy's

Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class RowBlock:
    """Encoded rows of one request (or of one batch): a flat buffer and where in it the sections lie.

    Row-major, so that joining requests into a batch and splitting an oversized one copy whole byte ranges, and so that the
    GPU reads the ids of a row from consecutive addresses. Context features are kept once per request: row `i` belongs to
    context `request_of_row[i]`. Filled by `Encoder`; a lane's pinned staging buffer is one too. Its fields never change;
    it is not frozen, as that would cost a microsecond at each request.

    Attributes:
        buffer: uint8[total], header first; all that another process needs.
        places: byte offsets in `buffer` of request_of_row, context_ids, candidate_ids, context_dense, candidate_dense; the end.
        base: what `request_of_row` counts the contexts from (a window's may not begin at the first).
        rows, contexts: n and q.
        oov_count: values of this block that met no vocabulary entry (for the answer; not part of the scores).
        staged: whether ids of rows that only files hold stand for the places to which `RowsAhead` reads them.
    """

    layout: BlockLayout
    rows: int
    contexts: int
    buffer: npt.NDArray[np.uint8]
    places: tuple[int, int, int, int, int, int]
    base: int = 0
    staged: bool = False

    # Views are made when they are first asked for: to batch a request takes none of them.

    @cached_property
    def request_of_row(self) -> npt.NDArray[np.int32]:
        """int32[n], values in [0, q). A view, unless the block is a window that does not begin at the first context."""
        request: npt.NDArray[np.int32] = np.ndarray((self.rows,), np.int32, self.buffer.data, self.places[0])
        return request - np.int32(self.base) if self.base else request

    @cached_property
    def context_ids(self) -> Records:
        """uint8[q, bytes of a context's ids], see `IdRecord`."""
        return np.ndarray((self.contexts, self.layout.context_ids.nbytes), np.uint8, self.buffer.data, self.places[1])

    @cached_property
    def candidate_ids(self) -> Records:
        """uint8[n, bytes of a row's ids], see `IdRecord`."""
        return np.ndarray((self.rows, self.layout.candidate_ids.nbytes), np.uint8, self.buffer.data, self.places[2])

    @cached_property
    def context_dense(self) -> Floats:
        """float32[q, Dc]."""
        return np.ndarray((self.contexts, self.layout.context_dense), np.float32, self.buffer.data, self.places[3])

    @cached_property
    def candidate_dense(self) -> Floats:
        """float32[n, Di]."""
        return np.ndarray((self.rows, self.layout.candidate_dense), np.float32, self.buffer.data, self.places[4])

    @property
    def dense(self) -> Floats:
        """All numbers, of contexts and of rows; between them 0 where alignment leaves a gap."""
        return self.buffer[self.places[3] : self.places[5]].view(np.float32)

    @property
    def addresses(self) -> RowAddresses:
        """For C, which reads the block while it is held."""
        at = addressof(c_char.from_buffer(self.buffer.data))  # a quarter of `address`'s time; a block may be written to
        request, of_context, own, numbers, own_numbers, _ = self.places
        given = None if self.contexts == 1 else address(self.request_of_row) if self.base else at + request
        return RowAddresses(
            self.rows, at + own, at + of_context, given, self.contexts, at + own_numbers, at + numbers, self.layout.widths
        )

    def carried(self, rows: int) -> Records:
        """uint8[rows, `carried_bytes`]: what the first rows have of their contexts beside them, where a GPU reads them."""
        prefix = self.layout.context_ids.prefix_bytes
        if not self.layout.carried_bytes:
            return np.zeros((rows, 0), np.uint8)
        of_row = self.request_of_row[:rows] if self.contexts > 1 else np.zeros(rows, np.int32)  # which have no choice
        return np.concatenate([self.context_ids[of_row, :prefix], self.context_dense.view(np.uint8)[of_row]], 1)

    @property
    def header(self) -> npt.NDArray[np.int32]:
        """int32[16]: magic, rows, contexts, the layout's five, oov_count; word 10 is the lane's."""
        return self.buffer[: HEADER_WORDS * 4].view(np.int32)

    @property
    def oov_count(self) -> int:
        return int(_WORD.unpack_from(self.buffer.data, 4 * HeaderWord.OOV_COUNT)[0])

    @property
    def id_places(self) -> int:
        """Ids that its rows and contexts have room for, the empty places of short lists among them."""
        layout = self.layout
        return self.rows * len(layout.candidate_ids.widths) + self.contexts * len(layout.context_ids.widths)

    @classmethod
    def allocate(cls, layout: BlockLayout, rows: int, contexts: int = 1, oov_count: int = 0) -> Self:
        """A block over fresh memory. Ids and dense values are zero."""
        return cls.formatted(np.zeros(layout.offsets(rows, contexts)[-1], np.uint8), layout, rows, contexts, oov_count)

    @classmethod
    def formatted(cls, zeros: npt.NDArray[np.uint8], layout: BlockLayout, rows: int, contexts: int, oov_count: int = 0) -> Self:
        """A block over given memory (zeros, at least `layout.offsets(rows, contexts)[-1]` of them), header and all."""
        block = cls.over(zeros, layout, rows, contexts)
        _HEADER.pack_into(zeros.data, 0, _MAGIC, rows, contexts, *layout.header, oov_count)
        return block

    @classmethod
    def over(cls, buffer: npt.NDArray[np.uint8], layout: BlockLayout, rows: int, contexts: int) -> Self:
        """A block over `buffer` (uint8, at least `layout.offsets(rows, contexts)[-1]` long). Does not touch the header."""
        return cls(layout, rows, contexts, buffer, layout.offsets(rows, contexts))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, layout: BlockLayout) -> Self:
        """Reads a block that another process wrote. Copies it only if it may not be written to.

        Raises:
            InputError: the bytes are not a block of this layout, or are cut short.
        """
        buffer = np.frombuffer(data, np.uint8)
        if not buffer.flags.writeable:
            buffer = buffer.copy()
        header = buffer[: HEADER_WORDS * 4].view(np.int32) if buffer.size >= HEADER_WORDS * 4 else np.zeros(0, np.int32)
        columns = header[HeaderWord.COLUMNS : HeaderWord.OOV_COUNT].tolist()
        if header.size == 0 or header[HeaderWord.MAGIC] != _MAGIC or tuple(columns) != layout.header:
            got = header[: HeaderWord.OOV_COUNT].tolist()
            raise InputError("row block header", got, f"magic {_MAGIC} and columns {layout.header}")
        rows, contexts = int(header[HeaderWord.ROWS]), int(header[HeaderWord.CONTEXTS])
        if rows < 0 or contexts < 0 or buffer.size < layout.offsets(rows, contexts)[-1]:
            raise InputError("row block size", buffer.size, f"the bytes of {rows} rows and {contexts} contexts")
        block = cls.over(buffer, layout, rows, contexts)
        block.check(layout)
        return block

    def check(self, layout: BlockLayout) -> None:
        """A block of this layout, whose rows all have a context.

        Raises:
            InputError: it is not; to score it would mix up features or requests.
        """
        if self.layout is not layout and self.layout != layout:
            raise InputError("row block layout", self.layout, f"the model's, {layout}")
        contexts = self.contexts
        if contexts == 1:  # rows have no choice, and `fill` gives them none
            return
        least, greatest = self._context_range(0, self.rows) if self.rows else (0, 0)
        if least < 0 or greatest >= contexts:
            raise InputError("row block request_of_row", [least, greatest], f"within [0, {contexts})")

    def _context_range(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last context of rows [start, stop). In C, as NumPy takes a tenth of an engine's time for it."""
        if (functions := c_build.request_extension()) is not None:
            least, greatest = functions.context_range(self.buffer, self.places[0] + 4 * start, stop - start)
            return least - self.base, greatest - self.base
        request = self.request_of_row[start:stop]
        return int(request.min()), int(request.max())

    def column(self, place: Column) -> npt.NDArray[Any]:
        """A feature's part, [n or q, width]: a writable view; ids have their narrow dtype, so that -1 reads as all ones."""
        section: npt.NDArray[Any] = getattr(self, place.section)
        if section.dtype != np.uint8:
            return section[:, place.start : place.start + place.width]
        record: IdRecord = getattr(self.layout, place.section)
        return record.column(section, place.start, place.width)

    def wide_ids(self, section: IdSection) -> Ids:
        """A copy of a side's ids, int32 or int64 [q, Cc] or [n, Ci], -1 where all ones."""
        record: IdRecord = getattr(self.layout, section)
        return record.widened(getattr(self, section), self.layout.id_dtype)

    def set_ids(self, section: IdSection, ids: npt.NDArray[np.integer[Any]]) -> None:
        """The reverse of `wide_ids`. Every id must be a row of its tables, or -1."""
        record: IdRecord = getattr(self.layout, section)
        record.pack(ids, getattr(self, section))

    def settle_ids(self, section: IdSection, ids: npt.NDArray[np.int64], stand_ins: npt.NDArray[np.int64]) -> int:
        """`set_ids` of ids [n, columns], a column after the other in memory, in which marks stand for values that have none:
        `stand_ins` [2, columns] has the ids for `UNKNOWN` and for `MISSING`. Returns how many were unknown.
        """
        record: IdRecord = getattr(self.layout, section)
        if (functions := c_build.request_extension()) is not None:
            at = self.places[1 if section == "context_ids" else 2]
            return functions.settle_ids(record.columns, ids.T, stand_ins, len(ids), self.buffer, at, record.nbytes)
        unknown = ids == UNKNOWN
        np.copyto(ids, stand_ins[0], where=unknown)
        np.copyto(ids, stand_ins[1], where=ids == MISSING)
        self.set_ids(section, ids)
        return int(np.count_nonzero(unknown))

    def fill(self, blocks: Sequence[RowBlock]) -> int:
        """Copies blocks of the same layout one after the other into the first rows and contexts. Returns the rows filled."""
        if (functions := c_build.request_extension()) is not None:
            return functions.fill(self.buffer, self.places, self.layout.sections, blocks)
        r = c = 0
        for b in blocks:
            rows, contexts = slice(r, r + b.rows), slice(c, c + b.contexts)
            self.candidate_ids[rows], self.candidate_dense[rows] = b.candidate_ids, b.candidate_dense
            self.context_ids[contexts], self.context_dense[contexts] = b.context_ids, b.context_dense
            self.request_of_row[rows] = b.request_of_row + c if b.contexts > 1 else c  # rows of one context have no choice
            r, c = rows.stop, contexts.stop
        return r

    def part(self, start: int, stop: int) -> RowBlock:
        """Rows [start, stop) as a block of their own, with only the contexts they use (contexts stay in order)."""
        used, request = np.unique(self.request_of_row[start:stop], return_inverse=True)
        out = RowBlock.allocate(self.layout, stop - start, len(used))
        out.staged = self.staged
        out.request_of_row[:] = request
        out.context_ids[:] = self.context_ids[used]
        out.context_dense[:] = self.context_dense[used]
        out.candidate_ids[:] = self.candidate_ids[start:stop]
        out.candidate_dense[:] = self.candidate_dense[start:stop]
        return out

    def window(self, start: int, stop: int) -> RowBlock:
        """`part` without a copy, where the contexts used lie side by side: its `buffer` and header are then this block's."""
        first, last = (0, 0) if self.contexts == 1 else self._context_range(start, stop)
        if last - first >= stop - start:
            return self.part(start, stop)
        layout, at = self.layout, self.places
        places = (
            at[0] + 4 * start,
            at[1] + first * layout.context_ids.nbytes,
            at[2] + start * layout.candidate_ids.nbytes,
            at[3] + first * layout.context_dense * 4,
            at[4] + start * layout.candidate_dense * 4,
            at[5],
        )
        return RowBlock(layout, stop - start, last + 1 - first, self.buffer, places, self.base + first, self.staged)


def checked_rows(blocks: Sequence[RowBlock], layout: BlockLayout, most: int) -> int:
    """How many rows a batch of these blocks has.

    Raises:
        InputError: a block of another layout, or with a row of no context; no rows; more rows or contexts than `most`.
    """
    for block in blocks:
        block.check(layout)
    rows, contexts = sum(b.rows for b in blocks), sum(b.contexts for b in blocks)
    if not 1 <= rows <= most:
        raise InputError("batch rows", rows, f"1 to {most}")
    if contexts > most:
        raise InputError("batch contexts", contexts, f"at most {most}")
    return rows


class BatchResult(NamedTuple):
    """What one run on a lane gives back. Filled by `Engine.run_batch`.

    Attributes:
        scores: float32[rows, tasks], in the order of the blocks given; owned by the caller.
        device_ms: from the hand-over to a lane until the scores lie in host memory, milliseconds; on a GPU the rows are
            staged within that time.
        bucket: rows of the captured graph that ran (CPU: rows that were computed).
    """

    scores: Floats
    device_ms: float
    bucket: int
