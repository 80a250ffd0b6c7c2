"""Nodes of the feature interactions that read columns of a value: pairwise dots, the compressed interaction network, target
attention, a mixture of experts, recurrences. Graph nodes only, their shapes checked. Among generic operators it finds the
compressed interaction network as libraries write it: an outer product, a convolution of width 1 and an activation a layer.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol, Self, TypeVar

from dpiframe_core.graph.aten import Constant, Window
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.field_attention import Read, call_of, factor_of, fuse_ends, is_call, reads_of, whole
from dpiframe_core.graph.graph import ACTIVATION_PARAMS, Attended, Attrs, Graph, Node

MOST_FIELDS, MOST_DIM = 80, 256  # what its kernel takes (kernels/interaction/cin.py)
# Of target attention in shared memory: words of a row, which all GPUs have (kernels/attention/attention.py), and on the tensor
# cores in tf32 all words, and registers of a thread (kernels/attention/attention_mma.py).
MOST_ROW_WORDS, MOST_WORDS, MOST_REGISTERS = 15_000, 56_000, 255
_OUTER = re.compile(r"(\w)(\w)(\w),\1(\w)\3->\1\2\4\3")

T = TypeVar("T")


class _Rows(Protocol):
    def __getitem__(self, rows: slice, /) -> Self: ...


R = TypeVar("R", bound=_Rows)


def dot(
    g: GraphBuilder, values: Sequence[str], dim: int, name: str, module: str, *, keep: int = 0, diagonal: bool = False
) -> str:
    """The first `keep` columns of the joined values, then <v_i, v_j> of all their vectors of `dim` columns with j < i
    (`diagonal`: j <= i), row by row: (1,0), (2,0), (2,1), .. (Naumov et al. 2019).
    """
    width = sum(map(g.width, values))
    fields, rest = divmod(width, dim)
    if rest or keep > width or not fields or not 1 <= len(values) <= 2:
        got = f"{len(values)} values of {width} columns, {keep} to keep"
        raise ValueError(f"{name}: got {got}, expected one or two values of whole vectors of {dim}")
    attrs = Attrs(fields=fields, dim=dim, keep=keep, diagonal=diagonal)
    pairs = fields * (fields + (1 if diagonal else -1)) // 2
    return g.node(Node(name, "dot", tuple(values), (name,), module, attrs=attrs), keep + pairs)


def cin(
    g: GraphBuilder, x: str, offset: int, fields: int, dim: int, units: Sequence[int], prefix: str, module: str,
    *, activation: str = "identity", slope: float = 0.0, halves: bool = False, bias: bool = True,
) -> str:  # fmt: skip
    """The compressed interaction network of m = `fields` vectors from column `offset` on (Lian et al. 2018, eq. 6 and 7).

    X^k[n, d] = activation(sum_ij W^k[n, i m + j] X^{k-1}[i, d] X^0[j, d] + b^k[n]), summed over d. With `halves` the first
    half of a layer's maps goes into the next layer and the second half is summed, but for the last layer: all of it.
    """
    if offset + fields * dim > g.width(x):
        raise ValueError(f"{prefix}: got columns up to {offset + fields * dim}, expected at most {g.width(x)}")
    if not units or activation in ACTIVATION_PARAMS or (halves and any(u % 2 for u in units[:-1])):
        raise ValueError(f"{prefix}: got units {list(units)} and {activation}, expected layers (even if halved), no parameters")
    attrs = Attrs(
        offset=offset, fields=fields, dim=dim, units=tuple(units), halves=halves, activation=activation, slope=slope
    )  # fmt: skip
    params, before, pooled = [], fields, 0
    for k, n in enumerate(units):
        params.append(g.param(f"{prefix}.{k}.weight", (n, before * fields)))
        if bias:
            params.append(g.param(f"{prefix}.{k}.bias", (n,)))
        before = n // 2 if halves else n
        pooled += before if k < len(units) - 1 else n
    return g.node(Node(prefix, "cin", (x,), (prefix,), module, tuple(params), attrs), pooled)


def attention(
    g: GraphBuilder, x: str, attended: Attended, units: Sequence[int], prefix: str, module: str,
    *, activation: str = "sigmoid", slope: float = 0.0,
) -> str:  # fmt: skip
    """Target attention (Zhou et al. 2018, eq. 3): sum_l w_l k_l, w_l = an MLP of [q, k_l, q - k_l, q * k_l].

    Its layers are `prefix.{i}.weight` [units[i], 4 d or units[i - 1]], `.bias` and their activation's parameters, its
    output `prefix.out.weight` [1, units[-1]] and `.bias` [1]. Weights are multiplied by the mask, and with softmax what is
    masked weighs nothing.
    """
    a, width = attended, g.width(x)
    ends = [q + d for q, d in zip(a.queries, a.dims, strict=True)] + [a.mask + a.length if a.mask >= 0 else 0]
    ends += [k + a.length * d for k, d in zip(a.keys, a.dims, strict=True)] + [at + n for at, _, n in a.kept]
    if max(ends) > width or min((*a.queries, *a.keys)) < 0 or a.length < 1 or not units:
        raise ValueError(f"{prefix}: got columns up to {max(ends)} and {len(units)} layers, expected <= {width} and >= 1")
    params, before = list[str](), 4 * a.dim
    for i, n in enumerate(units):
        params += [g.param(f"{prefix}.{i}.weight", (n, before)), g.param(f"{prefix}.{i}.bias", (n,))]
        params += g.activation_params(activation, f"{prefix}.{i}", n)
        before = n
    params += [g.param(f"{prefix}.out.weight", (1, before)), g.param(f"{prefix}.out.bias", (1,))]
    attrs = Attrs(attended=a, units=tuple(units), activation=activation, slope=slope)
    out = sum(n for _, _, n in a.kept) + a.dim
    return g.node(Node(prefix, "attention", (x,), (prefix,), module, tuple(params), attrs), out)


def mixture(g: GraphBuilder, x: str, gates: str, name: str, module: str) -> str:
    """softmax(gates)[i] times the i-th of as many equally wide parts of x."""
    fields = g.width(gates)
    if g.width(x) % fields:
        raise ValueError(f"{name}: got {g.width(x)} columns, expected a multiple of the {fields} gates")
    attrs = Attrs(fields=fields, dim=g.width(x) // fields)
    return g.node(Node(name, "mixture", (x, gates), (name,), module, attrs=attrs), g.width(x))


def linear_params(a: Attrs, params: Sequence[T]) -> tuple[T, T | None, Sequence[T]]:
    """Weight, bias if there is one, and the parameters of the activation, of a linear node's parameters."""
    own = len(params) - len(ACTIVATION_PARAMS.get(a.activation, ()))
    return params[0], params[1] if own == 2 else None, params[own:]


