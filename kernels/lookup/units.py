"""A lookup's plan as its kernel reads it (unit_records.cuh): units, each a few neighbouring output columns of one slot.
Knows no device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.lookup.descriptors import record
from kernels.lookup.plan import Kind, LookupPlan, Slot

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}  # of tables, as row_loads.cuh numbers them
_UNIT = record("id <u2, ids <u2, number <u2, row_bytes <u2, out <i4, how <i4")
_FAR = record("oov <i8, table <i4, offset <i4")

# The bytes of its word that an id at byte 0 takes, as __byte_perm selects them; 4 to 7 give zero. A byte further adds 0x11.
_PICK = {0: 0, 1: 0x4440, 2: 0x4410, 4: 0x3210, 8: 0x3210}


@dataclass(frozen=True, slots=True)
class How:
    """How a unit is read, in one word, whose fields row_loads.cuh names alike (HOW_*).

    dtype: of `DTYPES`. mean, largest: how several ids are pooled. may_pad: an id of all ones is padding. counted: ids outside
    their table are counted here, by one unit of a slot. width: output columns, 15 for any more. id_bytes: of each of its ids.
    """

    kind: Kind
    dtype: int = 0
    mean: bool = False
    may_pad: bool = False
    counted: bool = False
    largest: bool = False
    width: int = 1
    id_bytes: int = 0

    @property
    def word(self) -> int:
        flags = self.mean << 4 | self.may_pad << 5 | self.counted << 6 | self.largest << 7
        return self.kind | self.dtype << 2 | flags | min(self.width, 15) << 8 | self.id_bytes << 12 | _PICK[self.id_bytes] << 16


@dataclass(frozen=True, slots=True)
class Unit:
    """Fields of unit_records.cuh's Unit, and of its Far.

    id: the first byte of its first id among a row's [context | candidate] ids. ids: how many it pools. number: the place of its
    number among a row's. row_bytes: of a row of its table. out: its first column. table, oov: which it reads, and the row of
    ids outside. offset: its first byte in a row.
    """

    how: How
    out: int
    id: int = 0
    ids: int = 0
    number: int = 0
    row_bytes: int = 0
    table: int = 0
    oov: int = 0
    offset: int = 0


def units_of(plan: LookupPlan, slot: Slot, vector: int) -> list[Unit]:
    """The units of a slot: `vector` columns wide where table rows and output columns stay aligned, else 1."""
    number = 0
    if slot.kind in (Kind.SCALE, Kind.COPY):
        number = slot.number + plan.context_numbers if slot.number >= 0 else -1 - slot.number
    if slot.kind == Kind.COPY:
        return [Unit(How(slot.kind), slot.out, number=number)]
    column = plan.columns[slot.first]
    dtype, dim = plan.tables[column.table].dtype, plan.tables[column.table].dim
    at, id_bytes = plan.id_place(column)
    if slot.kind == Kind.MASK:
        return [Unit(How(slot.kind, may_pad=column.may_pad, id_bytes=id_bytes), slot.out, id=at, ids=1)]
    width = vector if dim % vector == 0 and slot.out % vector == 0 else 1
    how = How(
        slot.kind, dtype=DTYPES[dtype], mean=slot.mean, may_pad=column.may_pad, largest=slot.largest, width=width,
        id_bytes=id_bytes,
    )  # fmt: skip
    first = Unit(
        replace(how, counted=True), slot.out, id=at, ids=slot.columns, number=number, row_bytes=dim * dtype.itemsize,
        table=column.table, oov=column.oov,
    )  # fmt: skip
    others = (replace(first, how=how, out=slot.out + e, offset=e * dtype.itemsize) for e in range(width, dim, width))
    return [first, *others]


def placed(units: Sequence[Unit], once: Sequence[Unit], others: Sequence[Unit], end: int, start: int) -> list[Unit]:
    """All these units with their ids where the kernel finds them: those of a row's context in that one's first `start` bytes, a
    row's own behind these; and there, too, those of a context whose history is written once.

    end: the bytes of a context's ids.
    """

    def of_row(u: Unit) -> Unit:
        return u if u.id < end else replace(u, id=u.id - end + start)

    return [*map(of_row, units), *(replace(u, id=u.id + start) for u in once), *map(of_row, others)]


def is_once(slot: Slot, once: Sequence[tuple[int, int]]) -> bool:
    """Whether a slot is written but once a context; raises ValueError if it is so in part, pools, or has a number."""
    end = slot.out + slot.dim
    spans = [span for span in once if slot.out < span[1] and span[0] < end]
    one_id = slot.columns == 1 and slot.kind in (Kind.GATHER, Kind.MASK)
    if spans and (not one_id or slot.out < spans[0][0] or end > spans[0][1]):
        raise ValueError(f"lookup columns once a context: got {slot} at {spans[0]}, expected whole slots of one id each")
    return bool(spans)


def dtype_set(plan: LookupPlan, slots: Sequence[Slot]) -> int:
    """The bit set of the dtypes of the slots' tables."""
    own = {DTYPES[plan.tables[plan.columns[s.first].table].dtype] for s in slots if s.kind in (Kind.GATHER, Kind.SCALE)}
    return sum(1 << dtype for dtype in own) or 1


def units_image(units: Sequence[Unit], zeros: int, tiers: bool = False) -> np.ndarray:
    """unit_records.cuh's Units, one record, with so many zeros; where tables lie is 0 yet."""
    n = len(units)
    both_generations = n, 2
    more = [("near", "<i8", both_generations), ("ranks", "<u8", both_generations)] if tiers else []
    image = np.zeros(1, np.dtype([
        ("base", "<u8", both_generations), ("limit", "<i8", both_generations), ("unit", _UNIT, n),
        ("scale", "<u8", both_generations), *more, ("far", _FAR, n), ("zeros", "<f4", zeros),
    ]))  # fmt: skip
    image["unit"][0] = np.array([(u.id, u.ids, u.number, u.row_bytes, u.out, u.how.word) for u in units], _UNIT)
    image["far"][0] = np.array([(u.oov, u.table, u.offset) for u in units], _FAR)
    return image
