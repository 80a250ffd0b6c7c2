"""What a whole multi-table lookup does, planned ahead as plain data: which id columns read which tables, and where each result
lands. Knows no weights and no device. embedding.py runs it on a GPU, cpu/lookup.py on a CPU, `reference` slowly anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from kernels.lookup.id_record import IdRecord, RowArrays, id_bytes

ALWAYS_ROW_0 = -(2**31)  # IdColumn.source of a numeric embedding: its table has one row and needs no id
NO_NUMBER = 2**31 - 1  # Slot.number of a slot that needs none


class Kind(IntEnum):
    """What a slot writes: pooled rows; row 0 times a number; the number itself; 1 where there is an id, 0 where padded."""

    GATHER = 0
    SCALE = 1
    COPY = 2
    MASK = 3


@dataclass(frozen=True, slots=True)
class TableShape:
    """rows x dim of a table and the dtype it is stored in. An int8 table has a scale: value = int8 * scale[column]."""

    rows: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class IdColumn:
    """One id a row, read through one table. `source` >= 0: candidate id column; < 0: context id column -1 - source.

    An id outside [0, rows of the table) reads row `oov`; -1 reads nothing if `may_pad`.
    """

    source: int
    table: int
    oov: int
    may_pad: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """`dim` consecutive output columns that start at `out`: id columns [first, first + columns) pooled by sum, mean or
    (`largest`) max. These read one table, from neighbouring ids of one side. A MASK slot has dim 1 and one id column, whose
    table it does not touch.

    `number` says where a SCALE or COPY slot finds its number, in the same way as `IdColumn.source`.
    """

    kind: Kind
    dim: int
    out: int
    first: int = 0
    columns: int = 0
    number: int = NO_NUMBER
    mean: bool = False
    largest: bool = False


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """All slots that write x[B, x_width], then those (of dim 1) that are summed into total[B, 1].

    Columns of x that no slot names are left alone: outputs that begin on aligned columns have gaps between them.
    `*_ids`: the id columns of the batch's contexts and rows; `*_numbers`: how many numbers they have.
    """

    tables: tuple[TableShape, ...]
    columns: tuple[IdColumn, ...]
    x_slots: tuple[Slot, ...]
    total_slots: tuple[Slot, ...]
    context_ids: IdRecord
    candidate_ids: IdRecord
    context_numbers: int
    candidate_numbers: int

    def __post_init__(self) -> None:
        for slot in (*self.x_slots, *self.total_slots):
            bag = self.columns[slot.first : slot.first + slot.columns]
            for i, column in enumerate(bag):
                step = i if bag[0].source >= 0 else -i
                if column != replace(bag[0], source=bag[0].source + step) or (column.source < 0) != (bag[0].source < 0):
                    raise ValueError(f"lookup slot at {slot.out}: got {column} after {bag[0]}, expected its table's next id")
                width, rows = self.id_place(column)[1], self.tables[column.table].rows
                if width != self.id_place(bag[0])[1] or width < id_bytes(rows):
                    raise ValueError(f"lookup slot at {slot.out}: got {width} bytes an id for {column}, expected one width for "
                                     f"a slot, and {id_bytes(rows)} or more for {rows} rows")  # fmt: skip

    def id_place(self, column: IdColumn) -> tuple[int, int]:
        """The first byte and the width of a column's id in a row's record of [context ids | candidate ids]."""
        if column.source == ALWAYS_ROW_0:
            return 0, 4
        if column.source < 0:
            return self.context_ids.offsets[-1 - column.source], self.context_ids.widths[-1 - column.source]
        return self.context_ids.nbytes + self.candidate_ids.offsets[column.source], self.candidate_ids.widths[column.source]

    def context_end(self, slots: Sequence[Slot]) -> int:
        """The bytes of a context's ids up to the last that these slots read."""
        read = (c for s in slots for c in self.columns[s.first : s.first + s.columns] if ALWAYS_ROW_0 < c.source < 0)
        return max((sum(self.id_place(c)) for c in read), default=0)

    @property
    def candidate_width(self) -> int:
        return len(self.candidate_ids.widths)

    @property
    def x_width(self) -> int:
        return max((s.out + s.dim for s in self.x_slots), default=0)

    @property
    def reads(self) -> tuple[Slot, ...]:
        """The slots that read a table."""
        return tuple(s for s in (*self.x_slots, *self.total_slots) if s.kind in (Kind.GATHER, Kind.SCALE))


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch's ids and numbers as tensors in host memory (pinned, where a GPU reads them in place). `rows` may be padded.

    header: int32[16], see batch_header.py: STAGED_ROWS is the true number of rows, or negative while rows are staged,
    and STAGED_CONTEXTS that of contexts;
    request_of_row: int32[B], -1 for padding, which comes last;
    *_ids: uint8[Q or B, bytes of an `IdRecord`]; `reference` takes them widened, int32 or int64 [Q or B, columns];
    *_numbers: float32[Q or B, *];
    carried: uint8[B, carried_bytes]: for each row the prefix of its context's ids, and its numbers (see `carried_bytes`); None:
    rows have none beside them.
    """

    header: torch.Tensor
    request_of_row: torch.Tensor
    context_ids: torch.Tensor
    candidate_ids: torch.Tensor
    context_numbers: torch.Tensor
    candidate_numbers: torch.Tensor
    carried: torch.Tensor | None = None


def rows_of(batch: Batch, rows: int) -> RowArrays:
    """The first rows of a batch, as a lookup on a CPU takes them."""
    own = (t.numpy()[:rows] for t in (batch.request_of_row, batch.candidate_ids))
    numbers = batch.candidate_numbers.numpy()[:rows], batch.context_numbers.numpy()
    return RowArrays.of(*own, batch.context_ids.numpy(), *numbers)
