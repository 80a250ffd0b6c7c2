"""The multi-table lookup on a CPU: tables of one dim and dtype stacked into one, so that a batch needs one gather per dim.

See `reference.lookup` for the plain version; a GPU runs `embedding` instead.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kernels.lookup_plan import Batch, Kind, LookupPlan, Slot
from kernels.stack_rows import Ids, Run, StackRows, place, runs

Floats = npt.NDArray[np.float32]

_PREFETCH_FROM = 2048  # from so many ids on embedding_bag, which prefetches, beats a plain gather: 2.2 times on cold rows
_PAGE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Slots of one destination, dim and dtype, whose columns lie one slot after the other."""

    reads: StackRows
    weight: torch.Tensor  # [sum of rows + 1, dim]; the last row is zero, for padded entries
    scale: torch.Tensor | None  # int8: float32[columns, dim]
    starts: tuple[int, ...]  # first column of each bag, and the end
    scaled: tuple[Run, ...]  # from numbers to columns
    means: tuple[tuple[int, int], ...]  # bags [start, stop) that are averaged
    largest: bool  # bags are pooled by max
    placed: tuple[Run, ...]  # from this group's pooled columns to x's


class StackedLookup:
    """Owns the stacked copies of the tables. Safe to use from several threads.

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
        self._offsets: dict[tuple[_Group, torch.dtype], torch.Tensor] = {}
        self._reads: dict[tuple[object, ...], StackRows] = {}
        scales = scales or [None] * len(tables)
        self._x_groups = [self._group(slots, tables, scales) for slots in _by_shape(plan, plan.x_slots)]
        self._total_groups = [
            self._group(slots, tables, scales, one_bag=not slots[0].largest) for slots in _by_shape(plan, plan.total_slots)
        ]
        copies = [
            [(_number(plan, s), s.out) for s in slots if s.kind == Kind.COPY] for slots in (plan.x_slots, plan.total_slots)
        ]
        self._x_copies = runs(copies[0])
        masks = [
            (place(plan.columns[s.first].source, plan.candidate_width), s.out) for s in plan.x_slots if s.kind == Kind.MASK
        ]
        self._x_masks = runs(masks, border=plan.candidate_width)
        self._total_copies = torch.tensor([number for number, _ in copies[1]]) if copies[1] else None
        self._x_width = plan.x_width
        self._direct = not copies[0] and not masks and all(g.placed == ((0, 0, self._x_width),) for g in self._x_groups)

    def __call__(self, batch: Batch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """x[rows, x_width] and total float32[rows, 1], as `reference.lookup`; None for an output the plan lacks."""
        return self.read(
            batch.request_of_row.numpy()[:rows],
            batch.candidate_ids.numpy()[:rows],
            batch.context_ids.numpy(),
            batch.candidate_numbers.numpy()[:rows],
            batch.context_numbers.numpy(),
        )

    def read(
        self,
        request: npt.NDArray[np.int32],
        candidate_ids: Ids,
        context_ids: Ids,
        candidate_numbers: Floats,
        context_numbers: Floats,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The same for the arrays of exactly the rows to read (see `Batch`)."""
        numbers = candidate_numbers
        if self.plan.context_numbers:
            numbers = np.concatenate([candidate_numbers, context_numbers[request]], 1)
        found: dict[StackRows, torch.Tensor] = {}
        for reads in self._reads.values():
            at, outside = reads(request, candidate_ids, context_ids)
            found[reads] = torch.from_numpy(at)
            if outside:
                with self._counting:
                    self.out_of_range += outside * reads.readers
        x = total = None
        if self.plan.x_slots:
            x = self._x([self._pooled(g, found[g.reads], numbers) for g in self._x_groups], numbers)
            for column, out, count in self._x_masks:
                start = column - self.plan.candidate_width
                own = candidate_ids[:, column : column + count] if start < 0 else context_ids[request, start : start + count]
                x[:, out : out + count] = torch.from_numpy(own != -1)
        if self.plan.total_slots:
            for g in self._total_groups:
                one = self._pooled(g, found[g.reads], numbers)
                one = one.sum(1, keepdim=True) if g.largest else one
                total = one.float() if total is None else total.add_(one)
            if self._total_copies is not None:
                plain = torch.from_numpy(numbers).index_select(1, self._total_copies).sum(1, keepdim=True)
                total = plain if total is None else total.add_(plain)
        return x, total

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

    def _pooled(self, group: _Group, at: torch.Tensor, numbers: Floats) -> torch.Tensor:
        """[rows, bags * dim]: the sums of the bags, in float32; bags of one id may keep their dtype."""
        rows, columns = at.shape
        weight, bags = group.weight, len(group.starts) - 1
        factors = _factors(group, at, numbers)
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
            values = _maxima(values, at == group.reads.zero_row, group.starts)
        elif bags < columns:
            values = torch.stack([values[:, a:b].sum(1) for a, b in pairwise(group.starts)], 1)
        return values.view(rows, -1)

    def _bags(self, group: _Group, at: torch.Tensor) -> torch.Tensor:
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
    ) -> _Group:
        """The stack and the constants for slots of one shape; with `one_bag` all of them are summed into one column."""
        plan = self.plan
        columns = [c for s in slots for c in plan.columns[s.first : s.first + s.columns]]
        used = list(dict.fromkeys(c.table for c in columns))
        first_row = dict(zip(used, np.cumsum([0, *(tables[t].shape[0] for t in used)]).tolist(), strict=False))
        weight = _stacked([tables[t] for t in used])
        first_rows = [first_row[c.table] for c in columns]
        key = (tuple((c.source, plan.tables[c.table].rows, c.oov, c.may_pad) for c in columns), tuple(first_rows), len(weight))
        reads = self._reads.setdefault(key, StackRows(plan, columns, first_rows, len(weight) - 1))
        reads.readers += 1
        starts = np.cumsum([0, *(s.columns for s in slots)]).tolist()
        dim = weight.shape[1]
        of_columns = [s for c in columns if (s := scales[c.table]) is not None]
        return _Group(
            reads,
            weight,
            torch.stack(of_columns).float() if weight.dtype == torch.int8 else None,
            (0, len(columns)) if one_bag else tuple(starts),
            runs([(_number(plan, s), at) for s, at in zip(slots, starts, strict=False) if s.kind == Kind.SCALE]),
            tuple(span for s, span in zip(slots, pairwise(starts), strict=True) if s.mean and s.columns > 1),
            slots[0].largest,
            runs([(i * dim + e, s.out + e) for i, s in enumerate(slots) for e in range(dim)]),
        )


