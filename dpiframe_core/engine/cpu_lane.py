"""A lane on a CPU: runs one batch at a time in the calling thread."""

import time
from collections.abc import Sequence

import torch

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.schedule import Plan
from dpiframe_core.operators.cpu import CpuOperators
from dpiframe_core.operators.executor import Values, execute, last_reads
from dpiframe_core.operators.row_tiles import RowTiles

_LARGEST_ADAPTIVE = 32 << 20


class CpuLane:
    """Runs the plan's steps with the operators, which all lanes share."""

    def __init__(self, operators: CpuOperators, plan: Plan, layout: BlockLayout, graph: Graph) -> None:
        self._operators, self._plan, self._layout, self._output = operators, plan, layout, graph.output
        self._inference = torch.inference_mode()  # a lane has one user at a time
        self._no_more, self._any_number = last_reads(plan, graph), operators.rows_in_any_number
        with self._inference:
            generic = any(n.op == "aten" for n in graph.nodes)
            self._tiles = RowTiles(operators, plan, graph, self._computed) if generic else None

    def prepare(self) -> None:
        """Keeps the allocator from handing activations back to the kernel after each batch.

        glibc does that above a limit that it raises to twice the largest block it has seen freed, of up to 32 MiB: until then
        4096 rows paid 8,600 to 17,000 page faults a batch, some 10 % of its time. Elsewhere this is without effect.
        """
        torch.empty(_LARGEST_ADAPTIVE - (1 << 20), dtype=torch.uint8)

    def run(self, blocks: Sequence[RowBlock], _generation: int = 0) -> BatchResult:
        """Scores the rows of the blocks, in order."""
        start = time.perf_counter()
        block, one = blocks[0], len(blocks) == 1
        rows = block.rows if one else sum(b.rows for b in blocks)
        computed = rows if self._tiles is not None else self._computed(rows)
        if not one or rows < computed:
            block = RowBlock.allocate(self._layout, computed, sum(b.contexts for b in blocks))  # ids 0: every table has a row
            block.fill(blocks)
        values: Values = {}
        with self._inference:
            if self._tiles is not None:
                found = self._tiles(block)
            else:
                execute(self._plan, self._operators.for_block(block), values, self._no_more)
                found = values[self._output]
            scores = (found if rows == computed else found[:rows]).float().numpy()
        return BatchResult(scores, (time.perf_counter() - start) * 1e3, computed)

    def _computed(self, rows: int) -> int:
        return rows if rows <= self._any_number else computed_rows(rows)

    def close(self) -> None:
        """Nothing to release."""


def computed_rows(rows: int) -> int:
    """`rows`, rounded up by an eighth at most: 80 sizes up to 4096.

    For every size that a layer meets, oneDNN compiles code for 0.3 to 0.7 ms and keeps it (0.6 MB), up to 1,024 of them.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step