def field_projections(attrs: Attrs, params: Sequence[R]) -> list[tuple[R, R | None]]:
    """(weight, bias or None) of each projection of an attention over fields, from its node's parameters: rows of theirs."""
    heads = attrs.field_heads
    assert heads is not None
    left, projections = iter(params), []
    for biased, first in zip(heads.biases, heads.firsts, strict=True):
        own = slice(first, first + heads.heads * heads.size)
        projections.append((next(left)[own], next(left)[own] if biased else None))
    return projections


def fuse_cin(graph: Graph) -> Graph:
    """All layers of a network whose maps nothing else reads become one `cin`."""
    return fuse_ends(graph, _network)


def _network(made_by: Mapping[str, Node], last: Node) -> tuple[list[Node], Node] | None:
    """The nodes of the network that ends in `last`, but it, and the one that computes it all; None if none ends there."""
    nodes, summed = _summed(made_by, last)
    linears, factors, activations = list[Node](), list[list[Read]](), set[tuple[str, float]]()
    for value, _ in summed:
        end = made_by[value]
        linear = made_by[end.inputs[0]] if end.op == "activation" and not end.params else end
        product = made_by[linear.inputs[0]] if is_call(linear, "linear") and len(linear.inputs) == 1 else None
        found = _outer(product) if product else []
        if product is None or not found:
            return None
        maps, fields, dim = call_of(product).sizes
        constants = (Constant(i) for i in range(len(linear.params)))
        if call_of(linear).operands != (Window(0, (dim, maps * fields), (1, dim)), *constants):
            return None
        nodes += [product, linear, end] if end is not linear else [product, linear]
        linears, factors = [*linears, linear], [*factors, found]
        activations.add((end.attrs.activation, end.attrs.slope))
    if not summed:
        return None
    x, window = first = factors[0][0]
    (fields, dim), turned = window.sizes, len(factors) > 1 and factors[1][0] == first
    units, halves = tuple(call_of(linear).sizes[1] for linear in linears), set[tuple[bool, bool] | None]()
    before, beside = zip(*(f[::-1] if turned else f for f in factors), strict=True)
    for n, (value, own), (of, on) in zip(units, summed, (*before[1:], summed[-1]), strict=True):
        half = n // 2 if n % 2 == 0 else 0
        whole, low, high = (Window(0, (size, dim), (1, n), at) for size, at in ((n, 0), (half, 0), (half, half)))
        way = {(whole, whole): (False, False), (high, low): (True, False), (low, high): (True, True)}.get((own, on))
        if way is None or of != value or value != summed[-1][0]:  # all maps of the last layer are summed alone
            halves.add(way if of == value else None)
    alike = len(halves) < 2 and len(activations) == 1 and len({len(n.params) for n in linears}) == 1
    if not alike or None in halves or {before[0], *beside} != {first} or window.strides != (dim, 1):
        return None
    if fields > MOST_FIELDS or dim > MOST_DIM:
        return None
    ((activation, slope),) = activations
    cut, second_on = next(iter(halves), None) or (False, False)
    attrs = Attrs(
        offset=window.offset, fields=fields, dim=dim, units=units, halves=cut, activation=activation, slope=slope,
        fields_first=turned, second_on=second_on,
    )  # fmt: skip
    params = tuple(p for linear in linears for p in linear.params)
    return nodes, Node(last.name, "cin", (x,), last.outputs, last.module, params, attrs)


