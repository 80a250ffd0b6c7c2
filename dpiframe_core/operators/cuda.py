"""Binds each operator of a graph to kernels on a GPU that write into fixed buffers, ready to be captured."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from dpiframe_core.embedding.layout import output_columns, plan_lookup
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.fusion import PLAIN_LOGITS
from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.interactions import attention_params, cin_params, linear_params
from dpiframe_core.operators.aten_functions import AtenOperator
from dpiframe_core.operators.executor import Operator, Values
from dpiframe_core.operators.torch_operators import run_plain
from dpiframe_core.operators.wave_operands import DONE, chain_operands, cross_and_head, jobs_of, linked, wave_operands
from kernels.dense.activation import Activation
from kernels.dense.head import Head
from kernels.dense.linear import DENSE_DTYPE, Linear, column_alignment, padded
from kernels.interaction.attention import Attention, AttentionColumns
from kernels.interaction.cin import Cin
from kernels.interaction.cross import CrossV1, mixture
from kernels.interaction.dot import Dot
from kernels.interaction.fm import fm
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.plan import Batch
from kernels.waves.chain import Chain
from kernels.waves.wave import Wave

ROWS_A_WORD = 8  # of common.cuh
ALL = ":all"  # behind a lookup's name among a lane's buffers: what its outputs are columns of
_TORCH = ("relu", "sigmoid", "tanh")  # activations that torch applies, where an ablation leaves them alone
Bound = (
    DeviceLookup
    | Linear
    | CrossV1
    | Head
    | Wave
    | Chain
    | Activation
    | Dot
    | Cin
    | Attention
    | AtenOperator
    | torch.Tensor
    | None
)


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
        self._logits |= _kept_exact(graph)

    def value_shape(self, value: str) -> tuple[int, torch.dtype]:
        """Columns (padded for the tensor cores) and dtype of a value's buffer."""
        width = self.graph.widths[value]
        return (width, torch.float32) if value in self._logits else (padded(width, self.dtype), self.dtype)

    def for_buffers(self, batch: Batch, rows: int, state: torch.Tensor, ahead: bool = False) -> dict[str, Operator]:
        """An operator for each node that reads `batch` and writes the first `rows` rows of the buffers it is given.

        `state`: int32[STATE_WORDS] on the device, which lookups fill and the operators after them read. `ahead`: the
        lookup, of which there is one, waits for rows that are staged after the launch.
        """
        return {n.name: self._operator(n, batch, rows, state, ahead) for n in self.graph.nodes}

    def tune(self, values: Values, rows: int, state: torch.Tensor) -> None:
        """Chooses how each linear layer is computed for `rows` rows, once for all lanes."""
        for node in self.graph.nodes:
            bound = self._bound[node.name]
            if isinstance(bound, Linear):
                ins, outs = [values[i][:rows] for i in node.inputs], [values[o][:rows] for o in node.outputs]
                x, out, x0, xl = _linear_operands(ins, outs)
                bound.tune(x, out, x0, state, xl)
            elif isinstance(bound, Wave):
                bound.tune(*wave_operands(node, bound, values, rows), state)

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

    def compile(self, buckets: Mapping[int, bool]) -> list[Callable[[], object]]:
        """Calls that compile what the buckets may need; they may run side by side. buckets: rows, and whether a lookup of so
        many is launched ahead of them.
        """
        calls: list[Callable[[], object]] = []
        for bound in self._bound.values():
            if isinstance(bound, DeviceLookup):
                calls += bound.compile(buckets, pinned=True)
            elif isinstance(bound, Wave | Chain):
                calls += bound.compile([*buckets])
        return calls

    def fits(self, rows: int) -> bool:
        """Whether a batch of so many rows can be computed: a chain takes few."""
        return all(b.fits(rows) for b in self._bound.values() if isinstance(b, Chain))

    def scratch(self, rows: int) -> Values:
        """Further buffers that a lane needs for up to `rows` rows, by name: the sums and counters of heads behind a wave, the
        maps between a CIN's layers. A lookup's outputs are columns of one buffer, where there are several.
        """
        made: Values = {}
        for node in self.graph.nodes:
            bound = self._bound[node.name]
            if isinstance(bound, DeviceLookup) and node.attrs.splits:
                firsts = output_columns(node, column_alignment(self.dtype))
                widths = [padded(self.graph.widths[o], self.dtype) for o in node.outputs]
                ends = [first + width for first, width in zip(firsts, widths, strict=False)]
                made[node.name + ALL] = torch.zeros(rows, ends[-1], dtype=self.dtype, device=self._device)
                for output, first, end in zip(node.outputs, firsts, ends, strict=False):
                    made[output] = made[node.name + ALL][:, first:end]
            if isinstance(bound, Cin):
                for i in (0, 1):
                    made[f"{node.name}.maps.{i}"] = torch.zeros(rows, bound.scratch_columns, device=self._device)
            if isinstance(bound, Chain):
                made[f"{node.name}.words"] = torch.zeros(bound.words, dtype=torch.int64, device=self._device)
            if isinstance(bound, Wave) and bound.has_head:
                made[f"{node.name}.partial"] = torch.zeros(rows * bound.most_slots * bound.tasks, device=self._device)
                made[f"{node.name}.arrived"] = torch.zeros(-(-rows // 16), dtype=torch.int32, device=self._device)
        return made

    def _bind(self, node: Node, schema: FeatureSchema, dense: Mapping[str, torch.Tensor]) -> Bound:
        w, a, tf32 = [dense[p] for p in node.params], node.attrs, self._precision == "tf32"
        match node.op:
            case "lookup":
                plan = plan_lookup(node, schema, column_alignment(self.dtype))
                assert self._store.descriptors is not None  # on a GPU they always are
                return DeviceLookup(plan, self._store.descriptors, self.dtype, self._scale(node.outputs[0]))
            case "linear":
                weight, bias, params = linear_params(a, w)
                how = a.activation, self.dtype, self._device
                return Linear(weight.reshape(-1, weight.shape[-1]), bias, *how, tf32=tf32, params=params, slope=a.slope)
            case "activation" if a.activation not in _TORCH:
                width = self.graph.widths[node.outputs[0]]
                return Activation(a.activation, w, a.slope, width, padded(width, self.dtype), self.dtype, self._device)
            case "dot":
                return Dot(a.fields, a.dim, a.keep, a.diagonal, self.dtype, self._device)
            case "cin":
                cin = a.fields, a.dim, cin_params(a, w), a.activation, a.slope, a.halves
                return Cin(*cin, self.dtype, self._precision, self._device)
            case "attention":
                at = a.attended
                assert at is not None
                columns = AttentionColumns(at.length, at.dims, at.queries, at.keys, at.pooled, at.mask, at.kept)
                unit = *attention_params(a, w), a.activation, a.slope, at.output, at.softmax
                return Attention(columns, *unit, self.dtype, self._device)
            case "cross_v2" | "cross_low_rank":
                return Linear(w[0], w[1], "identity", self.dtype, self._device, cross=True, tf32=tf32)
            case "cross_v1":
                return CrossV1(torch.stack(w[0::2]), torch.stack(w[1::2]), None, self.dtype, self._device)
            case "cross_v1_head":
                return CrossV1(*cross_and_head(w, a.offset), self.dtype, self._device)
            case "head":
                weight = w[0].clone()
                for part, column in zip(node.inputs, a.columns, strict=False):
                    weight[:, column : column + self.graph.widths[part]] *= self._scale(part)
                return Head(weight, w[1], self.dtype, self._device)
            case "aten":
                assert a.aten is not None  # the graph has checked it
                return AtenOperator(a.aten, w, self._device)
            case "bias":
                return w[0].to(self._device, self.dtype)
            case "wave":
                jobs, bias = jobs_of(a.members, self.graph, dense, self._scales)
                return Wave(jobs, bias, self._precision, self._device)
            case "chain":
                jobs, bias = jobs_of(a.members, self.graph, dense, self._scales)
                return Chain(*linked(a.members, jobs, bias), self._precision, self._device)
        return None

    def _scale(self, value: str) -> float:
        return self._scales.get(value, 1.0)

    def _operator(self, node: Node, batch: Batch, rows: int, state: torch.Tensor, ahead: bool) -> Operator:
        """Closes over the node's weights. Values are looked up when the operator is issued, cut to the bucket's rows."""
        bound, a, widths = self._bound[node.name], node.attrs, self.graph.widths
        first = next((n for n in self.graph.nodes if n.op == "lookup"), None)

        def run(values: Values) -> None:
            ins = [values[i][:rows] for i in node.inputs]
            outs = [values[o][:rows] for o in node.outputs]
            match bound:
                case Wave():
                    bound(*wave_operands(node, bound, values, rows), state)
                case Chain():
                    bound(*chain_operands(node, bound, values, rows), state)
                case DeviceLookup():
                    x = values[node.name + ALL][:rows] if a.splits else outs[0] if a.concat else None
                    outputs = x, outs[-1] if a.total else None
                    bound(batch, rows, *outputs, state, counts=node is first, ahead=ahead)
                case Linear():
                    x, out, x0, xl = _linear_operands(ins, outs)
                    bound(x, out, x0, state, xl)
                case Activation():
                    bound(state, ins[0], None, rows, outs[0])
                case Dot():
                    bound(state, [(t, widths[i]) for t, i in zip(ins, node.inputs, strict=True)], rows, outs[0])
                case Cin():
                    maps = values[f"{node.name}.maps.0"][:rows], values[f"{node.name}.maps.1"][:rows]
                    bound(state, ins[0][:, a.offset :], rows, maps, outs[0])
                case Attention():
                    bound(state, ins[0], rows, outs[0])
                case AtenOperator():
                    bound.into(ins, outs[0])
                case CrossV1():
                    bound(state, ins[0], rows, outs[0])
                case Head():
                    n = len(a.columns)
                    parts = [(ins[i], widths[node.inputs[i]], a.columns[i]) for i in range(n)]
                    bound(state, parts, ins[n:], rows, outs[0], values[DONE])
                case _ if node.op == "mixture":
                    mixture(state, ins[0], ins[1], rows, a.fields, a.dim, outs[0])
                case _ if node.op == "fm":
                    fm(state, ins[0], rows, a.offset, a.fields, a.dim, outs[0])
                case _:
                    run_plain(node, bound, [t[:, : widths[i]] for t, i in zip(ins, node.inputs, strict=True)], outs[0], widths)

        return run


def _kept_exact(graph: Graph) -> set[str]:
    """Values that stay float32 and unpadded beside those of known operators: logits of a head that operators of torch make, and
    what generic ones hand to generic ones alone (logarithms and sums do not bear bfloat16 in between).
    """
    readers, members = graph.consumers(), [m for n in graph.nodes for m in (n.attrs.members or (n,))]
    heads, made_by = [m for m in members if m.op == "head"], {o: m for m in members for o in m.outputs}
    logits = {i for head in heads for i in head.inputs[len(head.attrs.columns) :]}
    generic = {o for n in graph.nodes if n.op == "aten" for o in n.outputs}
    return {v for v in logits if made_by[v].op in PLAIN_LOGITS} | {
        v for v in generic if all(n.op == "aten" for n in readers.get(v, []))
    }


def _linear_operands(
    ins: list[torch.Tensor], outs: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(x, out, x0, xl): a cross layer has inputs (x0, xl), one of low rank (x0, xl, x), a plain one (x)."""
    return ins[-1], outs[0], ins[0] if len(ins) > 1 else None, ins[1] if len(ins) > 1 else None
