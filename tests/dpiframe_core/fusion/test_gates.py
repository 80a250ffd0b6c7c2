"""Which operators become gates and norms, and which are left as they are."""

from dpiframe_core.fusion.gates import SUMMED, fuse_gates
from dpiframe_core.graph.aten import AtenCall, Constant, Window
from dpiframe_core.graph.graph import Attrs, Graph, Node, Source


def linear(name, x, activation="identity"):
    return Node(name, "linear", (x,), (name,), "deep", ("w", "b"), Attrs(activation=activation))


def mul(name, a, b):
    return Node(name, "mul", (a, b), (name,), "deep")


def times(name, x, number, width=8):
    call = AtenCall("aten.mul.Scalar", (Window(0, (width,), (1,)),), (number,), (width,))
    return Node(name, "aten", (x,), (name,), "deep", attrs=Attrs(aten=call))


def norm(name, x, width=8, dim=4):
    call = AtenCall("aten.layer_norm", (Window(0, (width // dim, dim), (dim, 1)), Constant(0), Constant(1)), (1, 1e-5),
                    (width // dim, dim))  # fmt: skip
    return Node(name, "aten", (x,), (name,), "deep", ("scale", "shift"), Attrs(aten=call))


def head(*parts, columns=(0,)):
    return Node("head", "head", parts, ("score",), "head", ("v", "c"), Attrs(columns=columns))


def graph_of(*nodes, width=8, narrow=()):
    x = Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=(Source("f", "t", width),)))
    widths = {o: width for n in (x, *nodes) for o in n.outputs} | dict.fromkeys((*narrow, "score"), 1)
    params = {"w": (width, width), "b": (width,), "scale": (4,), "shift": (4,), "v": (1, width), "c": (1,)}
    return Graph((x, *nodes), widths, params, "score")


def fused(graph):
    return [(n.op, n.inputs, n.outputs) for n in fuse_gates(graph).nodes[1:]]


def test_a_layer_times_a_number_times_a_value_is_a_gate():
    graph = graph_of(linear("g", "x", "sigmoid"), times("twice", "g", 2.0), mul("y", "twice", "x"), head("y"))
    gated, _ = fuse_gates(graph).nodes[1:]
    assert (gated.op, gated.inputs, gated.outputs) == ("gated", ("x", "x"), ("y",))
    assert (gated.attrs.activation, gated.attrs.scalar) == ("sigmoid", 2.0)


def test_what_something_else_reads_too_stays():
    """The layer, and the number's product."""
    for also in ("g", "twice"):
        graph = graph_of(linear("g", "x"), times("twice", "g", 2.0), mul("y", "twice", "x"), linear("z", also),
                         head("y", "z", columns=(0, 0)))  # fmt: skip
        assert [op for op, *_ in fused(graph)] == ["linear", "aten", "mul", "linear", "head"]


def test_a_value_times_itself_and_a_gate_by_nothing_are_none():
    assert [op for op, *_ in fused(graph_of(linear("g", "x"), mul("y", "g", "g"), head("y")))] == ["linear", "mul", "head"]
    nothing = graph_of(linear("g", "x"), times("none", "g", 0.0), mul("y", "none", "x"), head("y"))
    assert [op for op, *_ in fused(nothing)] == ["linear", "aten", "mul", "head"]


def test_narrow_products_may_be_logits_and_stay():
    graph = graph_of(linear("g", "x"), mul("y", "g", "x"), head("y"), width=4)
    assert [op for op, *_ in fused(graph)] == ["linear", "mul", "head"]


def test_the_sum_of_a_gate_that_the_head_alone_reads_is_a_part_of_it():
    total = Node("sum", "sum", ("y",), ("total",), "deep")
    graph = graph_of(linear("h", "x"), linear("g", "x"), mul("y", "g", "h"), total, head("h", "total"), narrow=("total",))
    assert fused(graph)[-1] == ("head", ("h", "y"), ("score",))
    assert fuse_gates(graph).nodes[-1].attrs.columns == (0, SUMMED)
    read = graph_of(linear("h", "x"), linear("g", "x"), mul("y", "g", "h"), total, mul("z", "h", "total"),
                    head("z", "total"), narrow=("total",))  # fmt: skip
    assert "sum" in [op for op, *_ in fused(read)]


def test_norms_of_layers_are_nodes_of_their_own_with_the_relu_behind():
    relu = Node("relu", "activation", ("n",), ("r",), "deep", attrs=Attrs(activation="relu"))
    graph = graph_of(linear("h", "x"), norm("n", "h"), relu, head("r"))
    assert fused(graph)[1] == ("norm", ("h",), ("r",))
    attrs = fuse_gates(graph).nodes[2].attrs
    assert (attrs.fields, attrs.dim, attrs.scalar, attrs.activation) == (2, 4, 1e-5, "relu")


def test_a_norm_between_generic_operators_keeps_their_float32():
    before = graph_of(times("a", "x", 3.0), norm("n", "a"), linear("h", "n"), head("h"))
    behind = graph_of(linear("h", "x"), norm("n", "h"), times("a", "n", 3.0), head("a"))
    for graph in (before, behind):
        assert "norm" not in [op for op, *_ in fused(graph)]