def _summed(made_by: Mapping[str, Node], last: Node) -> tuple[list[Node], list[Read]]:
    """What a node sums over the embedding, joined before or behind, a window a layer; and the other nodes of that."""
    if last.op == "concat":
        each = [made_by[value] for value in last.inputs]
        return each, [read for n in each for read in reads_of(n)] if all(map(_sums, each)) else []
    if not _sums(last):
        return [], []
    if len(reads := reads_of(last)) != 1:
        return [], []
    ((value, window),) = reads
    joined = made_by[value]
    if not is_call(joined, "cat") or call_of(joined).args != (1,):
        return [], reads
    sizes = call_of(joined).sizes
    return [joined], reads_of(joined) if window == whole(sizes) else []


def _sums(n: Node) -> bool:
    return is_call(n, "sum") and call_of(n).args[0] == (2,)


def _outer(n: Node) -> list[Read]:
    """The factors [a, dim] and [b, dim] of a product [a, b, dim]; none of another node."""
    if is_call(n, "einsum") and _OUTER.fullmatch(str(call_of(n).args[0])):
        return reads if len(reads := reads_of(n)) == 2 else []
    reads = reads_of(n) if is_call(n, "mul") and len(call_of(n).sizes) == 3 else []
    for (a, u), (b, v) in (reads, reads[::-1]) if len(reads) == 2 else ():
        if len(u.sizes) == len(v.sizes) == 3 and u.sizes[1] == v.sizes[0] == 1 and u.sizes[2] == v.sizes[2]:
            return [(a, _without(u, 1)), (b, _without(v, 0))]
    return []


def _without(w: Window, dim: int) -> Window:
    return Window(0, w.sizes[:dim] + w.sizes[dim + 1 :], w.strides[:dim] + w.strides[dim + 1 :], w.offset)


def fuse_target_attention(graph: Graph) -> Graph:
    """Scores of [q, k, q - k, q * k], masked and scaled, and the sum of the keys that they weigh become one `attention`."""
    return fuse_ends(graph, _interest)


