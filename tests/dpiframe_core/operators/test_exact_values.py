"""What stays float32 on a GPU at any precision: what feeds the head as a number, and what operators of torch hand on."""

import pytest

from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.architecture import DCN, DeepFM, WideDeep
from dpiframe_core.graph.aten import AtenCall, Window
from dpiframe_core.graph.graph import Attrs, Graph, Node, Source
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from dpiframe_core.operators.exact_values import exact_values
from tests import oracle

UNITS = (24, 8)


@pytest.mark.parametrize("made", [place, lambda graph: group_waves(place(graph))], ids=["streams", "waves"])
@pytest.mark.parametrize(
    ("architecture", "ops"),
    [
        (WideDeep(hidden_units=UNITS), {"lookup", "head"}),
        (DeepFM(hidden_units=UNITS), {"lookup", "fm", "head"}),
        (DCN(cross_layers=2, hidden_units=UNITS), {"cross_v1_head", "head"}),
    ],
)
def test_sums_that_feed_the_head_and_the_scores_are_exact_and_layers_are_not(architecture, ops, made):
    graph = made(fuse(build_graph(architecture, oracle.make_schema(one_hot=5, first_order=True)), tuple(PASSES)))
    makers = {o: m for n in graph.nodes for m in (n.attrs.members or (n,)) for o in m.outputs}
    exact = exact_values(graph)
    assert {makers[value].op for value in exact} == ops
    assert graph.output in exact
    lookup = next(m for m in makers.values() if m.op == "lookup")
    assert lookup.outputs[0] not in exact  # the first layer's input


def test_what_generic_operators_hand_to_one_another_and_to_the_heads_logits_is_exact():
    call = AtenCall("aten.exp", (Window(0, (4,), (1,)),), (), (4,))

    def generic(name, of):
        return Node(name, "aten", (of,), (name,), "deep", attrs=Attrs(aten=call))

    nodes = (
        Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=(Source("f", "t", 4),))),
        generic("inner", "x"), generic("for_a_product", "inner"),
        Node("deep", "linear", ("for_a_product",), ("deep",), "deep", ("w", "b")),
        generic("logit", "deep"),
        Node("head", "head", ("deep", "logit"), ("score",), "head", ("w", "b"), Attrs(columns=(0,))),
    )  # fmt: skip
    graph = Graph(nodes, {o: 4 for n in nodes for o in n.outputs}, {"w": (4, 4), "b": (4,)}, "score")
    assert exact_values(graph) == {"inner", "logit", "score"}


@pytest.mark.parametrize("op", ["cin", "dot", "linear", "fm", "sum", "mul"])
def test_a_head_adds_what_is_exact_and_nothing_else(op):
    """A network of one map is as wide as a logit, but its kernel writes the dense dtype, with padding."""
    attrs = Attrs(fields=2, dim=2, units=(1,)) if op in ("cin", "dot", "fm") else Attrs()
    nodes = (
        Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=(Source("f", "t", 4),))),
        Node("v", op, ("x",), ("v",), op, ("w",) if op in ("cin", "linear") else (), attrs),
        Node("logit", "linear", ("x",), ("logit",), "deep", ("w", "b")),
        Node("both", "add", ("logit", "v"), ("both",), "deep"),
        Node("score", "activation", ("both",), ("score",), "head", attrs=Attrs(activation="sigmoid")),
    )
    graph = fuse(Graph(nodes, {"x": 4, "v": 1, "logit": 1, "both": 1, "score": 1}, {"w": (1, 4), "b": (1,)}, "score"))
    heads = [n for n in graph.nodes if n.op == "head"]
    assert len(heads) == (op in ("fm", "sum", "mul"))
    assert all({*head.inputs[1:]} <= exact_values(graph) for head in heads)
