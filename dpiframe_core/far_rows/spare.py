"""The slots of tables that are read by the same ids, for those of their rows that no memory holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.errors import InputError, Overloaded, TooLarge
from dpiframe_core.far_rows.id_groups import IdGroup
from dpiframe_core.far_rows.row_slots import RowSlots
from dpiframe_core.features.schema import FeatureSchema

_RETRY_S = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Spare:
    """A group of tables, the least of whose ranks that no memory holds, and the slots for rows of theirs.

    Attributes:
        held: of each table of the group. ranks: uint32[rows] of each, None where rows lie in order of ids.
        rows: of each table, [slots, dim] in memory that lookups read.
    """

    group: IdGroup
    held: tuple[int, ...]
    ranks: tuple[npt.NDArray[np.uint32] | None, ...]
    rows: tuple[torch.Tensor, ...]
    slots: RowSlots

    def is_far(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which ids, of any shape, a table of the group has in files alone; paddings and ids outside of the tables are not."""
        within = (ids >= 0) & (ids < self.group.rows)
        least = min((h for h, ranks in zip(self.held, self.ranks, strict=True) if ranks is None), default=self.group.rows)
        far = within & (ids >= least)
        for held, ranks in zip(self.held, self.ranks, strict=True):
            if ranks is not None:
                far |= within & (ranks[np.where(within, ids, 0)] >= held)
        return far

    def is_outside(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which ids are of no row, but would lead to a slot: only who breaks the rules of row blocks gives such."""
        return (ids >= self.group.rows) & (ids < self.outside)

    @property
    def outside(self) -> int:
        """An id that leads nowhere."""
        return self.group.rows + self.slots.slots

    def too_full(self, rows: int) -> Overloaded | TooLarge:
        """Why so many rows, distinct ones of one block, do not get slots."""
        slots = self.slots.slots
        if rows > slots:
            return TooLarge("candidates", f"{rows} rows in files of one table", f"at most {slots}, or more `ahead_mib`")
        return Overloaded(f"rows in files: got {rows} to be read, {self.slots.held} of {slots} slots held", _RETRY_S)


def spare_slots(schema: FeatureSchema, in_files: Sequence[int], groups: Sequence[IdGroup], nbytes: int) -> list[int]:
    """How many slots each group gets of the memory: as many for each id that a row of a batch has; 0 where all rows are held.

    Args:
        in_files: rows of each table that no memory holds.

    Raises:
        InputError: tables have such rows whose ids have no room for more, or whose ids other tables read with other rows.
    """
    found = []
    for g in groups:
        far = min(g.rows, sum(in_files[i] for i in g.tables))  # their ranks may differ
        if far and g.spare < 2:
            names = [schema.tables[i].name for i in g.tables]
            raise InputError(f"placement: rows of {names} in files", g.rows, "tables of equally many rows, with ids to spare")
        found.append(min(far, g.spare - 1))  # one id is outside of all
    sizes = [sum(schema.tables[i].row_bytes for i in g.tables) for g in groups]
    ids = [sum(column.width for column, _ in g.columns) if far else 0 for g, far in zip(groups, found, strict=True)]
    rows = nbytes / max(1, sum(n * size for n, size in zip(ids, sizes, strict=True)))
    return [min(far, max(1, int(n * rows))) if far else 0 for far, n in zip(found, ids, strict=True)]
