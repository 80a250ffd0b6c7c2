"""Finds among generic operators what few can do: the factorization machine, 1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2), as
usually written; and a layer norm for each field.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from dpiframe_core.graph.aten import AtenCall, Constant, Window
from dpiframe_core.graph.graph import Attrs, Graph, Node

HALVES = {("aten.mul.Scalar", 0.5), ("aten.div.Scalar", 2), ("aten.div.Scalar", 2.0)}


def recognise_fm(graph: Graph) -> Graph:
    """The graph with an `fm` operator in place of each factorization machine's last one; what fed it may be dead then."""
    finder = _Finder(graph)
    nodes = [finder.replaced(n) for n in graph.nodes]
    params = {p: graph.params[p] for n in nodes for p in n.params}
    return replace(graph, nodes=tuple(nodes), params=params)


def join_norms(graph: Graph, params: Mapping[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
    """Fields that lie side by side, each with a layer norm of its own, and are joined again (MaskNet's first layer): one norm
    of all, times all weights, plus all biases. 26 small ones cost a CPU more than half of the model's time for one row.
    """
    made_by, consumers, nodes = graph.producers(), graph.consumers(), list[Node]()
    params, widths, gone = dict(params), dict(graph.widths), set[str]()
    for n in graph.nodes:
        norms = [made_by[v] for v in n.inputs]
        fields = _fields_of(norms) if n.op == "concat" else None
        if fields is None or any(len(consumers[v]) > 1 for v in n.inputs):
            nodes.append(n)
            continue
        call, names = norms[0].attrs.aten, [f"{n.name}.{part}" for part in ("normed", "scaled", "weight", "bias")]
        assert call is not None
        normed = AtenCall(call.op, (fields,), call.args, fields.sizes)
        scaled = AtenCall("aten.mul", (Window(0, (widths[n.outputs[0]],), (1,)), Constant(0)), (), (widths[n.outputs[0]],))
        params |= {name: torch.cat([params[m.params[i]] for m in norms]) for i, name in enumerate(names[2:])}
        widths |= dict.fromkeys(names[:2], widths[n.outputs[0]])
        nodes += [
            Node(names[0], "aten", norms[0].inputs, (names[0],), norms[0].module, attrs=Attrs(aten=normed)),
            Node(names[1], "aten", (names[0],), (names[1],), norms[0].module, (names[2],), Attrs(aten=scaled)),
            Node(n.name, "bias", (names[1],), n.outputs, norms[0].module, (names[3],)),
        ]
        gone |= {m.name for m in norms}
    left = tuple(n for n in nodes if n.name not in gone)
    shapes = {p: tuple(params[p].shape) for n in left for p in n.params}
    return Graph(left, {o: widths[o] for n in left for o in n.outputs}, shapes, graph.output), params


def _fields_of(norms: list[Node]) -> Window | None:
    """The window [fields, dim] that layer norms with a weight and a bias read, one the field behind the last one's."""
    found = list[Window]()
    for i, n in enumerate(norms):
        call, first = n.attrs.aten, norms[0]
        x = call.operands[0] if call and call.op == "aten.layer_norm" else None
        if call is None or not isinstance(x, Window) or call.operands[1:] != (Constant(0), Constant(1)):
            return None
        if first.attrs.aten is None or n.inputs != first.inputs or call.args != first.attrs.aten.args or len(set(n.params)) < 2:
            return None
        found.append(x)
        if len(x.sizes) != 1 or x.sizes != found[0].sizes or x.strides != (1,) or x.offset != found[0].offset + i * x.sizes[0]:
            return None
    return Window(0, (len(found), *found[0].sizes), (*found[0].sizes, 1), found[0].offset) if len(found) > 1 else None


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self._made_by, self._widths = graph.producers(), graph.widths

    def replaced(self, n: Node) -> Node:
        """1/2 of the sum, or the sum of the halves: the outer two may stand either way round."""
        value = n.outputs[0]
        if self._widths[value] != 1:
            return n
        total = self._halved(value)
        inner = self._summed(total) if total else None
        if inner is None:
            whole = self._summed(value)
            inner = self._halved(whole) if whole else None
        found = self._pairs(inner) if inner else None
        if found is None:
            return n
        base, offset, fields, dim = found
        return Node(n.name, "fm", (base,), n.outputs, n.module, attrs=Attrs(offset=offset, fields=fields, dim=dim))

    def _pairs(self, value: str) -> tuple[str, int, int, int] | None:
        """(sum_i v)^2 - sum_i v^2 as (value, first column, fields, dim)."""
        call = self._call(value, "aten.sub")
        if call is None or not all(self._is_whole(value, i) for i in (0, 1)):
            return None
        of_sum, of_squares = (self._input(value, i) for i in (0, 1))
        summed = self._squared(of_sum)
        fields = self._over_fields(summed) if summed else None
        squares = self._over_fields(of_squares)
        if fields is None or squares is None or fields[1].sizes != squares[1].sizes:
            return None
        base, window = fields
        squared = self._squared(squares[0])
        if squared == base and squares[1].offset == window.offset:  # the whole value squared
            return base, window.offset, *window.sizes  # type: ignore[return-value]
        call = self._call(squares[0], None)
        if call and squared is None and squares[1].offset == 0 and self._squares_of(squares[0], base, window):
            return base, window.offset, *window.sizes  # type: ignore[return-value]
        return None

    def _call(self, value: str, op: str | None) -> AtenCall | None:
        call = self._made_by[value].attrs.aten
        return call if call and op in (None, call.op) else None

    def _input(self, value: str, operand: int) -> str:
        call = self._call(value, None)
        assert call is not None
        window = call.operands[operand]
        assert isinstance(window, Window)
        return self._made_by[value].inputs[window.value]

    def _is_whole(self, value: str, operand: int) -> bool:
        """Whether an operand is all of its value, in order."""
        call = self._call(value, None)
        window = call.operands[operand] if call else None
        if not isinstance(window, Window) or window.offset:
            return False
        step = 1
        for size, stride in reversed(list(zip(window.sizes, window.strides, strict=True))):
            if size > 1 and stride != step:
                return False
            step *= size
        return step == self._widths[self._input(value, operand)]

    def _halved(self, value: str) -> str | None:
        call = self._call(value, None)
        if call and len(call.args) == 1 and (call.op, call.args[0]) in HALVES and self._is_whole(value, 0):
            return self._input(value, 0)
        return None

    def _summed(self, value: str) -> str | None:
        """v of sum(v) over all columns."""
        node = self._made_by[value]
        if node.op == "sum":
            return node.inputs[0]
        call = self._call(value, "aten.sum")
        return self._input(value, 0) if call and self._widths[value] == 1 and self._is_whole(value, 0) else None

    def _squared(self, value: str) -> str | None:
        """v of v * v or v ** 2, over whole values."""
        node, call = self._made_by[value], self._call(value, None)
        if node.op == "mul" and node.inputs[0] == node.inputs[1]:
            return node.inputs[0]
        if call and self._is_square(call) and self._is_whole(value, 0):
            return self._input(value, 0)
        return None

    def _squares_of(self, value: str, base: str, window: Window) -> bool:
        call = self._call(value, None)
        return bool(call and self._is_square(call) and self._made_by[value].inputs == (base,) and call.operands[0] == window)

    @staticmethod
    def _is_square(call: AtenCall) -> bool:
        twice = call.op == "aten.mul" and call.operands[0] == call.operands[1]
        return twice or call.op == "aten.square" or (call.op == "aten.pow.Scalar" and call.args == (2,))

    def _over_fields(self, value: str) -> tuple[str, Window] | None:
        """sum over the fields of [fields, dim] side by side: the value and its columns."""
        call = self._call(value, "aten.sum")
        window = call.operands[0] if call else None
        if not call or not isinstance(window, Window) or call.args[0] != (1,) or len(window.sizes) != 2:
            return None
        return (self._input(value, 0), window) if window.strides == (window.sizes[1], 1) else None
