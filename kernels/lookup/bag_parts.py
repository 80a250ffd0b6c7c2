"""How the bags of a plan are cut into parts of about as many ids each, which threads take one by one (bags.cuh): so none reads
a long bag alone. Knows no device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd

from kernels.lookup.plan import Kind, LookupPlan, Slot
from kernels.lookup.units import Unit, units_of

Rows = Enum("Rows", ("ALONE", "SOME", "OTHER"))  # of a launch, to a multiprocessor: one at most; three to eight; others
FLIGHT = 8  # rows of a part that a thread has in flight, at most (tiling.py)
# Ids of a long bag. Where none is, a thread a column vector reads them as fast: 1,024 x 26 bags of 10, dim 16, 13 % faster.
# Rows of several vectors by parts: bags of 10, dim 128, float16, 1,024 rows 19.6 us became 13.9, of 3 7.1 became 8.2; of eight
# vectors 64 rows 4.9 became 3.5, 1,024 9.2 8.6, 4,096 30.0 25.1; of four 1,024 rows 5.7 became 6.8 (H200).
LONG, LONG_WIDE, WIDE_VECTORS = 16, 8, 8
FAR = 1  # in tiers: all rows of a part are looked for once, and are on their way before one is used
FARTHER = 0  # where many lie in the host's memory: one table after the other, see `far_tiling`
# Of a part, at most. Where a block has one row alone, its parts are read all at once. Of some rows a multiprocessor no warp is
# to wait for one long part. Of more, a bag of 100 makes four, and a row's partial sums take 2 kB (128 columns).
MOST_IDS = {Rows.ALONE: FLIGHT, Rows.SOME: 2 * FLIGHT, Rows.OTHER: 4 * FLIGHT}
PART_BYTES = 48, 64  # of a part and of a join in shared memory: bags.cuh's Part; in tiers
_MOST_RECORDS = 320  # parts and joins, in 15 kB of shared memory
_MOST_SUM_BYTES = {Rows.ALONE: 24 << 10, Rows.SOME: 8 << 10, Rows.OTHER: 8 << 10}  # of a row
_WARP = 32
_WHOLE_BAG = 0xFFFF


@dataclass(frozen=True, slots=True)
class BagParts:
    """Units as bags.cuh reads them: `team` threads take one, each a vector of its columns.

    parts: runs of a bag's ids, those of the most ids first; `number` is the place of a part's sum among `sums` of a row, or
    says that it is the whole bag. singles: of one id. joins: bags of several parts: of `ids` sums, from `number` on. columns:
    of a sum.
    """

    team: int = 1
    columns: int = 0
    sums: int = 0
    parts: tuple[Unit, ...] = ()
    singles: tuple[Unit, ...] = ()
    joins: tuple[Unit, ...] = ()

    @property
    def units(self) -> tuple[Unit, ...]:
        """In the order of their records."""
        return *self.parts, *self.singles, *self.joins

    @property
    def read_bytes(self) -> int:
        """Of all that a row reads."""
        return sum(part.ids * part.row_bytes for part in (*self.parts, *self.singles) if part.how.counted)

    @property
    def sum_bytes(self) -> int:
        """Of a row's partial sums, each with its number of rows."""
        return self.sums * (self.columns + 4) * 4

    def shared_bytes(self, rows: int, tiers: bool = False) -> int:
        """Of a block: parts, joins, the counter, and sums."""
        records = len(self.units)
        return records * PART_BYTES[tiers] + 16 + rows * self.sum_bytes if records else 0


def rows_of(rows: int, processors: int) -> Rows:
    return Rows.ALONE if rows <= processors else Rows.SOME if 2 * processors < rows <= 8 * processors else Rows.OTHER


def bag_parts(plan: LookupPlan, vector: int, most_ids: int | None = None, of: Rows = Rows.OTHER) -> tuple[BagParts, list[Slot]]:
    """The parts of all bags of x whose columns are vectors, with the slots of one id beside them; and the slots that are
    neither. No parts where no bag is long, or where they would not fit. most_ids: of a bag that is not long; None: as its
    columns have it. of: for launches of which rows. Bags of at most LONG ids stay whole, in tiers as elsewhere: so a row's
    sums have the same bits wherever its tables lie.
    """
    wide = [s for s in plan.x_slots if s.kind == Kind.GATHER and s.dim % vector == s.out % vector == 0]
    most = MOST_IDS[of]
    while any(s.columns > (_short(s, vector) if most_ids is None else most_ids) for s in wide):
        made = _cut(plan, wide, vector, most)
        if len(made.units) <= _MOST_RECORDS and made.sum_bytes <= _MOST_SUM_BYTES[of]:
            return made, [s for s in plan.x_slots if s not in wide]
        if not made.joins:
            break
        most *= 2
    return BagParts(), list(plan.x_slots)


def _short(slot: Slot, vector: int) -> int:
    return LONG_WIDE if slot.dim // vector >= WIDE_VECTORS else LONG


def _cut(plan: LookupPlan, slots: Sequence[Slot], vector: int, most: int) -> BagParts:
    together = gcd(*(s.dim // vector for s in slots))
    team = next(t for t in range(min(_WARP, together), 0, -1) if together % t == 0)
    parts: list[Unit] = []
    singles: list[Unit] = []
    joins: list[Unit] = []
    sums = 0
    for slot in slots:
        runs = list(_runs(slot.columns, most if slot.columns > LONG else slot.columns))
        for unit in units_of(plan, slot, vector)[::team]:
            if len(runs) == 1:
                (parts if slot.columns > 1 else singles).append(replace(unit, number=_WHOLE_BAG))
                continue
            joins.append(replace(unit, ids=len(runs), number=sums))
            for begin, end in runs:
                parts.append(replace(unit, id=unit.id + begin * unit.how.id_bytes, ids=end - begin, number=sums))
                sums += 1
    parts.sort(key=lambda part: part.ids, reverse=True)
    return BagParts(team, team * vector, sums, tuple(parts), tuple(singles), tuple(joins))


def _runs(ids: int, most: int) -> Iterator[tuple[int, int]]:
    """`ids` in runs of at most `most`, of about as many reads of `FLIGHT` ids each."""
    reads, count = -(-ids // FLIGHT), -(-ids // most)
    for i in range(count):
        yield reads * i // count * FLIGHT, min(ids, reads * (i + 1) // count * FLIGHT)
