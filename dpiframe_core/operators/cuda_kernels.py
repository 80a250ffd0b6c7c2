"""The kernel that computes a graph's node on a GPU, with the node's weights on it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.fusion.gates import SUMMED
from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.interactions import field_projections, linear_params
from dpiframe_core.graph.placement import Matrix
from dpiframe_core.graph.recurrence import directions_of
from dpiframe_core.operators.context_shares import ContextShares, context_columns
from dpiframe_core.operators.generic.aten_functions import AtenOperator
from dpiframe_core.operators.region import Region
from dpiframe_core.operators.torch_operators import attention_layers, cin_layers
from dpiframe_core.operators.towers import tower_kernel
from dpiframe_core.operators.wave_operands import chain_head, chain_links, cross_and_head, jobs_of
from kernels.attention.attention import Attention
from kernels.attention.attention_columns import AttentionColumns
from kernels.attention.field_attention import FieldAttention
from kernels.dense.activation import Activation
from kernels.dense.head import Head
from kernels.dense.linear import DENSE_DTYPE, Linear, padded
from kernels.interaction.cin import Cin
from kernels.interaction.cross import CrossV1
from kernels.interaction.dot import Dot
from kernels.interaction.tower import Tower
from kernels.lookup.embedding import DeviceLookup
from kernels.recurrent.recurrence import Recurrence
from kernels.waves.chain import Chain
from kernels.waves.wave import Wave

_TORCH = ("relu", "sigmoid", "tanh")  # activations that torch applies, where an ablation leaves them alone
_Layer = Linear | CrossV1 | Head | Wave | Chain | Activation | Dot | Cin | Attention | FieldAttention | Recurrence | Region
NodeKernel = DeviceLookup | _Layer | Tower | AtenOperator | torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class KernelMaker:
    """Makes the kernels of one model: its graph and weights, and the precision at which they are computed.

    scales: of values in fp8, by name. matrices: by name, those in which several values lie. shares: what is computed once a
    context.
    """

    graph: Graph
    schema: FeatureSchema
    store: EmbeddingStore
    dense: Mapping[str, torch.Tensor]
    precision: str
    scales: Mapping[str, float]
    matrices: Mapping[str, Matrix]
    shares: ContextShares | None = None

    def kernel(self, node: Node) -> NodeKernel:
        """The node's kernel; for one that torch computes the bias that it adds, or None."""
        w, a, tf32 = [self.dense[p] for p in node.params], node.attrs, self.precision == "tf32"
        dtype, device = DENSE_DTYPE[self.precision], self.store.device
        match node.op:
            case "lookup":
                spans = self.matrices[node.name].spans if a.splits else {}
                firsts = [spans[o][0] for o in node.outputs if o in spans] if a.splits else None
                plan = self.store.placed(plan_lookup(node, self.schema, firsts))
                assert self.store.descriptors is not None  # on a GPU they always are
                once = context_columns(self.graph, node, self.schema)
                shared = self.shares.columns if self.shares and self.shares.lookup == node.name else None
                return DeviceLookup(plan, self.store.descriptors, dtype, self._scale(node.outputs[0]), once, shared)
            case "linear":
                weight, bias, params = linear_params(a, w)
                weight = weight.reshape(-1, weight.shape[-1])
                return Linear(weight, bias, a.activation, dtype, device, tf32=tf32, params=params, slope=a.slope)
            case "activation" if a.activation not in _TORCH:
                width = self.graph.widths[node.outputs[0]]
                return Activation(a.activation, w, a.slope, width, padded(width, dtype), dtype, device)
            case "dot":
                return Dot(a.fields, a.dim, a.keep, a.diagonal, dtype, device)
            case "cin":
                return Cin(
                    a.fields, a.dim, cin_layers(a, w), activation=a.activation, slope=a.slope, halves=a.halves,
                    dtype=dtype, precision=self.precision, device=device,
                )  # fmt: skip
            case "attention":
                return self._attention(node)
            case "field_attention":
                heads, own = a.field_heads, field_projections(a, w)
                assert heads is not None
                return FieldAttention(
                    a.fields, heads.heads, own, scale=heads.scale, activation=a.activation, dtype=dtype,
                    precision=self.precision, device=device,
                )  # fmt: skip
            case "gru" | "lstm":
                r = a.recurrence
                assert r is not None
                return Recurrence(
                    node.op, r.steps, directions_of(r, w), gate=r.gate, cell=r.cell, dtype=dtype, precision=self.precision,
                    device=device,
                )  # fmt: skip
            case "cross_v2" | "cross_low_rank":
                bias = w[1] if len(w) > 1 else None
                return Linear(w[0], bias, "identity", dtype, device, cross=True, outer_bias=a.outer_bias, tf32=tf32)
            case "cross_v1":
                return CrossV1(torch.stack(w[0::2]), torch.stack(w[1::2]), None, dtype, device)
            case "cross_v1_head":
                weights, biases, head = cross_and_head(w, a.offset)
                return CrossV1(weights, biases, head, dtype, device)
            case "head":
                widths = [self.graph.widths[part] for part in node.inputs]
                summed = max((width for width, c in zip(widths, a.columns, strict=False) if c == SUMMED), default=0)
                weight = torch.cat((w[0], torch.ones(len(w[0]), summed)), 1)
                for part, width, column in zip(node.inputs, widths, a.columns, strict=False):
                    weight[:, column : column + width] *= self._scale(part)
                return Head(weight, w[1], dtype, device)
            case "aten":
                assert a.aten is not None  # the graph has checked it
                return AtenOperator(a.aten, w, device)
            case "bias":
                return w[0].to(device, dtype)
            case "region":
                return Region(node, self.graph, self.dense, dtype, device)
            case "wave":
                jobs, bias = jobs_of(a.members, self.graph, self.dense, self.scales, self.shares)
                return Wave(jobs, bias, self.precision, device)
            case "tower":
                return tower_kernel(node, self.dense, self.precision, device)
            case "chain":
                jobs, bias = jobs_of(a.members, self.graph, self.dense, self.scales)
                assert bias is not None  # a chain ends in a head
                return Chain(chain_links(a.members, jobs), chain_head(a.members, bias), self.precision, device)
        return None

    def _attention(self, node: Node) -> Attention:
        a, at = node.attrs, node.attrs.attended
        assert at is not None
        layers, out = attention_layers(a, [self.dense[p] for p in node.params])
        columns = AttentionColumns(at.length, at.dims, at.queries, at.keys, at.pooled, at.mask, at.kept)
        return Attention(
            columns, layers, out, activation=a.activation, slope=a.slope, output=at.output, softmax=at.softmax,
            precision=self.precision, device=self.store.device,
        )  # fmt: skip

    def _scale(self, value: str) -> float:
        return self.scales.get(value, 1.0)
