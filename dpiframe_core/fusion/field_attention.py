"""Finds attention over a row's fields among generic operators (AutoInt's interacting layer, Song et al. 2019, eq. 5 to 8), and
makes one operator of it. Graph in, graph out; nothing executable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dpiframe_core.fusion.generic_nodes import call_of, factor_of, is_call
from dpiframe_core.graph.aten import Constant, Window, contiguous
from dpiframe_core.graph.aten_rules import Shape
from dpiframe_core.graph.graph import Attrs, FieldHeads, Graph, Node

# What its kernel takes (kernels/attention/field_attention.py); columns begin 8 bytes aligned.
MOST_FIELDS, MOST_DIM, MOST_SIZE, ALIGNMENT = 64, 64, 32, 4


def fuse_field_attention(graph: Graph) -> Graph:
    """Linear layers Q, K, V of each field, softmax(scale Q K^T) V head by head, and R and ReLU behind become one operator."""
    found = _Finder(graph.producers(), graph.consumers())
    for softmax in graph.nodes:
        layer = found.around(softmax) if is_call(softmax, "softmax") else None
        if layer is None:
            continue
        nodes, fused = layer
        gone = {n.name for n in nodes}
        last = max(i for i, n in enumerate(graph.nodes) if n.name in gone)
        left = [fused if i == last else n for i, n in enumerate(graph.nodes) if i == last or n.name not in gone]
        return fuse_field_attention(replace(graph, nodes=tuple(left)))
    return graph


@dataclass(frozen=True, slots=True)
class _Projection:
    """What a linear layer of each field computes for one side of attention: its columns from `first` on."""

    layer: Node
    first: int


@dataclass(frozen=True, slots=True)
class _Finder:
    """Looks about in a graph: value name -> the node that makes it, and those that read it."""

    made_by: Mapping[str, Node]
    read_by: Mapping[str, Sequence[Node]]

    def around(self, softmax: Node) -> tuple[list[Node], Node] | None:
        """The nodes of the layer whose weights a softmax makes, and the one that computes them all; None if there is none."""
        sizes = call_of(softmax).sizes
        if len(sizes) != 3 or sizes[1] != sizes[2] or sizes[1] > MOST_FIELDS or call_of(softmax).args != (3,):
            return None
        heads, fields = sizes[:2]
        scaled, product, scale = self._scaled(softmax)
        weighted = self._reader(softmax)
        if not weighted or not (is_call(product, "matmul") and is_call(weighted, "matmul")):
            return None
        size = call_of(weighted).sizes[-1]
        width, square = heads * size, (heads, fields, fields)
        found = [
            self._projection(product, 0, (heads, fields, size), lambda whole: (size, whole, 1)),
            self._projection(product, 1, (heads, size, fields), lambda whole: (size, 1, whole)),
            self._projection(weighted, 1, (heads, fields, size), lambda whole: (size, whole, 1)),
        ]
        if _view(weighted, 0, square, contiguous(square)) != softmax.outputs[0] or size > MOST_SIZE:
            return None
        nodes = [softmax, *scaled, product, weighted]
        early = self._relu_behind(weighted)
        nodes += [early] if early else []
        if heads > 1:  # a step that puts the heads side by side
            joined = self._reader(nodes[-1])
            if not joined or not is_call(joined, "clone"):
                return None
            if _view(joined, 0, (fields, heads, size), (size, fields * size, 1)) != nodes[-1].outputs[0]:
                return None
            nodes.append(joined)
        added = self._reader(nodes[-1])
        other = None if early or added is None else self._other_term(added, nodes[-1].outputs[0], (fields, width))
        if added and other:
            found, nodes = [*found, other], [*nodes, added]
        projections = [p for p in found if p is not None]
        x = self._common_input(projections, nodes, fields)
        if x is None or len({(p.layer.name, p.first) for p in projections}) < len(found):
            return None
        late = None if early else self._relu_behind(nodes[-1])
        nodes += [late] if late else []
        attrs = Attrs(
            fields=fields, dim=x[1].sizes[1], offset=x[1].offset, activation="relu" if early or late else "identity",
            field_heads=FieldHeads(heads, size, scale, *_rows_of(projections)),
        )  # fmt: skip
        params = tuple(name for p in projections for name in p.layer.params)
        fused = Node(f"{softmax.name}.layer", "field_attention", (x[0],), nodes[-1].outputs, softmax.module, params, attrs)
        return [*nodes, *(p.layer for p in projections)], fused

    def _reader(self, node: Node) -> Node | None:
        """The node that reads a node's value, if there is but one."""
        readers = self.read_by.get(node.outputs[0], ())
        return readers[0] if len(readers) == 1 else None

    def _relu_behind(self, node: Node) -> Node | None:
        """The ReLU that alone reads a node's value."""
        after = self._reader(node)
        return after if after and after.op == "activation" and after.attrs.activation == "relu" else None

    def _scaled(self, softmax: Node) -> tuple[list[Node], Node, float]:
        """The nodes that do nothing but scale a softmax's logits, the one before them, and what they multiply by together."""
        nodes, node, scale = list[Node](), softmax, 1.0
        while True:
            count = self._elements(node)
            before = self.made_by[node.inputs[0]]
            if count is None or self._reader(before) is not node:
                return nodes, softmax, scale
            factor = factor_of(before)
            if factor is None:
                return nodes, before, scale
            nodes, node, scale = [*nodes, before], before, scale * factor

    def _elements(self, node: Node) -> int | None:
        """How many elements a node's first operand has, if it is all of a value in order."""
        operand = call_of(node).operands[0]
        if not isinstance(operand, Window) or operand.offset or not _same(operand, operand.sizes, contiguous(operand.sizes)):
            return None
        made = self.made_by[node.inputs[operand.value]]
        whole = made.op == "aten" and _count(call_of(made).sizes) == _count(operand.sizes)
        return _count(operand.sizes) if whole else None

    def _projection(self, node: Node, i: int, sizes: Shape, strides: Callable[[int], Shape]) -> _Projection | None:
        """What operand i takes of a linear layer of each field, whose width tells the strides; None if it takes another."""
        operand = call_of(node).operands[i]
        layer = self.made_by[node.inputs[operand.value]] if isinstance(operand, Window) else None
        if layer is None or not is_call(layer, "linear") or len(call_of(layer).sizes) != 2:
            return None
        assert isinstance(operand, Window)
        return _Projection(layer, operand.offset) if _same(operand, sizes, strides(call_of(layer).sizes[1])) else None

    def _other_term(self, node: Node, value: str, sizes: Shape) -> _Projection | None:
        """The projection that is added to a value of these sizes; None if the node does another thing."""
        if node.op == "add" and len(node.inputs) == 2 and value in node.inputs:
            (other,) = set(node.inputs) - {value} or {value}
            layer = self.made_by[other]
            return _Projection(layer, 0) if is_call(layer, "linear") and call_of(layer).sizes == sizes else None
        if not is_call(node, "add"):
            return None
        for i in (0, 1):
            if _view(node, 1 - i, sizes, contiguous(sizes)) == value:
                return self._projection(node, i, sizes, lambda whole: (whole, 1))
        return None

    def _common_input(
        self, projections: Sequence[_Projection], nodes: Sequence[Node], fields: int
    ) -> tuple[str, Window] | None:
        """The value, and the window of its fields, that all linear layers read; None where they differ or others read them."""
        found, inside = set[tuple[str, Window]](), {n.name for n in nodes}
        for p in projections:
            x, *constants = call_of(p.layer).operands
            if any(n.name not in inside for n in self.read_by[p.layer.outputs[0]]) or call_of(p.layer).sizes[0] != fields:
                return None
            if not isinstance(x, Window) or constants != [Constant(i) for i in range(len(p.layer.params))]:
                return None
            found.add((p.layer.inputs[x.value], x))
        if len(found) != 1:
            return None
        (value, x) = found.pop()
        fits = len(x.sizes) == 2 and x.sizes[1] <= MOST_DIM and x.offset % ALIGNMENT == 0
        return (value, x) if fits and _same(x, (fields, x.sizes[1]), (x.sizes[1], 1)) else None


def _rows_of(projections: Sequence[_Projection]) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Which have a bias, and the first row of each."""
    return tuple(len(p.layer.params) == 2 for p in projections), tuple(p.first for p in projections)


def _count(sizes: Shape) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _same(w: Window, sizes: Shape, strides: Shape) -> bool:
    """Whether a window has these sizes and strides; along a dimension of one element it goes nowhere."""
    return w.sizes == sizes and all(n == 1 or s == t for n, s, t in zip(sizes, w.strides, strides, strict=True))


def _view(node: Node, i: int, sizes: Shape, strides: Shape) -> str | None:
    """The value of which operand i is such a window, from its first column on; None if it is another."""
    operand = call_of(node).operands[i]
    fits = isinstance(operand, Window) and not operand.offset and _same(operand, sizes, strides)
    return node.inputs[operand.value] if isinstance(operand, Window) and fits else None
