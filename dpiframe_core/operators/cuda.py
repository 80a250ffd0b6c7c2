"""The operators of one model on a GPU: kernels that write into a lane's fixed buffers, ready to be captured."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.fusion.gates import SUMMED
from dpiframe_core.graph.graph import JOINED, Graph, Node
from dpiframe_core.graph.placement import matrices
from dpiframe_core.operators.context_shares import SHARED_ROWS, ContextShares
from dpiframe_core.operators.cuda_kernels import KernelMaker, NodeKernel
from dpiframe_core.operators.exact_values import exact_values
from dpiframe_core.operators.executor import Operator, Values
from dpiframe_core.operators.generic.aten_functions import AtenOperator
from dpiframe_core.operators.region import Region
from dpiframe_core.operators.torch_operators import run_with_torch
from dpiframe_core.operators.wave_operands import given_logits, head_operands, job_operands, link_operands
from dpiframe_core.operators.workspace import Workspace
from kernels.attention.attention import Attention
from kernels.attention.field_attention import FieldAttention
from kernels.dense.activation import Activation
from kernels.dense.head import Head
from kernels.dense.linear import DENSE_DTYPE, Linear, column_alignment, padded
from kernels.interaction.cin import Cin
from kernels.interaction.cross import CrossV1, mixture
from kernels.interaction.dot import Dot
from kernels.interaction.fm import fm
from kernels.interaction.tower import Tower
from kernels.lookup.embedding import DeviceLookup
from kernels.recurrent.recurrence import Recurrence
from kernels.runtime.fastest import Found
from kernels.runtime.source import KernelSource
from kernels.waves.chain import Chain
from kernels.waves.wave import Wave
from kernels.waves.wave_jobs import ShareOperands, most_contexts, share_marks

_TUNED = Linear | Wave | Cin | Attention


class CudaOperators:
    """The weights of one model on one GPU. Lanes and buckets share them and bind their own buffers (`for_buffers`).

    Args:
        precision: "fp32" (strict), "tf32" (float32 tensors, tf32 products), "bf16" (bfloat16 values and weights; sums,
            logits and scores stay float32) or "fp8" (e4m3 in their place; for graphs that `fp8` lets pass).
        scales: of values in fp8, by name: a value is what lies in its buffer times its scale.
        shares: what is computed once a context. known: operators of the same graph without, whose kernels serve here too.
    """

    def __init__(
        self,
        graph: Graph,
        schema: FeatureSchema,
        store: EmbeddingStore,
        dense: Mapping[str, torch.Tensor],
        precision: str,
        scales: Mapping[str, float] = MappingProxyType({}),
        shares: ContextShares | None = None,
        known: "CudaOperators | None" = None,
    ) -> None:
        self.graph, self._device, self._shares = graph, store.device, shares
        self._store = store  # owns the tables, of which lookups hold the addresses alone
        self.dtype = DENSE_DTYPE[precision]
        self._matrices = {m.name: m for m in matrices(graph, column_alignment(self.dtype))}
        maker = KernelMaker(graph, schema, store, dense, precision, scales, self._matrices, shares)
        other = known._kernels if known else {}
        same = {n.name: other[n.name] for n in graph.nodes if n.name in other and not self._shared_by(n)}
        makes = [n for n in graph.nodes if n.op != JOINED and n.name not in same]
        self._kernels: dict[str, NodeKernel] = same | {n.name: maker.kernel(n) for n in makes}
        self._counting = next((n.name for n in graph.nodes if n.op == "lookup"), None)  # ids out of range count once
        self._exact = exact_values(graph)

    def allocate(self, workspace: Workspace, rows: int) -> None:
        """Adds the buffers that these operators need for up to `rows` rows to those that other programs of the lane have."""
        for name, matrix in self._matrices.items():
            if name not in workspace.joined:
                joined = workspace.joined[name] = self._zeros(rows, matrix.columns, dtype=self.dtype)
                workspace.values.update({value: joined[:, first:end] for value, (first, end) in matrix.spans.items()})
        for node in self.graph.nodes:
            match self._kernels.get(node.name):
                case DeviceLookup() as lookup if lookup.once and node.name not in workspace.context_rows:
                    workspace.context_rows[node.name] = self._zeros(rows, dtype=torch.int32)
                case DeviceLookup() as lookup if lookup.shared:
                    self._allocate_shares(workspace, rows, lookup.shared)
                case Cin() as cin:
                    first, second = (self._zeros(rows, cin.scratch_columns) for _ in range(2))
                    workspace.maps[node.name] = first, second
                case Chain() as chain:
                    workspace.links[node.name] = self._zeros(chain.words, dtype=torch.int64)
                case Wave() as wave if wave.has_head:
                    words, before = rows * wave.most_slots * wave.tasks, workspace.head_sums.get(node.name)
                    if before is None or len(before) < words:  # another program's wave may have the same name, and more
                        workspace.head_sums[node.name] = self._zeros(words, dtype=torch.int64)
            for value in node.outputs:
                if value not in workspace.values:
                    width = self.graph.widths[value]
                    exact = value in self._exact
                    columns, dtype = (width, torch.float32) if exact else (padded(width, self.dtype), self.dtype)
                    workspace.values[value] = self._zeros(rows, columns, dtype=dtype)

    def for_buffers(self, workspace: Workspace, rows: int, ahead: bool = False) -> dict[str, Operator]:
        """An operator for each node that reads the staged batch and writes the first `rows` rows of the buffers it is given.

        ahead: the lookup, of which there is one, waits for rows that are staged after the launch.
        """
        return {n.name: self._operator(n, workspace, rows, ahead) for n in self.graph.nodes if n.op != JOINED}

    @property
    def carries(self) -> bool:
        """Whether a lookup reads what rows carry of their contexts."""
        return any(isinstance(kernel, DeviceLookup) and kernel.carries for kernel in self._kernels.values())

    def place(self) -> None:
        """Has lookups take over where tables lie, in both generations."""
        for kernel in self._kernels.values():
            if isinstance(kernel, DeviceLookup):
                kernel.place()

    def tune(self, workspace: Workspace, rows: int, found: Found, *, brief: bool = False) -> None:
        """Chooses how products are computed for `rows` rows, once for all lanes. found: what layers like these were found to be
        computed fastest by. brief: see `Linear.tune`.
        """
        values, state = workspace.values, workspace.state
        for node in self.graph.nodes:
            match self._kernels.get(node.name):
                case Linear() as linear:
                    ins, out = [values[i][:rows] for i in node.inputs], values[node.outputs[0]][:rows]
                    linear.tune(found, out=out, state=state, brief=brief, **_linear_inputs(ins))
                case Cin() as cin:
                    x, out = values[node.inputs[0]][:rows, node.attrs.offset :], values[node.outputs[0]][:rows]
                    first, second = workspace.maps[node.name]
                    cin.tune(state, x, rows, (first[:rows], second[:rows]), out)
                case Wave() as wave:
                    operands = job_operands(node, wave, values, rows, workspace)
                    wave.tune(found, operands, rows, head_operands(node, wave, values, rows, workspace), state)
                case Attention() as attention:
                    x, out = values[node.inputs[0]][:rows], values[node.outputs[0]][:rows]
                    attention.tune(state, x, rows, out, self._context_rows(node, workspace))

    def rough(self, rows: int) -> bool:
        """Whether some layer's choice for so many rows is of a brief `tune`."""
        return any(isinstance(kernel, Linear) and rows in kernel.rough for kernel in self._kernels.values())

    def tied(self, rows: int) -> list[tuple[Callable[[str], str], str]]:
        """Ways that `tune` found as good as those chosen for so many rows, each with what takes it and gives the one before.
        They are told once: what is settled for one lane is so for all."""
        waves = [kernel for kernel in self._kernels.values() if isinstance(kernel, Wave)]
        return [(partial(wave.choose, rows), name) for wave in waves for name in wave.tied.pop(rows, ())]

    @property
    def choices(self) -> dict[str, str]:
        """What `tune` chose, by names such as "deep.0@256"."""
        tuned = {name: kernel for name, kernel in self._kernels.items() if isinstance(kernel, _TUNED)}
        return {f"{name}@{rows}": choice for name, kernel in tuned.items() for rows, choice in kernel.choices.items()}

    def recall(self, choices: Mapping[str, str]) -> None:
        """Choices of an earlier warm-up, which `tune` takes where they name what exists."""
        for key, choice in choices.items():
            name, _, rows = key.rpartition("@")
            kernel = self._kernels.get(name)
            if isinstance(kernel, _TUNED) and rows.isdecimal():
                kernel.recalled[int(rows)] = choice

    def sources(self, rows: int, *, ahead: bool, on_device: bool) -> list[KernelSource]:
        """What a bucket of so many rows may need to have compiled. ahead: whether its lookup is launched ahead of them.
        on_device: whether it reads rows in device memory, too.
        """
        found: list[KernelSource] = []
        for kernel in self._kernels.values():
            match kernel:
                case DeviceLookup():
                    found.append(kernel.source(rows, pinned=True, ahead=ahead))
                    found += [kernel.source(rows, pinned=False)] * on_device
                case Wave() | Chain() | Cin() | Attention():
                    found += kernel.sources(rows)
                case Tower():
                    found.append(kernel.source)
        return found

    def compile_regions(self, workspace: Workspace, rows: int) -> None:
        """Launches the regions, which compiles them, on what lies in the buffers.

        Raises:
            RegionFailed: Inductor could not.
        """
        for node in self.graph.nodes:
            if isinstance(self._kernels.get(node.name), Region):
                self._operator(node, workspace, rows, ahead=False)(workspace.values)

    def fits(self, rows: int) -> bool:
        """Whether a batch of so many rows can be computed, and is to be: a chain takes few, shares pay for many."""
        return (self._shares is None or rows >= SHARED_ROWS) and all(
            kernel.fits(rows) for kernel in self._kernels.values() if isinstance(kernel, Chain)
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self._device)

    def _shared_by(self, node: Node) -> bool:
        """Whether a node's kernel differs from one without shares."""
        shares = self._shares
        return shares is not None and (node.name == shares.lookup or any(m.name in shares.layers for m in node.attrs.members))

    def _allocate_shares(self, workspace: Workspace, rows: int, columns: tuple[int, int]) -> None:
        contexts, (first, end) = most_contexts(rows), columns
        x, of_row = self._zeros(contexts, end - first, dtype=self.dtype), self._zeros(rows, dtype=torch.int32)
        members = {m.name: m for n in self.graph.nodes for m in n.attrs.members}
        for name in self._shares.layers if self._shares else ():
            width = padded(self.graph.widths[members[name].outputs[0]], self.dtype)
            done = self._zeros(share_marks(rows, width), dtype=torch.int32)
            workspace.shares[name] = ShareOperands(x, of_row, self._zeros(contexts, width), done)

    def _context_rows(self, attention: Node, workspace: Workspace) -> torch.Tensor | None:
        """In which rows of its input an attention finds its keys, where a lookup writes these but once a context."""
        maker = self.graph.producers()[attention.inputs[0]].name
        lookup = self._kernels.get(maker)  # another program's of the lane may have the same name, and write each row
        return workspace.context_rows[maker] if isinstance(lookup, DeviceLookup) and lookup.once else None

    def _operator(self, node: Node, workspace: Workspace, rows: int, ahead: bool) -> Operator:
        """Closes over the node's kernel. Values are looked up when the operator is issued, cut to the bucket's rows."""
        kernel, a, widths, state = self._kernels[node.name], node.attrs, self.graph.widths, workspace.state
        counts = node.name == self._counting

        def run(values: Values) -> None:
            ins = [values[i][:rows] for i in node.inputs]
            outs = [values[o][:rows] for o in node.outputs]
            match kernel:
                case Wave():
                    head = head_operands(node, kernel, values, rows, workspace)
                    kernel(job_operands(node, kernel, values, rows, workspace), rows, head, state)
                case Chain():
                    given, logits = link_operands(node, kernel, values, rows), given_logits(node, kernel, values, rows)
                    words = workspace.links[node.name]
                    kernel(given, logits, rows, scores=outs[0], done=workspace.done, words=words, state=state)
                case DeviceLookup():
                    x = workspace.joined[node.name][:rows] if a.splits else outs[0] if a.concat else None
                    total = outs[-1] if a.total else None
                    own, share_x = workspace.context_rows[node.name] if kernel.once else None, None
                    if kernel.shared:
                        shared = next(iter(workspace.shares.values()))
                        own, share_x = shared.context_of_row, shared.x[: most_contexts(rows)]
                    kernel(
                        workspace.batch, rows, x, total, state, counts=counts, ahead=ahead, context_rows=own, shared_x=share_x
                    )  # fmt: skip
                case Linear():
                    kernel(out=outs[0], state=state, **_linear_inputs(ins))
                case Activation():
                    kernel(state, ins[0], None, rows, outs[0])
                case Dot():
                    kernel(state, [(t, widths[i]) for t, i in zip(ins, node.inputs, strict=True)], rows, outs[0])
                case Tower():
                    kernel(state, ins[0], ins[1], rows, outs[0])
                case Cin():
                    first, second = workspace.maps[node.name]
                    kernel(state, ins[0][:, a.offset :], rows, (first[:rows], second[:rows]), outs[0])
                case FieldAttention():
                    kernel(state, ins[0][:, a.offset :], rows, outs[0])
                case Recurrence():
                    kernel(state, ins[0][:, a.offset :], ins[1] if len(ins) > 1 else None, rows, outs[0])
                case Attention():
                    kernel(state, ins[0], rows, outs[0], self._context_rows(node, workspace))
                case AtenOperator():
                    kernel.into(ins, outs[0])
                case Region():
                    kernel([values[i] for i in node.inputs], [values[o] for o in node.outputs], rows)
                case CrossV1():
                    kernel(state, ins[0], rows, outs[0])
                case Head():
                    n = len(a.columns)
                    columns = [kernel.width - widths[node.inputs[i]] if c == SUMMED else c for i, c in enumerate(a.columns)]
                    parts = [(ins[i], widths[node.inputs[i]], columns[i]) for i in range(n)]
                    kernel(state, parts, ins[n:], rows, outs[0], workspace.done)
                case _ if node.op == "mixture":
                    mixture(state, ins[0], ins[1], rows, a.fields, a.dim, outs[0])
                case _ if node.op == "fm":
                    fm(state, ins[0], rows, a.offset, a.fields, a.dim, outs[0])
                case bias:
                    cut = [t[:, : widths[i]] for t, i in zip(ins, node.inputs, strict=True)]
                    run_with_torch(node, bias, cut, outs[0][:, : widths[node.outputs[0]]])

        return run


def _linear_inputs(ins: list[torch.Tensor]) -> dict[str, Any]:
    """A cross layer has inputs (x0, xl), one of low rank (x0, xl, x), a plain one (x)."""
    return {"x": ins[-1], "x0": ins[0] if len(ins) > 1 else None, "xl": ins[1] if len(ins) > 1 else None}
