"""The slots of tables that are read by the same ids, for those of their rows that no memory holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.id_groups import IdGroup
from dpiframe_core.features.block_layout import IdSection
from dpiframe_core.features.schema import FeatureSchema

Ranks = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Spare:
    """A group of tables, the least of whose ranks that no memory holds, and the slots for rows of theirs.

    Attributes:
        held: of each table of the group. ranks: uint32[rows] of each, None where rows lie in order of ids.
        rows: of each table, [slots, dim] in memory that lookups read.
    """

    group: IdGroup
    held: tuple[int, ...]
    ranks: tuple[Ranks | None, ...]
    rows: tuple[torch.Tensor, ...]

    @property
    def slots(self) -> int:
        return len(self.rows[0])

    @property
    def least(self) -> int:
        """Ids from it on are of rows that a table in the order of ids has in files alone."""
        return min((h for h, ranks in zip(self.held, self.ranks, strict=True) if ranks is None), default=self.group.rows)

    @property
    def ranked(self) -> tuple[tuple[Ranks, int], ...]:
        """Of the other tables with rows in files: the rank of each row, and where those in files begin."""
        each = zip(self.ranks, self.held, strict=True)
        return tuple((ranks, held) for ranks, held in each if ranks is not None and held < self.group.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """What `RowsAhead` asks of the ids of contexts, or of candidates. Each array is of the columns, 0 in those of other tables.

    Attributes:
        group: the number of the spare. low, rows: ids from `low` to below `rows` are of rows in files; others may be, by rank.
        outside: no id from `rows` to below it is a row's. default: what the column's unknown values read.
        ranked: columns with tables of which ranks tell.
    """

    section: IdSection
    group: npt.NDArray[np.int64]
    low: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    outside: npt.NDArray[np.int64]
    default: npt.NDArray[np.int64]
    ranked: tuple[tuple[int, tuple[tuple[Ranks, int], ...]], ...]

    def far(self, ids: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Where in ids[n, columns] those of rows in files stand."""
        far = (ids >= self.low) & (ids < self.rows)
        for column, tables in self.ranked:
            own = ids[:, column]
            within = (own >= 0) & (own < self.rows[column])
            safe = np.where(within, own, 0)
            for ranks, held in tables:
                far[:, column] |= within & (ranks[safe] >= held)
        rows, columns = np.nonzero(far)
        return rows, columns

    def misleading(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which ids are of no row, but would lead to a slot: only who breaks the rules of row blocks gives such."""
        found: npt.NDArray[np.bool_] = (ids >= self.rows) & (ids < self.outside)
        return found


def sides(spares: Sequence[Spare], widths: dict[IdSection, int]) -> tuple[Side, ...]:
    """Of the sections whose ids lead to rows in files. widths: columns of each section."""
    found = []
    for section, width in widths.items():
        group, low, rows, outside, default = np.zeros((5, width), np.int64)
        ranked = []
        for i, spare in enumerate(spares):
            for column, oov in spare.group.columns:
                if column.section != section:
                    continue
                span = slice(column.start, column.start + column.width)
                group[span], low[span], rows[span], default[span] = i, spare.least, spare.group.rows, oov
                outside[span] = spare.group.rows + spare.slots
                if spare.ranked:
                    ranked += [(c, spare.ranked) for c in range(span.start, span.stop)]
        if outside.any():
            found.append(Side(section, group, low, rows, outside, default, tuple(ranked)))
    return tuple(found)


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
