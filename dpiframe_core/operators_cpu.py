"""Binds each operator of a graph to torch on the CPU: the whole product runs on it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from dpiframe_core.aten_functions import AtenOperator
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.errors import InputError
from dpiframe_core.executor import Operator, Values
from dpiframe_core.graph import Graph, Node
from dpiframe_core.schema import FeatureSchema
from dpiframe_core.types import RowBlock
from kernels import reference
from kernels.dense_cpu import CrossV1, Head, Linear, has_bf16
from kernels.stacked import StackedLookup

Compute = Callable[..., torch.Tensor]


class CpuOperators:
    """The stacked tables and the weights of one model on the CPU. Safe to use from several threads.

    Args:
        precision: "fp32", or "bf16": bfloat16 weights and activations of linear and DCN-V2 layers, all else float32.

    Raises:
        InputError: bf16 on a processor that only emulates it.
    """

    def __init__(
        self,
        graph: Graph,
        schema: FeatureSchema,
        store: EmbeddingStore,
        dense: Mapping[str, torch.Tensor],
        precision: str = "fp32",
    ) -> None:
        if precision == "bf16" and not has_bf16():
            raise InputError("precision", precision, "fp32 on this processor, which has neither AVX512-BF16 nor AMX")
        self._widths = graph.widths
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._weights = {name: t.float().contiguous() for name, t in dense.items()}
        readers = graph.consumers()
        self._lookups = [
            (n, StackedLookup(plan_lookup(n, schema), store.tables, store.scales, self._x_dtype(n, readers)))
            for n in graph.nodes
            if n.op == "lookup"
        ]
        self._pure = {n.name: _bound(n, self._computation(n)) for n in graph.nodes if n.op != "lookup"}

    @property
    def out_of_range(self) -> int:
        """Ids that were outside their table since the start."""
        return sum(lookup.out_of_range for _, lookup in self._lookups)

    def for_block(self, block: RowBlock) -> dict[str, Operator]:
        """An operator for each node, reading one block."""
        return self._pure | {node.name: partial(_look_up, lookup, node.outputs, block) for node, lookup in self._lookups}

    def _x_dtype(self, lookup: Node, readers: Mapping[str, Sequence[Node]]) -> torch.dtype:
        """The dense layers' dtype if all that reads the embeddings are dense layers; what sums them wants them in full."""
        dense = all(n.op in ("linear", "cross_v2") for n in readers.get(lookup.outputs[0], []))
        return self._dtype if dense else torch.float32

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "identity") -> Compute:
        return Linear(weight.reshape(-1, weight.shape[-1]), bias, activation, self._dtype)

    def _computation(self, node: Node) -> Compute:
        """A function of the node's input values; the weights are bound now.

        Raises:
            ValueError: an operator that the CPU does not know.
        """
        a, w = node.attrs, [self._weights[p] for p in node.params]
        match node.op:
            case "concat":
                return lambda *parts: torch.cat(parts, 1)
            case "add":
                return lambda first, *rest: sum(rest, start=first)
            case "mul":
                return torch.mul
            case "sum":
                return lambda x: x.float().sum(1, keepdim=True)
            case "bias":
                return lambda x: x + w[0]
            case "activation":
                return lambda x: reference.activate_(x.clone(), a.activation)
            case "aten":
                assert a.aten is not None  # the graph has checked it
                call = AtenOperator(a.aten, w, torch.device("cpu"))
                return lambda *ins: call(ins)
            case "linear":
                return self._linear(w[0], w[1] if len(w) == 2 else None, a.activation)
            case "fm":
                return lambda x: reference.fm(x.float(), a.offset, a.fields, a.dim)
            case "cross_v2":
                return _cross_v2(self._linear(w[0], w[1]))
            case "cross_v1":
                return CrossV1(torch.stack(w[0::2]), torch.stack(w[1::2]), None)
            case "cross_v1_head":
                layers, width = torch.stack(w[0:-1:2]), self._widths[node.inputs[0]]
                return CrossV1(layers, torch.stack(w[1:-1:2]), w[-1][:, a.offset : a.offset + width])
            case "head":
                widths = (self._widths[i] for i in node.inputs)
                return Head(w[0], w[1], list(zip(a.columns, widths, strict=False)))
        raise ValueError(f"graph node {node.name}: got op {node.op!r}, expected one that the CPU backend knows")


def _cross_v2(product: Compute) -> Compute:
    def run(x0: torch.Tensor, xl: torch.Tensor) -> torch.Tensor:
        y = product(xl)
        return torch.addcmul(xl, x0, y, out=y)

    return run


def _look_up(lookup: StackedLookup, outputs: Sequence[str], block: RowBlock, values: Values) -> None:
    ids = block.wide_ids("candidate_ids"), block.wide_ids("context_ids")
    made = lookup.read(block.request_of_row, *ids, block.candidate_dense, block.context_dense)
    values.update(zip(outputs, (t for t in made if t is not None), strict=True))


def _bound(node: Node, compute: Compute) -> Operator:
    inputs, (output,) = node.inputs, node.outputs

    def run(values: Values) -> None:
        values[output] = compute(*[values[i] for i in inputs])

    return run
