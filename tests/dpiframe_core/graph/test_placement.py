"""Placement as plain data: which concats cost nothing, where their inputs lie, and that nothing lies on anything else."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DCNv2, DLRMDCNv2
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import JOINED, Graph
from dpiframe_core.graph.placement import matrices, place
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from tests import model_oracle, oracle
from tests.dpiframe_core.fusion.test_passes import SCHEMA, random_graph

DLRM = DLRMDCNv2(bottom_units=(12, 8), cross_layers=2, rank=5, hidden_units=(16,))


def dlrm():
    return fuse(build_graph(DLRM, model_oracle.make_schema(numbers=4)))


def test_a_cross_network_reads_what_the_bottom_mlp_and_the_lookup_wrote_side_by_side():
    graph = place(dlrm())
    assert [n.op for n in graph.nodes].count(JOINED) == 1
    assert "concat" not in {n.op for n in graph.nodes}
    (matrix,) = matrices(graph)
    lookup = next(n for n in graph.nodes if n.op == "lookup")
    (joined,) = (n for n in graph.nodes if n.op == JOINED)
    bottom, embedded = joined.inputs
    numbers = next(o for o in lookup.outputs if o != embedded)
    width = graph.widths["x0"]
    assert matrix.name == lookup.name  # which writes all that it makes into one matrix
    assert matrix.spans == {"x0": (0, width), bottom: (0, 8), embedded: (8, width), numbers: (width, width + 8)}
    assert matrix.columns == width + 8


def test_nothing_runs_for_a_joined_value_and_its_readers_wait_for_all_its_makers():
    graph = place(dlrm())
    (joined,) = (n for n in graph.nodes if n.op == JOINED)
    makers = {graph.producers()[i].name for i in joined.inputs}
    assert joined.name not in {s.node for s in breadth_first(graph).steps}
    for reader in graph.consumers()[joined.outputs[0]]:
        assert makers <= set(graph.predecessors()[reader.name])
    waves = [n for n in group_waves(graph).nodes if n.op != JOINED]
    assert [len(n.attrs.members) or n.op for n in waves] == ["lookup", 1, 1, 1, 1, 1, 1, 2]  # the last with the head


def test_fp8_columns_begin_at_multiples_of_sixteen():
    graph = dlrm()
    assert JOINED not in {n.op for n in place(graph, 16).nodes}  # the bottom MLP makes 8


def check(graph: Graph, align: int) -> Graph:
    """What must hold of any placed graph."""
    placed, found = place(graph, align), matrices(place(graph, align), align)
    assert [(n.name, n.inputs, n.outputs) for n in placed.nodes] == [(n.name, n.inputs, n.outputs) for n in graph.nodes]
    Graph(placed.nodes, placed.widths, placed.params, placed.output)
    home = [(value, m) for m in found for value in m.spans]
    assert len({value for value, _ in home}) == len(home)
    joined = {n.outputs[0]: n for n in placed.nodes if n.op == JOINED}
    for value, m in home:
        first, end = m.spans[value]
        assert first % align == 0
        assert end - first == -(-placed.widths[value] // align) * align
        assert 0 <= first < end <= m.columns
        others = [v for v in m.spans if v != value and v not in joined and value not in joined]
        assert all(m.spans[v][1] <= first or end <= m.spans[v][0] for v in others)
        if value in joined:
            starts = [m.spans[i][0] for i in joined[value].inputs]
            widths = [placed.widths[i] for i in joined[value].inputs]
            assert starts == [first + sum(widths[:i]) for i in range(len(widths))]
    for n in placed.nodes:
        several = n.op == "lookup" and n.attrs.splits
        assert not several or len({m.name for v, m in home if v in n.outputs}) == 1
    return placed


@given(st.integers(0, 2**32), st.sampled_from([8, 16]))
def test_no_two_values_of_any_graph_lie_on_each_other(seed, align):
    graph = fuse(random_graph(random.Random(seed)))
    grouped = group_waves(check(graph, align))
    Graph(grouped.nodes, grouped.widths, grouped.params, grouped.output)  # refuses a value read before it is made


def built(make, *, fused=True):
    """A graph whose output is what `make` joins of three layers of 8, 8 and 5 columns."""
    g = GraphBuilder(SCHEMA)
    x = g.concat([g.lookup(f.name, f.table, f"emb.{f.name}", "m") for f in SCHEMA.features], "x", "m")
    layers = [g.linear(x, n, f"layer.{n}.{i}", "m") for i, n in enumerate((8, 8, 5))]
    graph = g.finish(make(g, x, *layers))
    return fuse(graph) if fused else graph


def with_head(g, value):
    return g.linear(value, 1, "out", "m")


@pytest.mark.parametrize(
    ("make", "joined"),
    [
        (lambda g, x, a, b, c: with_head(g, g.concat([a, b, c], "j", "m")), 1),
        (lambda g, x, a, b, c: with_head(g, g.concat([a, c, b], "j", "m")), 0),  # b would begin at column 13
        (lambda g, x, a, b, c: with_head(g, g.concat([a, a], "j", "m")), 0),  # one value in two places
        (lambda g, x, a, b, c: with_head(g, g.concat([g.concat([a, b], "j", "m"), g.concat([a, c], "k", "m")], "l", "m")), 1),
        (lambda g, x, a, b, c: g.concat([a, b], "j", "m"), 0),  # the graph's output, which is copied as float32
        (lambda g, x, a, b, c: with_head(g, g.concat([a, g.fm(x, 0, 3, 4, "fm", "m")], "j", "m")), 0),  # a logit is float32
        (lambda g, x, a, b, c: with_head(g, g.concat([a, g.mul(a, b, "ab", "m")], "j", "m")), 0),  # made by torch
    ],
    ids=["aligned", "uneven", "twice", "two-homes", "output", "logit", "torch"],
)
def test_a_concat_is_joined_where_every_input_may_be_written_in_place(make, joined):
    graph = check(built(make), 8)
    assert [n.op for n in graph.nodes].count(JOINED) == joined


def test_a_graph_without_a_concat_stays_as_it_is():
    graph = fuse(build_graph(DCNv2(cross_layers=2, hidden_units=(16,)), oracle.make_schema(first_order=False)))
    assert place(graph) == graph
    assert matrices(graph) == ()
