"""Runs a graph with generic operators on a CPU a tile of rows at a time, over buffers that stay where they are: what one
operator writes is still near when the next one reads it, and views of it are made once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.regions import REGION_OPS
from dpiframe_core.graph.schedule import Plan
from dpiframe_core.operators.cpu import CpuOperators
from dpiframe_core.operators.executor import Values

# Bytes that a thread's buffers may take. An L2 has 1 to 2 MB; of 1 MB the calls of so many tiles took longer than it saved.
_CACHE = 4 << 20
_STEP, _MOST = 8, 1024  # rows


class _Step(NamedTuple):
    """A call into a buffer; or the node whose operator runs, and the buffers that want a copy of its values."""

    call: Callable[[], object] | None
    node: str
    copies: tuple[tuple[str, torch.Tensor], ...]


class RowTiles:
    """One lane's buffers and calls. One user at a time.

    Args:
        computed: of how many rows instead, as some numbers of them cost more.

    Attributes:
        rows: of a tile, the last of a batch may have fewer.
    """

    def __init__(self, operators: CpuOperators, plan: Plan, graph: Graph, computed: Callable[[int], int]) -> None:
        self._operators, self._output, self._computed = operators, graph.output, computed
        nodes = operators.nodes_in_place
        self._nodes, self._widths = [nodes[step.node] for step in plan.steps if step.node in nodes], graph.widths
        read = {i for n in graph.nodes if n.op in REGION_OPS for i in n.inputs}
        last = {i: n.name for n in self._nodes for i in n.inputs}
        free, sizes = list[int](), list[int]()
        self._slots: dict[str, int] = {}  # value -> its buffer, which later ones take over
        for n in self._nodes:
            for o in n.outputs:
                if n.op in REGION_OPS or o in read:
                    width = graph.widths[o]
                    slot = min(free, key=lambda s: abs(sizes[s] - width), default=len(sizes))
                    if slot == len(sizes):
                        sizes.append(0)
                    else:
                        free.remove(slot)
                    sizes[slot] = max(sizes[slot], width)
                    self._slots[o] = slot
            free += [slot for v, slot in self._slots.items() if last.get(v) == n.name]
        fit = torch.get_num_threads() * _CACHE // (4 * sum(sizes))
        self.rows = min(max(fit // _STEP * _STEP, _STEP), _MOST)
        self._buffers = [torch.empty(self.rows * size) for size in sizes]
        self._programs: dict[int, tuple[list[_Step], Values]] = {}

    def __call__(self, block: RowBlock) -> torch.Tensor:
        """float32[rows, tasks]."""
        scores = torch.empty(block.rows, self._widths[self._output])
        for start in range(0, block.rows, self.rows):
            stop = min(start + self.rows, block.rows)
            part = block if stop - start == block.rows else block.window(start, stop)
            if (computed := min(self._computed(part.rows), self.rows)) > part.rows:
                part = RowBlock.allocate(block.layout, computed, part.contexts)  # ids 0: every table has a row
                part.fill([block.window(start, stop)])
            scores[start:stop] = self._tile(part)[: stop - start]
        return scores

    def _tile(self, block: RowBlock) -> torch.Tensor:
        program = self._programs.get(block.rows)
        if program is None:
            program = self._programs[block.rows] = self._program(block.rows)
        steps, fixed = program
        operators, values = self._operators.for_block(block), fixed.copy()
        for call, node, copies in steps:
            if call is not None:
                call()
                continue
            operators[node](values)
            for name, buffer in copies:
                if (found := values[name]) is not buffer:
                    buffer.copy_(found)
                    values[name] = buffer
        return values[self._output]

    def _program(self, rows: int) -> tuple[list[_Step], Values]:
        """The calls for so many rows, and the values that they and lookups write in place."""
        at = {
            value: self._buffers[slot][: rows * self._widths[value]].view(rows, self._widths[value])
            for value, slot in self._slots.items()
        }
        steps, fixed = list[_Step](), Values()
        for n in self._nodes:
            if n.op in REGION_OPS:
                inputs, (output,) = [at[i] for i in n.inputs], n.outputs
                steps.append(_Step(self._operators.in_place(n, inputs, at[output]), n.name, ()))
                fixed[output] = at[output]
            else:
                steps.append(_Step(None, n.name, tuple((o, at[o]) for o in n.outputs if o in at)))
                if n.op == "lookup" and n.outputs[0] in at:
                    fixed[n.outputs[0]] = at[n.outputs[0]]
        return steps, fixed
