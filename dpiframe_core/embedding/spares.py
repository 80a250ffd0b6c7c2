"""The rows of a placement that only files hold: slots for them, in memory that lookups read."""

from collections.abc import Sequence

import torch

from dpiframe_core.embedding.placement import Placement
from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.id_groups import id_groups
from dpiframe_core.far_rows.spare import Spare, spare_slots
from dpiframe_core.features.schema import FeatureSchema
from kernels.runtime.host_memory import DeviceReadable, PrivateMemory

_LINE = 128  # bytes, to which tables begin aligned


class Spares:
    """Owns the memory.

    Args:
        nbytes: about how much of it. readable: whether a GPU is to read it.

    Attributes:
        groups: what `RowsAhead` fills. rows: of each table of the schema, [slots, dim]; None: all its rows are held.

    Raises:
        InputError: see `spare_slots`. RuntimeError: the GPU's driver refuses the memory.
    """

    def __init__(
        self, schema: FeatureSchema, placement: Placement, tables: Sequence[torch.Tensor], nbytes: int, *, readable: bool
    ) -> None:
        groups = id_groups(schema)
        read_by_ids = {i for g in groups for i in g.tables}
        for i, p in enumerate(placement.tables):
            if p.in_files and i not in read_by_ids:
                raise InputError(f"placement: tables.{p.table}", f"{p.in_files} rows in files", "none, as no id reads it")
        slots = spare_slots(schema, [p.in_files for p in placement.tables], groups, nbytes)
        self.rows: list[torch.Tensor | None] = [None] * len(tables)
        sizes = {
            i: -(-n * schema.tables[i].row_bytes // _LINE) * _LINE
            for g, n in zip(groups, slots, strict=True)
            if n
            for i in g.tables
        }
        self._memory = PrivateMemory(sum(sizes.values()))
        self._readable = DeviceReadable(self._memory.bytes) if readable and sizes else None
        at = 0
        for g, n in zip(groups, slots, strict=True):
            for i in g.tables if n else ():
                like = tables[i]
                part = self._memory.bytes[at : at + n * schema.tables[i].row_bytes]
                self.rows[i] = part.view(like.dtype).view(n, like.shape[1])
                at += sizes[i]
        self.groups = [
            Spare(
                g,
                tuple(placement.tables[i].held for i in g.tables),
                tuple(placement.ranks.get(placement.tables[i].table) for i in g.tables),
                tuple(rows for i in g.tables if (rows := self.rows[i]) is not None),
            )
            for g, n in zip(groups, slots, strict=True)
            if n
        ]

    def close(self) -> None:
        """Gives the memory back. No lookup may run any more."""
        if self._readable is not None:
            self._readable.close()
            self._readable = None
        self.rows, self.groups = [], []
        self._memory.close()
