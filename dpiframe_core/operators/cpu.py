"""Binds each operator of a graph to torch on the CPU: the whole product runs on it."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.graph import Attrs, Graph, Node
from dpiframe_core.graph.interactions import field_projections, linear_params
from dpiframe_core.graph.recurrence import directions_of
from dpiframe_core.operators.executor import Operator, Values
from dpiframe_core.operators.generic.aten_functions import AtenOperator
from dpiframe_core.operators.generic.bound_calls import Call
from dpiframe_core.operators.generic.fewer_passes import pooled_lookup, split_linears, summed_masks, weighted_sums
from dpiframe_core.operators.layer_series import bind_series, series_from, series_layers
from dpiframe_core.operators.torch_operators import Compute, attention_layers, bound_operator, cin_layers, small_operator
from kernels import reference
from kernels.attention.attention_columns import AttentionColumns
from kernels.attention.attention_cpu import CpuAttention
from kernels.attention.field_attention_cpu import CpuFieldAttention
from kernels.cpu.dense import CrossV1, Fm, Head, Linear, few_rows, has_bf16
from kernels.cpu.dot import CpuDot
from kernels.cpu.first_layers import FirstLayers
from kernels.cpu.lookup import PackedLookup
from kernels.lookup.mapped_lookup import MappedLookup
from kernels.lookup.plan import LookupPlan
from kernels.recurrent.recurrence_cpu import CpuRecurrence

_BY_ONEDNN = {"linear", "cross_v2", "cross_low_rank"}


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
        self._widths, self._nodes = graph.widths, graph.nodes
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._weights = {name: t.float().contiguous() for name, t in dense.items()}
        self.nodes_in_place, masks = summed_masks(graph, self._weights)
        weighted_sums(graph, self.nodes_in_place)
        self._weights |= masks | split_linears(graph, self.nodes_in_place, self._weights)
        readers = graph.consumers()
        kind = partial(MappedLookup, spares=store.spares) if store.mapped else PackedLookup
        self._lookups: list[tuple[Node, PackedLookup | MappedLookup]] = [
            (n, kind(self._plan(n, schema, store.mapped), store.tables, store.scales, self._x_dtype(n, readers)))
            for n in graph.nodes
            if n.op == "lookup"
        ]
        self._first = {
            n.name: first for n, lookup in self._lookups if (first := self._first_layers(n, lookup, readers)) is not None
        }
        along = {reader.name for _, _, own in self._first.values() for reader in own}
        self._pure: dict[str, Operator] = {
            n.name: _bound(n, self._computation(n)) for n in graph.nodes if n.op != "lookup" and n.name not in along
        }
        if self._dtype == torch.float32:
            begun = [one for first, series, _ in self._first.values() if first.few for one in series]
            bind_series(self._pure, begun, graph.nodes, readers, self._weights, self._widths)
        self._pure |= dict.fromkeys(along, _done)

    def _plan(self, lookup: Node, schema: FeatureSchema, mapped: bool) -> LookupPlan:
        plan = plan_lookup(lookup, schema)
        return plan if mapped else pooled_lookup(lookup, plan, self.nodes_in_place)

    @property
    def rows_in_any_number(self) -> int:
        """Batches of up to so many rows compile nothing of their own, whatever their number: oneDNN has no part in them."""
        layers = [n for n in self._nodes if n.op in _BY_ONEDNN]
        if self._dtype != torch.float32:
            return 0
        along = {n.name: first.few for first, series, _ in self._first.values() for one in series for n in one}
        most = (max(along.get(n.name, 0), few_rows(self._weights[p].numel())) for n in layers for p in n.params)
        return min(most, default=sys.maxsize)

    @property
    def out_of_range(self) -> int:
        """Ids that were outside their table since the start."""
        return sum(lookup.out_of_range for _, lookup in self._lookups)

    def for_block(self, block: RowBlock) -> dict[str, Operator]:
        """An operator for each node, reading one block."""
        looked_up = {}
        for node, lookup in self._lookups:
            if node.name in self._first:
                first, series, readers = self._first[node.name]
                done = [*(one[-1] for one in series), *readers[len(series) :]] if block.rows <= first.few else readers
                looked_up[node.name] = partial(_look_up_first, first, done, node.outputs[1:], block)
                continue
            widths = [self._widths[o] for o in node.outputs[: len(node.attrs.outputs_of_concat())]]
            looked_up[node.name] = partial(_look_up, lookup, node.outputs, widths, block)
        return self._pure | looked_up

    def in_place(self, node: Node, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> Call:
        """What computes one of `nodes_in_place` that is of `REGION_OPS`, from values to a value, float32[rows, width], that
        stay where they are.
        """
        w = [self._weights[p] for p in node.params]
        if node.attrs.aten is None:
            return bound_operator(node, w, inputs, out)
        return AtenOperator(node.attrs.aten, w, torch.device("cpu"), one_view=True).bound(inputs, out)

    def _first_layers(
        self, lookup: Node, packed: PackedLookup | MappedLookup, readers: Mapping[str, Sequence[Node]]
    ) -> tuple[FirstLayers, Sequence[Sequence[Node]], Sequence[Node]] | None:
        """The lookup with its readers, the series that these begin, and the readers: dense layers of its one output first, then
        FM of all of it; or None.
        """
        own = sorted(readers.get(lookup.outputs[0], ()), key=lambda n: n.op == "fm")
        dense, fms = [n for n in own if n.op == "linear"], [n for n in own if n.op == "fm"]
        if isinstance(packed, MappedLookup):
            return None
        tables, fields = packed.float_tables, packed.plan.x_slots
        if tables is None or tables.table is None or self._dtype != torch.float32 or len(lookup.attrs.outputs_of_concat()) != 1:
            return None
        if any(s.columns > 1 for s in fields):  # a bag
            return None
        if not dense or len(fms) > 1 or len(dense) + len(fms) < len(own) or lookup.outputs[0] not in dense[0].inputs:
            return None
        whole = 0, len(fields), tables.table.shape[1]
        if any((n.attrs.offset, n.attrs.fields, n.attrs.dim) != whole or any(not s.columns for s in fields) for n in fms):
            return None
        layers = []
        for n in dense:
            a = n.attrs
            weight, bias, params = linear_params(a, [self._weights[p] for p in n.params])
            make = partial(Linear, activation=a.activation, dtype=torch.float32, params=params, slope=a.slope)
            layers.append((weight.reshape(-1, weight.shape[-1]), bias, make))
        series = [series_from(n, readers) for n in dense]
        of_series = [series_layers(one, self._weights, self._widths) for one in series] if all(series) else []
        return FirstLayers(packed, layers, bool(fms), of_series), series, own

    def _x_dtype(self, lookup: Node, readers: Mapping[str, Sequence[Node]]) -> torch.dtype:
        """The dense layers' dtype if all that reads the embeddings are dense layers; what sums them wants them in full."""
        outputs = lookup.outputs[: len(lookup.attrs.outputs_of_concat())]
        dense = all(n.op in ("linear", "cross_v2") for o in outputs for n in readers.get(o, []))
        return self._dtype if dense else torch.float32

    def _linear(self, a: Attrs, w: Sequence[torch.Tensor]) -> Compute:
        weight, bias, params = linear_params(a, w)
        return Linear(weight.reshape(-1, weight.shape[-1]), bias, a.activation, self._dtype, params, a.slope)

    def _computation(self, node: Node) -> Compute:
        """A function of the node's input values; the weights are bound now.

        Raises:
            ValueError: an operator that the CPU does not know.
        """
        a, w = node.attrs, [self._weights[p] for p in node.params]
        match node.op:
            case "concat" | "add" | "mul" | "sum" | "bias" | "activation":
                return small_operator(node, w)
            case "aten":
                assert a.aten is not None  # the graph has checked it
                call = AtenOperator(a.aten, w, torch.device("cpu"), one_view=True)
                return lambda *ins: call(ins)
            case "linear":
                return self._linear(a, w)
            case "fm":
                return Fm(a.offset, a.fields, a.dim)
            case "dot":
                return CpuDot(a.fields, a.dim, a.keep, a.diagonal)
            case "cin":
                maps = cin_layers(a, w)
                span = slice(a.offset, a.offset + a.fields * a.dim)
                return lambda x: reference.cin(x[:, span].float(), a.fields, a.dim, maps, a.activation, a.slope, a.halves)
            case "attention":
                return _attention(a, w)
            case "field_attention":
                heads, own, span = a.field_heads, field_projections(a, w), slice(a.offset, a.offset + a.fields * a.dim)
                assert heads is not None
                attend = CpuFieldAttention(a.fields, heads.heads, own, heads.scale, a.activation)
                return lambda x: attend(x[:, span])
            case "gru" | "lstm":
                r = a.recurrence
                assert r is not None
                layer = CpuRecurrence(node.op, r.steps, directions_of(r, w), r.gate, r.cell, self._dtype)
                span = slice(a.offset, a.offset + r.steps * r.inputs)
                return lambda x, *scale: layer(x[:, span], *scale)
            case "mixture":
                return lambda x, gates: reference.mixture(x.float(), gates.float())
            case "cross_v2" | "cross_low_rank":
                return _cross_v2(self._linear(a, w[:1]), w[1]) if a.outer_bias else _cross_v2(self._linear(a, w))
            case "cross_v1":
                return CrossV1(torch.stack(w[0::2]), torch.stack(w[1::2]), None)
            case "cross_v1_head":
                layers, width = torch.stack(w[0:-1:2]), self._widths[node.inputs[0]]
                return CrossV1(layers, torch.stack(w[1:-1:2]), w[-1][:, a.offset : a.offset + width])
            case "head":
                widths = (self._widths[i] for i in node.inputs)
                return Head(w[0], w[1], list(zip(a.columns, widths, strict=False)))
        raise ValueError(f"graph node {node.name}: got op {node.op!r}, expected one that the CPU backend knows")


