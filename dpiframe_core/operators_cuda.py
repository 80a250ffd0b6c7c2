"""Binds each operator of a graph to kernels on a GPU that write into fixed buffers, ready to be captured."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.executor import Operator, Values
from dpiframe_core.graph import Graph, Node
from dpiframe_core.schema import FeatureSchema
from kernels import interaction, reference
from kernels.dense import DENSE_DTYPE, Linear, padded
from kernels.embedding import DeviceLookup
from kernels.head import Head
from kernels.interaction import CrossV1, folded_cross
from kernels.lookup_plan import Batch
from kernels.wave import Wave
from kernels.wave_jobs import CrossJob, FmJob, HeadOperands, LinearJob, Operands

ROWS_A_WORD = 8  # of common.cuh
DONE = ":done"  # among a lane's buffers: int32[rows / 8], pinned, tells which batch's scores are there
Bound = DeviceLookup | Linear | CrossV1 | Head | Wave | torch.Tensor | None


class CudaOperators:
    """The weights of one model on one GPU. Lanes and buckets share them and bind their own buffers (`for_buffers`).

    Args:
        precision: "fp32" (strict), "tf32" (float32 tensors, tf32 products), "bf16" (bfloat16 values and weights; sums,
            logits and scores stay float32) or "fp8" (e4m3 in their place; for graphs that `fp8` lets pass).
        scales: of values in fp8, by name: a value is what lies in its buffer times its scale.
    """

    def __init__(
        self,
        graph: Graph,
        schema: FeatureSchema,
        store: EmbeddingStore,
        dense: Mapping[str, torch.Tensor],
        precision: str,
        scales: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.graph, self._scales = graph, scales
        self._store, self._device = store, store.device
        self.dtype = DENSE_DTYPE[precision]
        self._precision = precision
        self._bound: dict[str, Bound] = {n.name: self._bind(n, schema, dense) for n in graph.nodes}
        # Sums that feed the head's logits stay float32; everything a GEMM may read has the dense dtype.
        self._logits = {
            n.outputs[-1] if n.op == "lookup" else n.outputs[0]
            for node in graph.nodes
            for n in (node.attrs.members or (node,))
            if (n.op == "lookup" and n.attrs.total) or n.op in ("fm", "cross_v1_head", "head", "sum")
        } | {graph.output}

    def value_shape(self, value: str) -> tuple[int, torch.dtype]:
        """Columns (padded for the tensor cores) and dtype of a value's buffer."""
        width = self.graph.widths[value]
        return (width, torch.float32) if value in self._logits else (padded(width, self.dtype), self.dtype)

    def for_buffers(self, batch: Batch, rows: int, state: torch.Tensor) -> dict[str, Operator]:
        """An operator for each node that reads `batch` and writes the first `rows` rows of the buffers it is given.

        `state`: int32[4] on the device, which lookups fill and the operators after them read.
        """
        return {n.name: self._operator(n, batch, rows, state) for n in self.graph.nodes}

    def tune(self, values: Values, rows: int, state: torch.Tensor) -> None:
        """Chooses how each linear layer is computed for `rows` rows, once for all lanes."""
        for node in self.graph.nodes:
            bound = self._bound[node.name]
            if isinstance(bound, Linear):
                ins, outs = [values[i][:rows] for i in node.inputs], [values[o][:rows] for o in node.outputs]
                bound.tune(*_linear_operands(ins, outs), state)
            elif isinstance(bound, Wave):
                bound.tune(*self._wave_operands(node, values, rows), state)

    @property
    def choices(self) -> dict[str, str]:
        """What `tune` chose, by names such as "deep.0@256"."""
        tuned = {name: b for name, b in self._bound.items() if isinstance(b, Linear | Wave)}
        return {f"{name}@{rows}": choice for name, b in tuned.items() for rows, choice in b.choices.items()}

    def recall(self, choices: Mapping[str, str]) -> None:
        """Choices of an earlier warm-up, which `tune` takes where they name what exists."""
        for key, choice in choices.items():
            name, _, rows = key.rpartition("@")
            bound = self._bound.get(name)
            if isinstance(bound, Linear | Wave) and rows.isdecimal():
                bound.recalled[int(rows)] = choice

    def compile(self, buckets: Sequence[int]) -> list[Callable[[], object]]:
        """Calls that compile what the buckets may need; they may run side by side."""
        return [call for b in self._bound.values() if isinstance(b, Wave) for call in b.compile(buckets)]

    def scratch(self, rows: int) -> Values:
        """Further buffers that a lane needs for up to `rows` rows, by name: the sums and counters of heads behind a wave."""
        made: Values = {}
        for node in self.graph.nodes:
            bound = self._bound[node.name]
            if isinstance(bound, Wave) and bound.has_head:
                made[f"{node.name}.partial"] = torch.zeros(rows * bound.most_slots * bound.tasks, device=self._device)
                made[f"{node.name}.arrived"] = torch.zeros(-(-rows // 16), dtype=torch.int32, device=self._device)
        return made

    def _bind(self, node: Node, schema: FeatureSchema, dense: Mapping[str, torch.Tensor]) -> Bound:
        w, a, tf32 = [dense[p] for p in node.params], node.attrs, self._precision == "tf32"
        match node.op:
            case "lookup":
                return DeviceLookup(plan_lookup(node, schema), self.dtype, self._device, self._scale(node.outputs[0]))
            case "linear":
                bias = w[1] if len(w) == 2 else None
                weight = w[0].reshape(-1, w[0].shape[-1])
                return Linear(weight, bias, a.activation, self.dtype, self._device, tf32=tf32)
            case "cross_v2":
                return Linear(w[0], w[1], "identity", self.dtype, self._device, cross=True, tf32=tf32)
            case "cross_v1":
                return CrossV1(torch.stack(w[0::2]), torch.stack(w[1::2]), None, self.dtype, self._device)
            case "cross_v1_head":
                return CrossV1(*_cross_and_head(w, a.offset), self.dtype, self._device)
            case "head":
                weight = w[0].clone()
                for part, column in zip(node.inputs, a.columns, strict=False):
                    weight[:, column : column + self.graph.widths[part]] *= self._scale(part)
                return Head(weight, w[1], self.dtype, self._device)
            case "bias":
                return w[0].to(self._device, self.dtype)
            case "wave":
                return self._bind_wave(a.members, dense)
        return None

    def _scale(self, value: str) -> float:
        return self._scales.get(value, 1.0)

    def _bind_wave(self, members: Sequence[Node], dense: Mapping[str, torch.Tensor]) -> Wave:
        head = members[-1] if members[-1].op == "head" else None
        share: dict[str, torch.Tensor] = {}
        if head:
            weight = dense[head.params[0]]
            for part, column in zip(head.inputs, head.attrs.columns, strict=False):
                share[part] = weight[:, column : column + self.graph.widths[part]]
        read = [i for n in self.graph.nodes for m in (n.attrs.members or (n,)) if m is not head for i in m.inputs]
        jobs: list[LinearJob | FmJob | CrossJob] = []
        for n in members:
            w, a = [dense[p] for p in n.params], n.attrs
            match n.op:
                case "linear" | "cross_v2":
                    out, crosses = n.outputs[0], n.op == "cross_v2"
                    weight, bias = w[0].reshape(-1, w[0].shape[-1]), w[1] if len(w) == 2 else None
                    kept = out in read or out == self.graph.output or out not in share
                    scales = self._scale(n.inputs[-1]), self._scale(n.inputs[0]), self._scale(out)
                    jobs.append(LinearJob(weight, bias, a.activation, crosses, share.get(out), kept, *scales))
                case "fm":
                    jobs.append(FmJob(a.offset, a.fields, a.dim, self._scale(n.inputs[0])))
                case "cross_v1_head":
                    weights, k, _ = folded_cross(*_cross_and_head(w, a.offset))
                    jobs.append(CrossJob(weights * self._scale(n.inputs[0]), k, a.layers))
        return Wave(jobs, dense[head.params[1]] if head else None, self._precision, self._device)

    def _wave_operands(self, node: Node, values: Values, rows: int) -> tuple[list[Operands], int, HeadOperands | None]:
        bound = self._bound[node.name]
        assert isinstance(bound, Wave)
        given, head = [], None
        for n, job in zip(node.attrs.members, (*bound.jobs, None), strict=False):
            ins, out = [values[i][:rows] for i in n.inputs], values[n.outputs[0]][:rows]
            if job is None:
                partial, arrived = values[f"{node.name}.partial"], values[f"{node.name}.arrived"]
                head = HeadOperands(ins[len(n.attrs.columns) :], out, values[DONE], partial, arrived)
                break
            kept = not isinstance(job, LinearJob) or job.kept
            given.append(Operands(ins[-1], out if kept else None, ins[0] if n.op == "cross_v2" else None))
        return given, rows, head

    def _operator(self, node: Node, batch: Batch, rows: int, state: torch.Tensor) -> Operator:
        """Closes over the node's weights. Values are looked up when the operator is issued, cut to the bucket's rows."""
        bound, a, widths = self._bound[node.name], node.attrs, self.graph.widths
        first = next((n for n in self.graph.nodes if n.op == "lookup"), None)

        def run(values: Values) -> None:
            ins = [values[i][:rows] for i in node.inputs]
            outs = [values[o][:rows] for o in node.outputs]
            match bound:
                case Wave():
                    bound(*self._wave_operands(node, values, rows), state)
                case DeviceLookup():
                    assert self._store.descriptors is not None  # on a GPU they always are
                    x = outs[0] if a.concat else None
                    bound(batch, rows, self._store.descriptors, x, outs[-1] if a.total else None, state, counts=node is first)
                case Linear():
                    bound(*_linear_operands(ins, outs), state)
                case CrossV1():
                    bound(state, ins[0], rows, outs[0])
                case Head():
                    n = len(a.columns)
                    parts = [(ins[i], widths[node.inputs[i]], a.columns[i]) for i in range(n)]
                    bound(state, parts, ins[n:], rows, outs[0], values[DONE])
                case _ if node.op == "fm":
                    interaction.fm(state, ins[0], rows, a.offset, a.fields, a.dim, outs[0])
                case _:
                    _plain(node, bound, [t[:, : widths[i]] for t, i in zip(ins, node.inputs, strict=True)], outs[0], widths)

        return run


def _cross_and_head(w: Sequence[torch.Tensor], offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and biases [layers, width] of a cross network, and the head's weights [tasks, width] for its output."""
    weights, biases = torch.stack(list(w[0:-1:2])), torch.stack(list(w[1:-1:2]))
    return weights, biases, w[-1][:, offset : offset + weights.shape[1]]


def _linear_operands(
    ins: list[torch.Tensor], outs: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(x, out, x0): a cross layer has inputs (x0, xl), a plain one (x)."""
    return ins[-1], outs[0], ins[0] if len(ins) == 2 else None


def _plain(node: Node, weight: Bound, ins: list[torch.Tensor], out: torch.Tensor, widths: Mapping[str, int]) -> None:
    """The small operators that fusion removes, on torch's own kernels: what an unfused ablation runs."""
    out = out[:, : widths[node.outputs[0]]]
    match node.op:
        case "concat":
            torch.cat(ins, 1, out=out) if out.is_contiguous() else out.copy_(torch.cat(ins, 1))
        case "add":
            out.copy_(ins[0])
            for other in ins[1:]:
                out.add_(other)
        case "mul":
            torch.mul(ins[0], ins[1], out=out)
        case "sum":
            torch.sum(ins[0], 1, keepdim=True, dtype=out.dtype, out=out)
        case "bias":
            assert isinstance(weight, torch.Tensor)
            torch.add(ins[0], weight, out=out)
        case "activation":
            reference.activate_(out.copy_(ins[0]), node.attrs.activation)
        case _:
            raise ValueError(f"graph node {node.name}: got op {node.op!r}, expected one that the CUDA backend knows")
