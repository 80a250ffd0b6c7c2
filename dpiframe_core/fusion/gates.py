"""Rewrites that waves and chains have kernels for, and nothing else: gates and layer norms. Graph in, graph out; plain data.

A gate is a value times an activated layer of another: FinalMLP's 2 sigmoid(W g + b) * x, MaskNet's masks, and the bilinear form
sum_h a_h W_h b_h, whose sum the head takes. As operators of their own they are a launch each of few numbers.
"""

from dataclasses import replace

from dpiframe_core.fusion.passes import MAX_PARTS, only, rebuilt
from dpiframe_core.graph.aten import AtenCall, Constant, Window, contiguous
from dpiframe_core.graph.graph import Attrs, Graph, Node
from dpiframe_core.graph.placement import ALIGNMENT

SUMMED = -1  # in the place of a part's first column of a head's weights: it is summed up as it is
_ACTIVATIONS = ("identity", "relu", "sigmoid", "tanh")


def fuse_gates(graph: Graph) -> Graph:
    """The graph with `gated` and `norm` nodes."""
    for one in (_one_gate, _one_norm):
        while (found := one(graph)) is not None:
            graph = found
    return _summed(graph)


def _one_gate(graph: Graph) -> Graph | None:
    """linear or a bilinear form's product, perhaps times a number, then mul -> gated."""
    consumers = graph.consumers()
    for n in graph.nodes:
        if not (_is_layer(n, graph) or _is_bilinear(n, graph)):
            continue
        factor, last, gone = 1.0, n, [n]
        scaled = only(consumers, n, "aten")
        if scaled and (number := _factor(scaled, graph)):
            factor, last, gone = number, scaled, [n, scaled]
        mul = only(consumers, last, "mul")
        if not mul or set(mul.inputs) == set(last.outputs):
            continue
        (x0,) = (i for i in mul.inputs if i != last.outputs[0])
        width = graph.widths[last.outputs[0]]
        if graph.widths[x0] != width or width < ALIGNMENT or mul.outputs[0] == graph.output:  # narrower ones may be logits
            continue
        attrs = Attrs(activation=n.attrs.activation, scalar=factor)
        gated = Node(n.name, "gated", (x0, n.inputs[0]), mul.outputs, n.module, n.params, attrs)
        return rebuilt(graph, {*(g.name for g in gone), mul.name}, [gated])
    return None


def _one_norm(graph: Graph) -> Graph | None:
    """layer_norm of a value's fields, perhaps with a ReLU behind -> norm. One between generic operators is left to them: what
    they hand one another stays float32.
    """
    consumers, made_by = graph.consumers(), graph.producers()
    for n in graph.nodes:
        if not _norms_fields(n, graph) or made_by[n.inputs[0]].op == "aten" or n.outputs[0] == graph.output:
            continue
        if all(reader.op == "aten" for reader in consumers.get(n.outputs[0], [])):
            continue
        relu = only(consumers, n, "activation")
        if relu and (relu.attrs.activation != "relu" or relu.outputs[0] == graph.output):
            relu = None
        assert n.attrs.aten is not None  # it norms fields
        (_, eps), dim = n.attrs.aten.args, n.attrs.aten.sizes[-1]
        fields, activation = graph.widths[n.outputs[0]] // dim, "relu" if relu else "identity"
        attrs = Attrs(fields=fields, dim=dim, scalar=float(eps), activation=activation)  # type: ignore[arg-type]
        norm = Node(n.name, "norm", n.inputs, relu.outputs if relu else n.outputs, n.module, n.params, attrs)
        return rebuilt(graph, {n.name, *([relu.name] if relu else [])}, [norm])
    return None


def _norms_fields(n: Node, graph: Graph) -> bool:
    call = n.attrs.aten
    if n.op != "aten" or call is None or call.op != "aten.layer_norm" or call.args[0] != 1:
        return False
    x, *affine = call.operands
    width = graph.widths[n.outputs[0]]
    return isinstance(x, Window) and _whole(x, width) and affine == [Constant(0), Constant(1)] and width % ALIGNMENT == 0


def _summed(graph: Graph) -> Graph:
    """Sums of gated values that only the head reads are parts of the head."""
    consumers, made_by, head = graph.consumers(), graph.producers(), graph.nodes[-1]
    if head.op != "head":
        return graph
    parts = len(head.attrs.columns)
    sums = [
        n
        for i in head.inputs[parts:]
        if (n := made_by[i]).op == "sum" and len(consumers[i]) == 1 and made_by[n.inputs[0]].op == "gated"
    ][: MAX_PARTS - parts]
    if not sums:
        return graph
    logits = [i for i in head.inputs[parts:] if made_by[i] not in sums]
    columns = (*head.attrs.columns, *[SUMMED] * len(sums))
    inputs = (*head.inputs[:parts], *(n.inputs[0] for n in sums), *logits)
    new = replace(head, inputs=inputs, attrs=replace(head.attrs, columns=columns))
    return rebuilt(graph, {head.name, *(n.name for n in sums)}, [new])


def _is_layer(n: Node, graph: Graph) -> bool:
    """A dot product with a vector is left to `fuse_cross_v1`."""
    return n.op == "linear" and n.attrs.activation in _ACTIVATIONS and len(graph.params[n.params[0]]) == 2


def _is_bilinear(n: Node, graph: Graph) -> bool:
    """sum_i x_hi W_hij of a value's heads."""
    call = n.attrs.aten
    if n.op != "aten" or call is None or call.op != "aten.einsum" or len(n.params) != 1:
        return False
    x, w = call.operands if len(call.operands) == 2 else (None, None)
    rows_and_heads = isinstance(x, Window) and len(x.sizes) == 2 and _whole(x, graph.widths[n.inputs[0]])
    return rows_and_heads and w == Constant(0) and call.args == ("bhi,hij->bhj",)


def _factor(n: Node, graph: Graph) -> float | None:
    """What a node multiplies all of a value by, if that is all that it does."""
    call = n.attrs.aten
    if call is None or call.op != "aten.mul.Scalar" or not _reads_all(call, graph.widths[n.inputs[0]]):
        return None
    return float(number) if isinstance(number := call.args[0], int | float) else None


def _reads_all(call: AtenCall, width: int) -> bool:
    return len(call.operands) == 1 and isinstance(w := call.operands[0], Window) and _whole(w, width)


def _whole(w: Window, width: int) -> bool:
    """All columns, in order."""
    count = 1
    for size in w.sizes:
        count *= size
    return w.value == 0 and w.offset == 0 and w.strides == contiguous(w.sizes) and count == width
