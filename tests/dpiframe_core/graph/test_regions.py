"""Regions of generic operators: what goes into one, and that the graph stays the same graph."""

import pytest

from dpiframe_core.graph.aten import AtenCall, Window
from dpiframe_core.graph.graph import Attrs, Graph, Node, Source
from dpiframe_core.graph.regions import REGION_OPS, group_regions
from dpiframe_core.graph.waves import group_waves


def generic(name, *inputs):
    op = "aten.exp" if len(inputs) == 1 else "aten.add"
    call = AtenCall(op, tuple(Window(i, (4,), (1,)) for i in range(len(inputs))), (), (4,))
    return Node(name, "aten", inputs, (name,), "deep", attrs=Attrs(aten=call))


def linear(name, x):
    return Node(name, "linear", (x,), (name,), "deep", ("w", "b"))


def graph_of(*nodes, output=None):
    x = Node("lookup", "lookup", (), ("x",), "embedding", attrs=Attrs(concat=(Source("f", "t", 4),)))
    nodes = (x, *nodes)
    widths = {o: 4 for n in nodes for o in n.outputs}
    return Graph(nodes, widths, {"w": (4, 4), "b": (4,)}, output or nodes[-1].outputs[0])


def regions(graph):
    return [{m.name for m in n.attrs.members} for n in graph.nodes if n.op == "region"]


def test_operators_that_hand_values_to_one_another_are_one_region_and_apart_are_two():
    a = [generic("a1", "x"), generic("a2", "a1")]
    b = [generic("b1", "x"), generic("b2", "b1")]
    join = Node("head", "head", ("a2", "b2"), ("score",), "head", ("w", "b"), Attrs(columns=(0, 4)))
    grouped = group_regions(graph_of(*a, *b, join))
    assert regions(grouped) == [{"a1", "a2"}, {"b1", "b2"}]
    assert [n.outputs for n in grouped.nodes if n.op == "region"] == [("a2",), ("b2",)]


def test_a_path_through_another_operator_divides_a_region():
    """a1 -> fm -> a2 and a1 -> a2: as one, it would read what it made."""
    fm = Node("fm", "fm", ("a1",), ("pairs",), "fm", attrs=Attrs(fields=1, dim=4))
    grouped = group_regions(graph_of(generic("a1", "x"), fm, generic("a2", "a1", "pairs"), generic("a3", "a2")))
    assert regions(grouped) == [{"a1"}, {"a2", "a3"}]
    assert [n.name for n in grouped.nodes] == ["lookup", "region.0", "fm", "region.1"]


def test_linear_layers_stay_outside_for_waves_to_run_side_by_side():
    nodes = [linear("in", "x"), generic("a", "in"), linear("mid1", "a"), linear("mid2", "a"), generic("b", "mid1", "mid2")]
    grouped = group_waves(group_regions(graph_of(*nodes, linear("out", "b"))))
    assert regions(grouped) == [{"a"}, {"b"}]
    assert [n.op for n in grouped.nodes] == ["lookup", "wave", "region", "wave", "region", "wave"]
    assert [m.name for m in grouped.nodes[3].attrs.members] == ["mid1", "mid2"]


def test_a_graph_without_generic_operators_stays_as_it_is():
    graph = graph_of(linear("a", "x"), Node("s", "activation", ("a",), ("s",), "head", attrs=Attrs(activation="sigmoid")))
    assert group_regions(graph).nodes == graph.nodes


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_graph_all_nodes_are_there_once_and_in_an_order(seed):
    import random

    rng = random.Random(seed)
    nodes, values = [], ["x"]
    for i in range(14):
        kind, ins = (
            rng.choice(["aten", "aten", "linear", "mul", "fm"]),
            rng.sample(values, min(len(values), rng.choice([1, 2]))),
        )
        if kind == "aten":
            node = generic(f"n{i}", *ins)
        elif kind == "linear":
            node = linear(f"n{i}", ins[0])
        elif kind == "mul":
            node = Node(f"n{i}", "mul", (ins[0], ins[-1]), (f"n{i}",), "deep")
        else:
            node = Node(f"n{i}", "cross_v1", (ins[0],), (f"n{i}",), "cross", ("b", "b"), Attrs(layers=1))
        nodes.append(node)
        values.append(node.outputs[0])
    graph = graph_of(*nodes)
    grouped = group_regions(graph)  # Graph's own check: a topological order
    members = [m for n in grouped.nodes for m in (n.attrs.members or (n,))]
    assert sorted(m.name for m in members) == sorted(n.name for n in graph.nodes)
    for n in grouped.nodes:
        if n.op == "region":
            assert {m.op for m in n.attrs.members} <= REGION_OPS
            assert any(m.op == "aten" for m in n.attrs.members)
    read = {i for n in grouped.nodes for i in n.inputs} | {graph.output}
    assert read <= {o for n in grouped.nodes for o in n.outputs}
