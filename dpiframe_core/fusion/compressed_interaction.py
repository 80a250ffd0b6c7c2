"""Finds the compressed interaction network (Lian et al. 2018) among generic operators, as libraries write it, and makes one
operator of it: a layer is an outer product, a convolution of width 1 and perhaps an activation. Graph in, graph out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpiframe_core.fusion.generic_nodes import Read, call_of, fuse_ends, is_call, reads_of, whole
from dpiframe_core.graph.aten import Constant, Window
from dpiframe_core.graph.graph import Attrs, Graph, Node

MOST_FIELDS, MOST_DIM = 80, 256  # what its kernel takes (kernels/interaction/cin.py)
_OUTER = re.compile(r"(\w)(\w)(\w),\1(\w)\3->\1\2\4\3")


def fuse_cin(graph: Graph) -> Graph:
    """All layers of a network whose maps nothing else reads become one `cin`."""
    return fuse_ends(graph, _network)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Maps [dim, maps], from the outer product of two factors [n, dim]: the maps before and the fields, or turned."""

    nodes: tuple[Node, ...]  # product, linear layer, and an activation, if it has one
    factors: tuple[Read, Read]
    activation: str
    slope: float

    @property
    def linear(self) -> Node:
        return self.nodes[1]

    @property
    def units(self) -> int:
        return call_of(self.linear).sizes[1]


def _network(made_by: Mapping[str, Node], last: Node) -> tuple[list[Node], Node] | None:
    """The nodes of the network that ends in `last`, but it, and the one that computes it all; None if none ends there."""
    others, summed = _summed(made_by, last)
    layers = [layer for value, _ in summed if (layer := _layer(made_by, value))]
    if not layers or len(layers) < len(summed):
        return None
    x, window = first = layers[0].factors[0]
    turned = len(layers) > 1 and layers[1].factors[0] == first
    before, beside = zip(*(layer.factors[::-1] if turned else layer.factors for layer in layers), strict=True)
    units = tuple(layer.units for layer in layers)
    fields, dim = window.sizes
    cut = _cut(units, dim, summed, before[1:])
    alike = len({(layer.activation, layer.slope, len(layer.linear.params)) for layer in layers}) == 1
    if cut is None or not alike or {before[0], *beside} != {first}:
        return None
    if window.strides != (dim, 1) or fields > MOST_FIELDS or dim > MOST_DIM:
        return None
    attrs = Attrs(
        offset=window.offset, fields=fields, dim=dim, units=units, halves=cut[0], activation=layers[0].activation,
        slope=layers[0].slope, fields_first=turned, second_on=cut[1],
    )  # fmt: skip
    params = tuple(p for layer in layers for p in layer.linear.params)
    nodes = [*others, *(n for layer in layers for n in layer.nodes)]
    return nodes, Node(last.name, "cin", (x,), last.outputs, last.module, params, attrs)


def _summed(made_by: Mapping[str, Node], last: Node) -> tuple[list[Node], list[Read]]:
    """What a node sums over the embedding, joined before or behind, a window a layer; and the other nodes of that."""
    if last.op == "concat":
        each = [made_by[value] for value in last.inputs]
        return each, [read for n in each for read in reads_of(n)] if all(map(_sums, each)) else []
    if not _sums(last) or len(reads := reads_of(last)) != 1:
        return [], []
    ((value, window),) = reads
    joined = made_by[value]
    if not is_call(joined, "cat") or call_of(joined).args != (1,):
        return [], reads
    return [joined], reads_of(joined) if window == whole(call_of(joined).sizes) else []


def _sums(n: Node) -> bool:
    return is_call(n, "sum") and call_of(n).args[0] == (2,)


def _layer(made_by: Mapping[str, Node], value: str) -> _Layer | None:
    """The layer whose maps are this value."""
    end = made_by[value]
    linear = made_by[end.inputs[0]] if end.op == "activation" and not end.params else end
    product = made_by[linear.inputs[0]] if is_call(linear, "linear") and len(linear.inputs) == 1 else None
    factors = _outer(product) if product else None
    if product is None or factors is None:
        return None
    maps, fields, dim = call_of(product).sizes
    constants = (Constant(i) for i in range(len(linear.params)))
    if call_of(linear).operands != (Window(0, (dim, maps * fields), (1, dim)), *constants):
        return None
    nodes = (product, linear) if end is linear else (product, linear, end)
    return _Layer(nodes, factors, end.attrs.activation, end.attrs.slope)


def _outer(n: Node) -> tuple[Read, Read] | None:
    """The factors [a, dim] and [b, dim] of a product [a, b, dim]."""
    if is_call(n, "einsum") and _OUTER.fullmatch(str(call_of(n).args[0])):
        reads = reads_of(n)
        return (reads[0], reads[1]) if len(reads) == 2 else None
    reads = reads_of(n) if is_call(n, "mul") and len(call_of(n).sizes) == 3 else []
    for (a, u), (b, v) in (reads, reads[::-1]) if len(reads) == 2 else ():
        if len(u.sizes) == len(v.sizes) == 3 and u.sizes[1] == v.sizes[0] == 1 and u.sizes[2] == v.sizes[2]:
            return (a, _without(u, 1)), (b, _without(v, 0))
    return None


def _without(w: Window, dim: int) -> Window:
    return Window(0, w.sizes[:dim] + w.sizes[dim + 1 :], w.strides[:dim] + w.strides[dim + 1 :], w.offset)


def _cut(units: Sequence[int], dim: int, summed: Sequence[Read], on: Sequence[Read]) -> tuple[bool, bool] | None:
    """Whether each layer but the last has half of its maps summed, and whether it is the second half that goes on.

    `summed`: the maps of each layer that are summed, `on`: those that the next one takes. None where layers differ.
    """
    if summed[-1][1] != Window(0, (units[-1], dim), (1, units[-1])):
        return None
    ways = set[tuple[bool, bool] | None]()
    for n, (value, own), (of, further) in zip(units[:-1], summed[:-1], on, strict=True):
        every, low, high = (Window(0, (size, dim), (1, n), at) for size, at in ((n, 0), (n // 2, 0), (n // 2, n // 2)))
        known = {(every, every): (False, False)}
        known |= {(high, low): (True, False), (low, high): (True, True)} if n % 2 == 0 else {}
        ways.add(known.get((own, further)) if of == value else None)
    return next(iter(ways), (False, False)) if len(ways) < 2 else None