def _cross_v2(product: Compute, outer_bias: torch.Tensor | None = None) -> Compute:
    def run(x0: torch.Tensor, xl: torch.Tensor, v: torch.Tensor | None = None) -> torch.Tensor:
        y = product(xl if v is None else v)
        y = torch.addcmul(xl, x0, y, out=y)
        return y if outer_bias is None else y.add_(outer_bias)

    return run


def _attention(a: Attrs, w: Sequence[torch.Tensor]) -> Compute:
    at = a.attended
    assert at is not None
    columns = AttentionColumns(at.length, at.dims, at.queries, at.keys, at.pooled, at.mask, at.kept)
    return CpuAttention(columns, *attention_layers(a, w), a.activation, a.slope, at.output, at.softmax)


def _look_up(
    lookup: PackedLookup | MappedLookup, outputs: Sequence[str], widths: Sequence[int], block: RowBlock, values: Values
) -> None:
    alone = values.get(outputs[0]) if len(widths) == 1 else None
    x, total = lookup.read(block, alone)
    parts = () if x is None else (x,) if len(widths) == 1 else (part.contiguous() for part in torch.split(x, list(widths), 1))
    values.update(zip(outputs, (*parts, *(() if total is None else (total,))), strict=True))


def _look_up_first(
    first: FirstLayers, done: Sequence[Node], total_output: Sequence[str], block: RowBlock, values: Values
) -> None:
    """The lookup and all that reads its embeddings, which are not kept: up to the nodes `done`."""
    outputs, total, fm = first(block.addresses)
    terms = [t for t in (fm,) if t is not None]
    values.update(zip((n.outputs[0] for n in done), (*outputs, *terms), strict=True))
    if total is not None:
        values[total_output[0]] = total


def _done(values: Values) -> None:
    """A node that its lookup has computed along."""


def _bound(node: Node, compute: Compute) -> Operator:
    inputs, (output,) = node.inputs, node.outputs

    def run(values: Values) -> None:
        values[output] = compute(*[values[i] for i in inputs])

    return run
