"""Tables packed into one for a group of slots, on a CPU: which slots go together, the packed table, the rows' weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.rows_numpy import RowsByNumpy, Run, place
from kernels.lookup.plan import Kind, LookupPlan, Slot

Floats = npt.NDArray[np.float32]

_PAGE = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroup:
    """Slots of one destination, dim and dtype, whose columns lie one slot after the other."""

    reads: RowsByNumpy
    weight: torch.Tensor  # [sum of rows + 1, dim]; the last row is zero, for padded entries
    scale: torch.Tensor | None  # int8: float32[columns, dim]
    starts: tuple[int, ...]  # first column of each bag, and the end
    scaled: tuple[Run, ...]  # from numbers to columns
    means: tuple[tuple[int, int], ...]  # bags [start, stop) that are averaged
    largest: bool  # bags are pooled by max
    columns: int
    placed: tuple[Run, ...]  # from this group's pooled columns to x's


def group_factors(group: PackedGroup, at: torch.Tensor, numbers: Floats) -> torch.Tensor | None:
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


def bag_maxima(values: torch.Tensor, padded: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """[rows, bags, dim]: the largest values[rows, columns, dim] of each bag, 0 for one without values."""
    known = values.masked_fill(padded[:, :, None], -torch.inf)
    largest = torch.stack([known[:, a:b].amax(1) for a, b in pairwise(starts)], 1)
    empty = torch.stack([padded[:, a:b].all(1) for a, b in pairwise(starts)], 1)
    return largest.masked_fill_(empty[:, :, None], 0.0)


def packed_table(tables: Sequence[torch.Tensor]) -> torch.Tensor:
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


def by_shape(plan: LookupPlan, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots that read tables, by dim, dtype and whether they are pooled by max."""
    groups: dict[tuple[int, torch.dtype, bool], list[Slot]] = {}
    for slot in slots:
        if slot.kind in (Kind.GATHER, Kind.SCALE):
            shape = plan.tables[plan.columns[slot.first].table]
            groups.setdefault((shape.dim, shape.dtype, slot.largest), []).append(slot)
    return list(groups.values())


def number_place(plan: LookupPlan, slot: Slot) -> int:
    """A slot's number among [candidate numbers | context numbers]."""
    return place(slot.number, plan.candidate_numbers)
