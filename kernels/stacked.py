"""The multi-table lookup on a CPU: tables of one dim and dtype stacked into one, so that a batch needs one gather per dim.

See `reference.lookup` for the plain version; a GPU runs `embedding` instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.lookup_plan import ALWAYS_ROW_0, Batch, Kind, LookupPlan, Slot


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Slots of one dim and dtype (and one destination), and the id columns they read, in slot order."""

    slots: tuple[Slot, ...]
    weight: torch.Tensor  # [sum of rows + 1, dim]; the last row is zero, for padded entries
    source: npt.NDArray[np.int64]  # column of [candidate ids | context ids], one per id column of the group
    rows: npt.NDArray[np.uint64]  # rows of each column's table
    oov: npt.NDArray[np.int64]  # each column's out-of-vocabulary row, within the stack
    offset: npt.NDArray[np.int64]  # first row of each column's table within the stack
    counted: npt.NDArray[np.bool_]  # False where the id is a constant
    may_pad: npt.NDArray[np.bool_]
    in_order: bool  # source is simply 0, 1, 2, ..


class StackedLookup:
    """Owns the stacked copies of the tables. `out_of_range` counts ids that were outside their table."""

    def __init__(self, plan: LookupPlan, tables: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.out_of_range = 0
        self._x_groups = _groups(plan, plan.x_slots, tables)
        self._total_groups = _groups(plan, plan.total_slots, tables)
        self._direct = len(self._x_groups) == 1 and self._x_groups[0].slots == plan.x_slots and _plain(plan.x_slots)

    def __call__(self, batch: Batch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """x float32[rows, x_width] and total float32[rows, 1], as `reference.lookup`; None for an output the plan lacks."""
        request = batch.request_of_row.numpy()[:rows]
        ids, numbers = batch.candidate_ids.numpy()[:rows], batch.candidate_numbers.numpy()[:rows]
        if self.plan.context_width:
            ids = np.concatenate([ids, batch.context_ids.numpy()[request]], 1)
        if self.plan.context_numbers:
            numbers = np.concatenate([numbers, batch.context_numbers.numpy()[request]], 1)
        number = torch.from_numpy(numbers)

        x = total = None
        if self._direct:
            x = self._gather(self._x_groups[0], ids, rows).view(rows, -1)
        elif self.plan.x_slots:
            x = torch.empty(rows, self.plan.x_width)
            for group in self._x_groups:
                self._place(group, ids, number, rows, x)
            for slot in self.plan.x_slots:
                if slot.kind == Kind.COPY:
                    x[:, slot.out] = number[:, self._number(slot)]
        if self.plan.total_slots:
            total = torch.zeros(rows, 1)
            for group in self._total_groups:
                gathered = self._gather(group, ids, rows)
                self._scale(group, gathered, number)
                if all(s.columns == 1 for s in group.slots):
                    total += gathered.sum(1)
                else:
                    for slot, pooled in self._pooled(group, gathered):
                        total += self._averaged(slot, pooled, ids, rows)
            for slot in self.plan.total_slots:
                if slot.kind == Kind.COPY:
                    total[:, 0] += number[:, self._number(slot)]
        return x, total

    def _gather(self, group: _Group, ids: npt.NDArray[np.integer], rows: int) -> torch.Tensor:
        """float32[rows, id columns of the group, dim]."""
        own = (ids if group.in_order else ids.take(group.source, 1)).astype(np.int64)
        # Seen as unsigned, a negative id is larger than any table.
        outside = own.view(np.uint64) >= group.rows
        flat = own + group.offset
        if outside.any():
            padded = (own == -1) & group.may_pad
            flat = np.where(outside, np.where(padded, group.weight.shape[0] - 1, group.oov), flat)
            self.out_of_range += int((outside & ~padded & group.counted).sum())
        gathered = group.weight.index_select(0, torch.from_numpy(flat.reshape(-1)))
        return gathered.float().view(rows, len(group.source), -1)

    def _scale(self, group: _Group, gathered: torch.Tensor, number: torch.Tensor) -> None:
        at = 0
        for slot in group.slots:
            if slot.kind == Kind.SCALE:
                gathered[:, at] *= number[:, self._number(slot), None]
            at += slot.columns

    def _pooled(self, group: _Group, gathered: torch.Tensor) -> list[tuple[Slot, torch.Tensor]]:
        at, out = 0, []
        for slot in group.slots:
            out.append((slot, gathered[:, at] if slot.columns == 1 else gathered[:, at : at + slot.columns].sum(1)))
            at += slot.columns
        return out

    def _place(self, group: _Group, ids: npt.NDArray[np.integer], number: torch.Tensor, rows: int, x: torch.Tensor) -> None:
        gathered = self._gather(group, ids, rows)
        self._scale(group, gathered, number)
        run: list[Slot] = []  # slots that lie side by side in the group and in x: one copy for all of them
        at = 0
        for slot in (*group.slots, None):
            if slot is not None and slot.columns == 1 and (not run or slot.out == run[-1].out + slot.dim):
                run.append(slot)
                continue
            if run:
                x[:, run[0].out : run[-1].out + run[-1].dim] = gathered[:, at : at + len(run)].flatten(1)
                at += len(run)
            run = []
            if slot is None:
                break
            if slot.columns == 1:
                run = [slot]
                continue
            pooled = gathered[:, at : at + slot.columns].sum(1)
            x[:, slot.out : slot.out + slot.dim] = self._averaged(slot, pooled, ids, rows)
            at += slot.columns

    def _averaged(self, slot: Slot, pooled: torch.Tensor, ids: npt.NDArray[np.integer], rows: int) -> torch.Tensor:
        if not slot.mean:
            return pooled
        found = np.zeros((rows, 1), np.float32)
        for column in self.plan.columns[slot.first : slot.first + slot.columns]:
            own = ids[:, [_source(self.plan, column.source)]]
            found += ~((own == -1) & column.may_pad)
        return pooled / torch.from_numpy(np.maximum(found, 1))

    def _number(self, slot: Slot) -> int:
        return slot.number if slot.number >= 0 else self.plan.candidate_numbers - 1 - slot.number


def _groups(plan: LookupPlan, slots: Sequence[Slot], tables: Sequence[torch.Tensor]) -> tuple[_Group, ...]:
    by_shape: dict[tuple[int, torch.dtype], list[Slot]] = {}
    for slot in slots:
        if slot.kind != Kind.COPY:
            shape = plan.tables[plan.columns[slot.first].table]
            by_shape.setdefault((shape.dim, shape.dtype), []).append(slot)
    return tuple(_group(plan, members, tables) for members in by_shape.values())


def _group(plan: LookupPlan, slots: Sequence[Slot], tables: Sequence[torch.Tensor]) -> _Group:
    columns = [c for s in slots for c in plan.columns[s.first : s.first + s.columns]]
    used = list(dict.fromkeys(c.table for c in columns))
    starts = dict(zip(used, np.cumsum([0, *(tables[t].shape[0] for t in used[:-1])]).tolist(), strict=True))
    zero = torch.zeros(1, tables[used[0]].shape[1], dtype=tables[used[0]].dtype)
    source = np.array([_source(plan, c.source) for c in columns])
    offset = np.array([starts[c.table] for c in columns])
    return _Group(
        tuple(slots),
        torch.cat([*(tables[t] for t in used), zero]),
        source,
        np.array([plan.tables[c.table].rows for c in columns], np.uint64),
        offset + np.array([c.oov for c in columns]),
        offset,
        np.array([c.source != ALWAYS_ROW_0 for c in columns]),
        np.array([c.may_pad for c in columns]),
        bool(plan.context_width == 0 and np.array_equal(source, np.arange(plan.candidate_width))),
    )


def _source(plan: LookupPlan, source: int) -> int:
    """An id column's place in [candidate ids | context ids]; a constant reads any column, its table has one row."""
    if source == ALWAYS_ROW_0:
        return 0
    return source if source >= 0 else plan.candidate_width - 1 - source


def _plain(slots: Sequence[Slot]) -> bool:
    return all(s.kind == Kind.GATHER and s.columns == 1 for s in slots)
