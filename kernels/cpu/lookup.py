"""The multi-table lookup on a CPU: tables of one dim and dtype packed into one, so that a batch needs one gather per dim.

See `reference.lookup` for the plain version; a GPU runs lookup/embedding.py instead.
"""

import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from kernels.cpu.float_lookup import MORE, MOST_DIM, FloatLookup, FloatTables
from kernels.cpu.packed_tables import Floats, PackedGroup, bag_maxima, by_shape, group_factors, number_place, packed_table
from kernels.cpu.rows_c import RowsByC
from kernels.cpu.rows_numpy import RowsByNumpy, place, runs
from kernels.lookup.id_record import Rows
from kernels.lookup.plan import NO_NUMBER, Batch, Kind, LookupPlan, Slot, rows_of
from kernels.runtime.c_build import cpu_library

_PREFETCH_FROM = 2048  # from so many ids on embedding_bag, which prefetches, beats a plain gather: 2.2 times on cold rows
_MOST_COLUMNS = 4096  # of lookup.c


class PackedLookup:
    """Owns the packed copies of the tables. Safe to use from several threads.

    Args:
        tables: [rows, dim] in the plan's order: float32, float16, bfloat16, or int8 with scales.
        scales: for each int8 table its float32[dim]: a value is int8 * scale. None where a table is not int8.
        out_dtype: of x.

    Attributes:
        out_of_range: ids so far that were outside their table.
    """

    def __init__(
        self,
        plan: LookupPlan,
        tables: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor | None] | None = None,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plan, self.out_of_range = plan, 0
        self._out_dtype = out_dtype
        self._counting = threading.Lock()
        self._offsets: dict[tuple[PackedGroup, torch.dtype], torch.Tensor] = {}
        self._reads: dict[tuple[object, ...], tuple[RowsByNumpy, RowsByC | None]] = {}
        scales = scales or [None] * len(tables)
        self._x_groups = [self._group(slots, tables, scales) for slots in by_shape(plan, plan.x_slots)]
        self._total_groups = [
            self._group(slots, tables, scales, one_bag=not slots[0].largest) for slots in by_shape(plan, plan.total_slots)
        ]
        copies = [
            [(number_place(plan, s), s.out) for s in slots if s.kind == Kind.COPY] for slots in (plan.x_slots, plan.total_slots)
        ]
        self._x_copies = runs(copies[0])
        masks, widths = [s for s in plan.x_slots if s.kind == Kind.MASK], (*plan.candidate_ids.widths, *plan.context_ids.widths)
        places = [(place(plan.columns[s.first].source, plan.candidate_width), s.out) for s in masks]
        # Neighbours of one width lie side by side in a record.
        alike = [[pair for pair in places if widths[pair[0]] == width] for width in sorted(set(widths))]
        self._x_masks = [run for pairs in alike for run in runs(pairs, border=plan.candidate_width)]
        self._total_copies = torch.tensor([number for number, _ in copies[1]]) if copies[1] else None
        self._x_width = plan.x_width
        self._direct = not copies[0] and not masks and all(g.placed == ((0, 0, self._x_width),) for g in self._x_groups)
        self.float_tables, self._floats = self._tables_of_one_pass(), None
        numbers = [(s.number, s.out) for s in plan.x_slots if s.kind == Kind.COPY]
        if self.float_tables is not None:
            to = [at for s in plan.x_slots if s.columns for at in (s.out, *[MORE] * (s.columns - 1))]
            to = to or [-1] * self.float_tables.rows.columns
            self._floats = FloatLookup(self.float_tables, to, numbers, self._x_width)
        self._passes = [] if self._floats is not None else self._passes_of_groups(numbers)

    def __call__(self, batch: Batch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """x[rows, x_width] and total float32[rows, 1], as `reference.lookup`; None for an output the plan lacks."""
        return self.read(rows_of(batch, rows))

    def read(self, batch: Rows, into: torch.Tensor | None = None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The same for exactly the rows to read. `into`: x, if that is float32."""
        x = into if self._out_dtype == torch.float32 else None
        if self._floats is not None:
            x, total, _, outside = self._floats(batch.addresses, x=x)
            self.count(outside)
            return x, total
        for group, readers in self._passes:
            x, _, _, outside = group(batch.addresses, x=x)
            self._count(outside * readers)
        if self._passes and x is not None:
            return x, None
        request, candidate_ids, context_ids = batch.request_of_row, batch.candidate_ids, batch.context_ids
        numbers, context_numbers = batch.candidate_dense, batch.context_dense
        if self.plan.context_numbers:
            numbers = np.concatenate([numbers, context_numbers[request]], 1)
        found: dict[RowsByNumpy, torch.Tensor] = {}
        for reads, by_c in self._reads.values():
            at, outside = by_c(batch.addresses) if by_c else reads(request, candidate_ids, context_ids)
            found[reads] = torch.from_numpy(at)
            self._count(outside * reads.readers)
        x = total = None
        if self.plan.x_slots:
            x = self._x([self._pooled(g, found[g.reads], numbers) for g in self._x_groups], numbers)
            self._mask(x, batch)
        if self.plan.total_slots:
            for g in self._total_groups:
                one = self._pooled(g, found[g.reads], numbers)
                one = one.sum(1, keepdim=True) if g.largest else one
                total = one.float() if total is None else total.add_(one)
            if self._total_copies is not None:
                plain = torch.from_numpy(numbers).index_select(1, self._total_copies).sum(1, keepdim=True)
                total = plain if total is None else total.add_(plain)
        return x, total

    def _mask(self, x: torch.Tensor, batch: Rows) -> None:
        """Writes where sequences have an id and where they are padded."""
        for column, out, count in self._x_masks:
            if column < self.plan.candidate_width:
                ids = self.plan.candidate_ids.column(batch.candidate_ids, column, count)
            else:
                ids = self.plan.context_ids.column(batch.context_ids, column - self.plan.candidate_width, count)
                ids = ids if len(ids) == 1 else ids[batch.request_of_row]
            none = -1 if ids.dtype.kind == "i" else np.iinfo(ids.dtype).max
            if x.dtype == torch.float32:
                np.not_equal(ids, none, out=x.numpy()[:, out : out + count])
            else:
                x[:, out : out + count] = torch.from_numpy(ids != none)

    def _count(self, outside: int) -> None:
        if outside:
            with self._counting:
                self.out_of_range += outside

    def count(self, outside: int) -> None:
        """Adds ids that a pass over `float_tables` found outside; each of their readers has read them."""
        if outside:
            self._count(outside * sum(reads.readers for reads, _ in self._reads.values()))

    def _tables_of_one_pass(self) -> FloatTables | None:
        """What one pass of C reads: float32 rows and sums of them, of one set of id columns; else None."""
        groups = [*self._x_groups, *self._total_groups]
        if len(self._reads) != 1 or len(self._x_groups) > 1 or len(self._total_groups) > 1:
            return None
        ((_, by_c),) = self._reads.values()
        if by_c is None or (library := cpu_library()) is None or by_c.wide or not 0 < by_c.columns <= _MOST_COLUMNS:
            return None
        if not all(map(_plain, groups)):
            return None
        if self._x_masks or self._total_copies is not None or (self._x_groups and self._out_dtype != torch.float32):
            return None
        x_slots, total_slots = ([s for s in slots if s.columns] for slots in (self.plan.x_slots, self.plan.total_slots))
        if self.plan.x_slots and not x_slots:
            return None
        table, weights = (groups[0].weight if groups else None for groups in (self._x_groups, self._total_groups))
        of_weights = [s.number for s in total_slots for _ in range(s.columns)] or [NO_NUMBER] * by_c.columns
        of_rows = [s.number for s in x_slots for _ in range(s.columns)] or [NO_NUMBER] * by_c.columns
        return FloatTables(library, self.plan, by_c, table, weights, of_rows, of_weights)

    def _passes_of_groups(self, copies: Sequence[tuple[int, int]]) -> list[tuple[FloatLookup, int]]:
        """A pass of C for each group, of float32 rows that no sum is wanted of, and how many read its ids; or none. copies: of
        the first. Marks of ids are written by who reads these.
        """
        marks = dict[int, list[int]]()
        for s in self.plan.x_slots:
            if s.kind == Kind.MASK:
                marks.setdefault(self.plan.columns[s.first].source, []).append(s.out)
        library, passes = cpu_library(), list[tuple[FloatLookup, int]]()
        if library is None or self.plan.total_slots or self._out_dtype != torch.float32 or not all(map(_plain, self._x_groups)):
            return []
        for slots, group in zip(by_shape(self.plan, self.plan.x_slots), self._x_groups, strict=True):
            reads, by_c = next(pair for pair in self._reads.values() if pair[0] is group.reads)
            if by_c is None or by_c.wide or by_c.columns > _MOST_COLUMNS:
                return []
            numbers = [s.number for s in slots for _ in range(s.columns)]
            tables = FloatTables(library, self.plan, by_c, group.weight, None, numbers, [NO_NUMBER] * by_c.columns)
            to = [at for s in slots for at in (s.out, *[MORE] * (s.columns - 1))]
            read = [c for s in slots for c in self.plan.columns[s.first : s.first + s.columns]]
            own = [(i, out) for i, c in enumerate(read) if c.may_pad for out in marks.pop(c.source, ())]
            passes.append((FloatLookup(tables, to, [] if passes else copies, self._x_width, own), reads.readers))
        return [] if marks else passes

    def _x(self, pooled: Sequence[torch.Tensor], numbers: Floats) -> torch.Tensor:
        """The groups' columns and the plain numbers where x wants them."""
        if self._direct:
            return pooled[0].to(self._out_dtype)
        x = torch.empty(len(numbers), self._x_width, dtype=self._out_dtype)
        for group, own in zip(self._x_groups, pooled, strict=True):
            for column, out, count in group.placed:
                x[:, out : out + count] = own[:, column : column + count]
        for number, out, count in self._x_copies:
            x[:, out : out + count] = torch.from_numpy(numbers[:, number : number + count])
        return x

    def _pooled(self, group: PackedGroup, at: torch.Tensor, numbers: Floats) -> torch.Tensor:
        """[rows, bags * dim]: the sums of the bags, in float32; bags of one id may keep their dtype."""
        rows, columns = at.shape
        weight, bags = group.weight, len(group.starts) - 1
        factors = group_factors(group, at, numbers)
        plain = bags == columns and factors is None and not group.largest
        # embedding_bag would round sums of half-precision rows, and knows no int8.
        fused = (weight.dtype == torch.float32 and not group.largest) or (plain and group.scale is None)
        if fused and not (plain and at.numel() < _PREFETCH_FROM):
            offsets, flat = self._bags(group, at), None if factors is None else factors.view(-1)
            found = torch.embedding_bag(weight, at.view(-1), offsets, per_sample_weights=flat, include_last_offset=True)
            return found[0].view(rows, -1)
        values = torch.embedding(weight, at).float()
        if group.scale is not None:
            values *= group.scale
        if factors is not None:
            values *= factors[:, :, None]
        if group.largest:
            values = bag_maxima(values, at == group.reads.zero_row, group.starts)
        elif bags < columns:
            values = torch.stack([values[:, a:b].sum(1) for a, b in pairwise(group.starts)], 1)
        return values.view(rows, -1)

    def _bags(self, group: PackedGroup, at: torch.Tensor) -> torch.Tensor:
        """Where each bag of each row starts, and the last one ends; kept, as it depends on the number of rows alone."""
        (rows, columns), bags = at.shape, len(group.starts) - 1
        known = self._offsets.get((group, at.dtype))
        if known is None or known.shape[0] <= rows * bags:
            starts = torch.tensor(group.starts[:-1], dtype=at.dtype)
            known = (torch.arange(0, 2 * rows * columns, columns, dtype=at.dtype)[:, None] + starts).view(-1)
            self._offsets[group, at.dtype] = known
        return known[: rows * bags + 1]

    def _group(
        self,
        slots: Sequence[Slot],
        tables: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor | None],
        one_bag: bool = False,
    ) -> PackedGroup:
        """The packed table and the constants for slots of one shape; with `one_bag` all of them are summed into one column."""
        plan = self.plan
        columns = [c for s in slots for c in plan.columns[s.first : s.first + s.columns]]
        used = list(dict.fromkeys(c.table for c in columns))
        first_row = dict(zip(used, np.cumsum([0, *(tables[t].shape[0] for t in used)]).tolist(), strict=False))
        weight = packed_table([tables[t] for t in used])
        first_rows = [first_row[c.table] for c in columns]
        key = (tuple((c.source, plan.tables[c.table].rows, c.oov, c.may_pad) for c in columns), tuple(first_rows), len(weight))
        if key not in self._reads:
            where = plan, columns, first_rows, len(weight) - 1
            library = cpu_library()
            self._reads[key] = RowsByNumpy(*where), None if library is None else RowsByC(library, *where)
        reads = self._reads[key][0]
        reads.readers += 1
        starts = np.cumsum([0, *(s.columns for s in slots)]).tolist()
        dim = weight.shape[1]
        of_columns = [s for c in columns if (s := scales[c.table]) is not None]
        return PackedGroup(
            reads,
            weight,
            torch.stack(of_columns).float() if weight.dtype == torch.int8 else None,
            (0, len(columns)) if one_bag else tuple(starts),
            runs([(number_place(plan, s), at) for s, at in zip(slots, starts, strict=False) if s.kind == Kind.SCALE]),
            tuple(span for s, span in zip(slots, pairwise(starts), strict=True) if s.mean and s.columns > 1),
            slots[0].largest,
            len(columns),
            runs([(i * dim + e, s.out + e) for i, s in enumerate(slots) for e in range(dim)]),
        )


def _plain(group: PackedGroup) -> bool:
    """Whether lookup.c reads it: float32 rows, one by one or summed."""
    return not (group.means or group.largest) and group.weight.dtype == torch.float32 and group.weight.shape[1] <= MOST_DIM