def _interest(made_by: Mapping[str, Node], last: Node) -> tuple[list[Node], Node] | None:
    """The nodes of the attention that ends in a sum over the history, but it, and the one that computes it all."""
    weighted = made_by[last.inputs[0]] if is_call(last, "sum") and call_of(last).args[0] == (1,) else last
    sizes = call_of(weighted).sizes if weighted is not last and is_call(weighted, "mul") else ()
    if len(sizes) != 2 or reads_of(last) != [(weighted.outputs[0], whole(sizes))] or len(reads_of(weighted)) != 2:
        return None
    (scores, across), (keys, window) = reads_of(weighted)
    length, dim = sizes
    nodes, node, scale, masks, kinds = [weighted], made_by[scores], 1.0, list[Read](), set[tuple[str, float]]()
    while not is_call(node, "linear"):
        factor, reads = factor_of(node), reads_of(node) if node.op == "aten" else []
        if (factor is None and not (is_call(node, "mul") and len(reads) == 2)) or not reads or reads[0][1] != whole((length,)):
            return None
        nodes, node, scale, masks = [*nodes, node], made_by[reads[0][0]], scale * (factor or 1.0), masks + reads[1:]
    layers = list[Node]()
    while is_call(node, "linear") and len(reads_of(node)) == 1:
        ((_, read),) = reads_of(node)
        if call_of(node).operands != (read, Constant(0), Constant(1)) or read != whole((length, read.sizes[-1])):
            return None
        layers, nodes, joined = [node, *layers], [*nodes, node], made_by[node.inputs[0]]
        if joined.op != "activation" or joined.params:
            break
        kinds.add((joined.attrs.activation, joined.attrs.slope))
        nodes, node = [*nodes, joined], made_by[joined.inputs[0]]
    else:
        return None
    parts = reads_of(joined) if is_call(joined, "cat") and call_of(joined).args == (2,) else []
    if len(parts) != 4 or across != Window(0, (length, 1), (1, 0)) or len(kinds) != 1 or len(masks) > 1:
        return None
    (x, query), *others = parts
    less, times = (made_by[value] for value, _ in others[1:])
    if others != [(keys, window), (less.outputs[0], whole(sizes)), (times.outputs[0], whole(sizes))]:
        return None
    if not is_call(less, "sub") or not is_call(times, "mul") or [reads_of(less), reads_of(times)] != [parts[:2]] * 2:
        return None
    nodes, of, own = [*nodes, joined, less, times], made_by[keys], [(keys, window)]
    if is_call(of, "cat") and call_of(of).args == (2,) and call_of(of).sizes == sizes and window == whole(sizes):
        nodes, own = [*nodes, of], reads_of(of)
    dims, units = tuple(w.sizes[-1] for _, w in own), tuple(call_of(n).sizes[1] for n in layers[:-1])
    pooled = tuple(sum(dims[:i]) for i in range(len(dims)))
    if [reads_of(n)[0][1].sizes[1] for n in layers] != [4 * dim, *units] or call_of(layers[-1]).sizes != (length, 1):
        return None
    (mask,) = masks or [(x, Window(0, (length,), (1,), -1))]
    fits = all(read == (x, Window(0, (length, d), (d, 1), read[1].offset)) for read, d in zip(own, dims, strict=True))
    if not fits or query != Window(0, sizes, (0, 1), query.offset) or mask != (x, Window(0, (length,), (1,), mask[1].offset)):
        return None
    if masks and not _is_mask(made_by[x], x, mask[1]):
        return None
    if length < 2 or not takes(length, dims, units):
        return None
    ((activation, slope),) = kinds
    attended = Attended(
        length, dims, tuple(query.offset + at for at in pooled), tuple(w.offset for _, w in own), pooled, mask[1].offset,
        scale=scale,
    )  # fmt: skip
    attrs = Attrs(attended=attended, units=units, activation=activation, slope=slope)
    params = tuple(p for layer in layers for p in layer.params)
    return nodes, Node(last.name, "attention", (x,), last.outputs, last.module, params, attrs)


def takes(length: int, dims: Sequence[int], units: Sequence[int]) -> bool:
    """Whether a target attention fits its kernels, and the tensor cores of an H200. Wider layers are products for cuBLAS: by a
    block a row they run at 5.5 TFLOP/s.
    """
    row_words = length + 17 * sum(dims) + 32 * max(units) + units[0]
    dim, wide = sum(-(-d // 8) * 8 for d in dims), [-(-n // 16) * 16 for n in units]
    words = (3 * dim + 20) * wide[0] + sum((a + 4) * b for a, b in pairwise(wide)) + -(-length // 16) * (dim + 2)
    registers = 68 + 3 * dim // 4 + max(wide[1::2], default=0) // (2 if len(wide) < 3 else 1)
    return row_words <= MOST_ROW_WORDS and words <= MOST_WORDS and registers <= MOST_REGISTERS


def _is_mask(maker: Node, value: str, window: Window) -> bool:
    """Whether a window of a lookup's output is the mask of a sequence, whose kernels take it for 1 and 0."""
    sources = dict(zip(maker.outputs, maker.attrs.outputs_of_concat(), strict=False)).get(value, ())
    starts = accumulate((s.width for s in sources), initial=0)
    mask = (window.offset, None, window.sizes[0])
    return maker.op == "lookup" and mask in ((at, s.table, s.width) for at, s in zip(starts, sources, strict=False))