def _factors(group: _Group, at: torch.Tensor, numbers: Floats) -> torch.Tensor | None:
    """float32[rows, columns]: what each row that is read is multiplied by: a number, or 1 / (values of its bag)."""
    if not group.scaled and not group.means:
        return None
    factors = np.ones(at.shape, np.float32)
    for number, column, count in group.scaled:
        factors[:, column : column + count] = numbers[:, number : number + count]
    for start, stop in group.means:
        found = np.count_nonzero(at.numpy()[:, start:stop] != group.reads.zero_row, 1)
        factors[:, start:stop] = 1 / np.maximum(found, 1)[:, None]
    return torch.from_numpy(factors)


def _maxima(values: torch.Tensor, padded: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """[rows, bags, dim]: the largest values[rows, columns, dim] of each bag, 0 for one without values."""
    known = values.masked_fill(padded[:, :, None], -torch.inf)
    largest = torch.stack([known[:, a:b].amax(1) for a, b in pairwise(starts)], 1)
    empty = torch.stack([padded[:, a:b].all(1) for a, b in pairwise(starts)], 1)
    return largest.masked_fill_(empty[:, :, None], 0.0)


def _stacked(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tables' rows one after the other and a row of zeros, from a page's border on.

    NumPy asks the kernel for huge pages, torch does not: 1.45 times the speed on rows that no cache holds (33 M x 16 float32).
    """
    rows, dim, dtype = sum(t.shape[0] for t in tables) + 1, tables[0].shape[1], tables[0].dtype
    size = rows * dim * dtype.itemsize
    memory = np.empty(size + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    weight = torch.from_numpy(memory[start : start + size]).view(dtype).view(rows, dim)
    torch.cat(list(tables), out=weight[:-1])
    weight[-1] = 0
    return weight


def _by_shape(plan: LookupPlan, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots that read tables, by dim, dtype and whether they are pooled by max."""
    groups: dict[tuple[int, torch.dtype, bool], list[Slot]] = {}
    for slot in slots:
        if slot.kind in (Kind.GATHER, Kind.SCALE):
            shape = plan.tables[plan.columns[slot.first].table]
            groups.setdefault((shape.dim, shape.dtype, slot.largest), []).append(slot)
    return list(groups.values())


def _number(plan: LookupPlan, slot: Slot) -> int:
    """A slot's number among [candidate numbers | context numbers]."""
    return place(slot.number, plan.candidate_numbers)
