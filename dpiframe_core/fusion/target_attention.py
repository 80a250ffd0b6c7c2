"""Finds target attention (Zhou et al. 2018, eq. 3) among generic operators, as libraries write it, and makes it one operator.

A score of each step of the history comes from linear layers over [q, k, q - k, q * k], may be scaled and masked, and weighs the
step's key. Graph in, graph out; nothing executable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dpiframe_core.fusion.generic_nodes import Read, call_of, factor_of, fuse_ends, is_call, reads_of, whole
from dpiframe_core.graph.aten import Constant, Window
from dpiframe_core.graph.aten_rules import Shape
from dpiframe_core.graph.graph import Attended, Attrs, Graph, Node

# Words of a row in shared memory, which all GPUs have (kernels/attention/attention.py), and on the tensor cores in tf32 all
# words, and registers of a thread (kernels/attention/attention_mma.py).
MOST_ROW_WORDS, MOST_WORDS, MOST_REGISTERS = 15_000, 56_000, 255


def fuse_target_attention(graph: Graph) -> Graph:
    """Scores of [q, k, q - k, q * k], masked and scaled, and the sum of the keys that they weigh become one `attention`."""
    return fuse_ends(graph, _interest)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """A score of each step: an MLP of what is joined, then perhaps a scale and a mask."""

    nodes: list[Node]  # all but the one that joins
    layers: list[Node]  # the linear ones among them, in order
    joined: Node
    activation: str
    slope: float
    scale: float
    mask: Read | None

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(call_of(layer).sizes[1] for layer in self.layers[:-1])


def _interest(made_by: Mapping[str, Node], last: Node) -> tuple[list[Node], Node] | None:
    """The nodes of the attention that ends in a sum over the history, but it, and the one that computes it all."""
    product = made_by[last.inputs[0]] if is_call(last, "sum") and call_of(last).args[0] == (1,) else None
    if product is None or not is_call(product, "mul") or len(sizes := call_of(product).sizes) != 2:
        return None
    length, dim = sizes
    reads = reads_of(product)
    if reads_of(last) != [(product.outputs[0], whole(sizes))] or len(reads) != 2:
        return None
    (scores, across), keys = reads
    scoring = _scoring(made_by, scores, length) if across == Window(0, (length, 1), (1, 0)) else None
    compared = _compared(made_by, scoring.joined, keys, sizes) if scoring else None
    if scoring is None or compared is None:
        return None
    (x, query), others = compared
    joins, items = _items(made_by, keys, sizes)
    dims, widths = tuple(w.sizes[-1] for _, w in items), [4 * dim, *scoring.units, 1]
    if [(length, n) for n in widths[1:]] != [call_of(layer).sizes for layer in scoring.layers]:
        return None
    if widths[:-1] != [reads_of(layer)[0][1].sizes[1] for layer in scoring.layers] or not takes(length, dims, scoring.units):
        return None
    alike = [(x, Window(0, (length, d), (d, 1), w.offset)) for (_, w), d in zip(items, dims, strict=True)]
    if items != alike or query != Window(0, sizes, (0, 1), query.offset):
        return None
    if scoring.mask and not _is_mask(made_by[x], x, length, scoring.mask):
        return None
    pooled, mask = tuple(accumulate(dims[:-1], initial=0)), scoring.mask[1].offset if scoring.mask else -1
    attended = Attended(
        length, dims, tuple(query.offset + at for at in pooled), tuple(w.offset for _, w in items), pooled, mask,
        scale=scoring.scale,
    )  # fmt: skip
    attrs = Attrs(attended=attended, units=scoring.units, activation=scoring.activation, slope=scoring.slope)
    params = tuple(p for layer in scoring.layers for p in layer.params)
    fused = Node(last.name, "attention", (x,), last.outputs, last.module, params, attrs)
    return [product, *scoring.nodes, *others, *joins], fused


def _scoring(made_by: Mapping[str, Node], scores: str, length: int) -> _Scoring | None:
    """What makes a value of a score a step."""
    nodes, layers, masks, scale = list[Node](), list[Node](), list[Read](), 1.0
    node, activations = made_by[scores], set[tuple[str, float]]()
    while not is_call(node, "linear"):
        factor, reads = factor_of(node), reads_of(node) if node.op == "aten" else []
        masked = is_call(node, "mul") and len(reads) == 2
        if not (factor or masked) or not reads or reads[0][1] != whole((length,)):
            return None
        nodes, scale, masks = [*nodes, node], scale * (factor or 1.0), masks + reads[1:]
        node = made_by[reads[0][0]]
    while is_call(node, "linear") and len(reads_of(node)) == 1:
        ((_, read),) = reads_of(node)
        if call_of(node).operands != (read, Constant(0), Constant(1)) or read != whole((length, read.sizes[-1])):
            return None
        nodes, layers, before = [*nodes, node], [node, *layers], made_by[node.inputs[0]]
        if before.op != "activation" or before.params:
            if len(activations) != 1 or len(masks) > 1:
                return None
            ((activation, slope),) = activations
            return _Scoring(nodes, layers, before, activation, slope, scale, masks[0] if masks else None)
        activations.add((before.attrs.activation, before.attrs.slope))
        nodes, node = [*nodes, before], made_by[before.inputs[0]]
    return None


def _compared(made_by: Mapping[str, Node], joined: Node, keys: Read, sizes: Shape) -> tuple[Read, list[Node]] | None:
    """The query of each step, where what is joined is [q, k, q - k, q * k], and the nodes that make that of it and the keys."""
    parts = reads_of(joined) if is_call(joined, "cat") and call_of(joined).args == (2,) else []
    if len(parts) != 4 or parts[1] != keys:
        return None
    nodes = [joined]
    for op, (value, window) in zip(("sub", "mul"), parts[2:], strict=True):
        node = made_by[value]
        if not is_call(node, op) or reads_of(node) != parts[:2] or window != whole(sizes):
            return None
        nodes.append(node)
    return parts[0], nodes


def _items(made_by: Mapping[str, Node], keys: Read, sizes: Shape) -> tuple[list[Node], list[Read]]:
    """The node that joins the keys of several features, if there is one, and the keys of each."""
    maker = made_by[keys[0]]
    if is_call(maker, "cat") and call_of(maker).args == (2,) and call_of(maker).sizes == sizes and keys[1] == whole(sizes):
        return [maker], reads_of(maker)
    return [], [keys]


def takes(length: int, dims: Sequence[int], units: Sequence[int]) -> bool:
    """Whether a target attention fits its kernels, and the tensor cores of an H200. Wider layers are products for cuBLAS: by a
    block a row they run at 5.5 TFLOP/s.
    """
    row_words = length + 17 * sum(dims) + 32 * max(units) + units[0]
    dim, wide = sum(-(-d // 8) * 8 for d in dims), [-(-n // 16) * 16 for n in units]
    words = (3 * dim + 20) * wide[0] + sum((a + 4) * b for a, b in pairwise(wide)) + -(-length // 16) * (dim + 2)
    registers = 68 + 3 * dim // 4 + max(wide[1::2], default=0) // (2 if len(wide) < 3 else 1)
    return length >= 2 and row_words <= MOST_ROW_WORDS and words <= MOST_WORDS and registers <= MOST_REGISTERS


def _is_mask(maker: Node, value: str, length: int, mask: Read) -> bool:
    """Whether that is the mask of a sequence in a lookup's output `value`, whose kernels take it for 1 and 0."""
    sources = dict(zip(maker.outputs, maker.attrs.outputs_of_concat(), strict=False)).get(value, ())
    starts = accumulate((s.width for s in sources), initial=0)
    masks = (at for at, s in zip(starts, sources, strict=False) if s.table is None and s.width == length)
    return maker.op == "lookup" and mask in ((value, Window(0, (length,), (1,), at)) for at in masks)
