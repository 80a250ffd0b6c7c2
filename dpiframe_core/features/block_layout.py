"""Where the ids and numbers of a `RowBlock` lie in its buffer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal
from zlib import crc32

import numpy as np

from kernels.lookup.batch_header import HEADER_WORDS
from kernels.lookup.id_record import IdRecord, carried_bytes

_ALIGN = 64
_KNOWN_OFFSETS = 4096  # sizes of blocks; requests come in few of them

IdSection = Literal["context_ids", "candidate_ids"]
Section = IdSection | Literal["context_dense", "candidate_dense"]
SECTIONS: tuple[Section, ...] = ("context_ids", "candidate_ids", "context_dense", "candidate_dense")


def section_of(scope: Literal["context", "candidate"], is_id: bool) -> Section:
    """Where a feature lies."""
    if scope == "context":
        return "context_ids" if is_id else "context_dense"
    return "candidate_ids" if is_id else "candidate_dense"


@dataclass(frozen=True, slots=True)
class Column:
    """Where a feature lies in a `RowBlock`: columns [start, start + width) of a section."""

    section: Section
    start: int
    width: int


@dataclass(frozen=True)
class BlockLayout:
    """The ids and how many numbers the rows and contexts of a `RowBlock` have. Filled by `FeatureSchema.block_layout`."""

    context_ids: IdRecord
    candidate_ids: IdRecord
    context_dense: int
    candidate_dense: int

    @cached_property
    def id_dtype(self) -> np.dtype[np.int32] | np.dtype[np.int64]:
        """Of widened ids: int32 while every table has fewer than 2^31 rows, else int64."""
        return np.dtype(np.int64) if 8 in self.context_ids.widths + self.candidate_ids.widths else np.dtype(np.int32)

    @cached_property
    def header(self) -> tuple[int, int, int, int, int]:
        """What a block's header tells of it: Cc, Ci, Dc, Di and a checksum of where the id columns lie."""
        widths = self.context_ids.widths, self.candidate_ids.widths
        places = crc32(bytes(sum(widths, ())) + repr(self.context_ids.offsets + self.candidate_ids.offsets).encode()) >> 1
        return len(widths[0]), len(widths[1]), self.context_dense, self.candidate_dense, places

    def offsets(self, rows: int, contexts: int) -> tuple[int, int, int, int, int, int]:
        """Byte offsets of (request_of_row, context_ids, candidate_ids, context_dense, candidate_dense) and the total size."""
        known = self._known.get((rows, contexts))
        if known is None:
            at, out = HEADER_WORDS * 4, []
            for i, width in enumerate(self.widths):
                out.append(at)
                at += -(-width * (contexts if i % 2 else rows) // _ALIGN) * _ALIGN
            known = out[0], out[1], out[2], out[3], out[4], at
            if len(self._known) < _KNOWN_OFFSETS:
                self._known[rows, contexts] = known
        return known

    @cached_property
    def widths(self) -> tuple[int, int, int, int, int]:
        """Bytes of a row or a context in each part of `offsets`; odd ones are the contexts'."""
        return 4, self.context_ids.nbytes, self.candidate_ids.nbytes, 4 * self.context_dense, 4 * self.candidate_dense

    @cached_property
    def carried_bytes(self) -> int:
        """Of a context, beside each row of a GPU's batch."""
        return carried_bytes(self.context_ids, self.context_dense)

    @cached_property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """(index in `offsets`, bytes a row or context) of the sections that there are but for `request_of_row`."""
        return tuple((i, width) for i, width in enumerate(self.widths) if width and i)

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[int, int, int, int, int, int]]:
        return {}
