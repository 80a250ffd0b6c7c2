"""Where a GPU lane's rows are put for its graphs to read: a row block in pinned memory, as large as the largest batch."""

from collections.abc import Sequence
from dataclasses import fields

import torch

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import RowBlock
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.plan import Batch
from kernels.runtime.launch import copy_to_device


class Staging:
    """One batch's rows at a time; who replays a graph in C copies rows there itself.

    Attributes:
        block: over the pinned memory. batch: that, as tensors for kernels. carried: uint8[rows, `carried_bytes`], what
            rows carry of their contexts; None if that is nothing, or no lookup reads it (`carries` is false).
    """

    def __init__(self, layout: BlockLayout, rows: int, *, carries: bool = True) -> None:
        size, beside = layout.offsets(rows, rows)[-1], layout.carried_bytes * carries
        self._pinned = torch.zeros(size + rows * beside, dtype=torch.uint8, pin_memory=True)
        self.block = b = RowBlock.over(self._pinned.numpy(), layout, rows, rows)
        carried = self._pinned.numpy()[size:].reshape(rows, beside)
        self.carried = carried if beside else None
        sections = b.header, b.request_of_row, b.context_ids, b.candidate_ids, b.context_dense, b.candidate_dense, carried
        self.batch = Batch(*map(torch.from_numpy, sections))
        self._words = b.header[HeaderWord.STAGED_ROWS : HeaderWord.STAGED_CONTEXTS + 1]

    @property
    def places(self) -> dict[str, int]:
        """Where kernels read the rows' ids and numbers, if they have some."""
        sections = {"ids": self.batch.candidate_ids, "numbers": self.batch.candidate_numbers}
        return {name: rows.data_ptr() for name, rows in sections.items() if rows.numel()}

    def stage(self, blocks: Sequence[RowBlock], bucket: int) -> int:
        """Copies the rows of the blocks; those behind, up to the bucket's, become padding. Returns the number of rows."""
        rows = self.block.fill(blocks)
        self._words[:] = rows, sum(b.contexts for b in blocks)
        self.block.request_of_row[rows:bucket] = -1
        self._carry(rows)
        return rows

    def _carry(self, rows: int) -> None:
        if self.carried is not None:
            self.carried[:rows] = self.block.carried(rows)

    def stage_zeros(self, rows: int) -> None:
        """Rows of the first context, for a run whose scores nobody reads."""
        self._words[:] = rows, 1
        self.block.request_of_row[:rows] = 0
        self._carry(rows)


class DeviceRows:
    """The staged rows in a GPU's own memory, where its copy engine brings them while other lanes compute. A lookup that reads
    them over the bus takes as long, and holds the multiprocessors.

    Attributes:
        batch: for kernels, in the place of the staged one.
    """

    def __init__(self, staged: Batch, device: torch.device) -> None:
        self._staged = staged
        self.batch = Batch(**{f.name: torch.zeros_like(getattr(staged, f.name), device=device) for f in fields(Batch)})

    def copy(self, rows: int, stream: torch.cuda.Stream) -> None:
        """Puts copies of so many rows of each section, and of the header, on a stream."""
        for name in (f.name for f in fields(Batch)):
            staged = getattr(self._staged, name)
            copy_to_device(getattr(self.batch, name), staged if name == "header" else staged[:rows], stream)
