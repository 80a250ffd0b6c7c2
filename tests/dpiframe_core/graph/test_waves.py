"""Waves keep every operator once, in an order in which all inputs are there, and nothing else."""

import pytest

from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph import chains
from dpiframe_core.graph import waves as core
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep
from dpiframe_core.graph.chains import group_chain
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.waves import MAX_JOBS, group_waves
from dpiframe_core.models.build import build_graph
from kernels.dense.activation import KINDS
from kernels.waves import chain as chain_kernel
from kernels.waves import wave_arguments as arguments
from tests import oracle

MODELS = {
    "wide_deep": WideDeep(hidden_units=(24, 8)),
    "deepfm": DeepFM(hidden_units=(24, 8, 4)),
    "deepfm-1-layer": DeepFM(hidden_units=(24,)),
    "dcn": DCN(cross_layers=3, hidden_units=(24, 8)),
    "dcnv2-parallel": DCNv2(cross_layers=3, hidden_units=(24, 8, 4)),
    "dcnv2-uneven": DCNv2(cross_layers=2, hidden_units=(24, 8, 4)),
    "dcnv2-stacked": DCNv2(cross_layers=3, hidden_units=(24,), structure="stacked"),
    "dcnv2-low-rank": DCNv2(cross_layers=2, rank=3, hidden_units=(24, 8)),
}


def graph_of(name, passes=tuple(PASSES)):
    architecture = MODELS[name]
    schema = oracle.make_schema(first_order=isinstance(architecture, WideDeep | DeepFM))
    return fuse(build_graph(architecture, schema), passes)


def members(graph):
    return [m for n in graph.nodes for m in (n.attrs.members or (n,))]


@pytest.mark.parametrize("left_out", [None, *PASSES])
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_is_there_once_after_all_that_it_reads(name, left_out):
    graph = graph_of(name, tuple(p for p in PASSES if p != left_out))
    waves = group_waves(graph)
    assert sorted(m.name for m in members(waves)) == sorted(n.name for n in graph.nodes)
    assert {m.name: m for m in members(waves)} == {n.name: n for n in graph.nodes}
    Graph(tuple(members(waves)), graph.widths, graph.params, graph.output)  # refuses a value read before it is made
    assert waves.output == graph.output


@pytest.mark.parametrize("left_out", [None, *PASSES])
@pytest.mark.parametrize("name", MODELS)
def test_no_member_of_a_wave_waits_for_another_but_the_head(name, left_out):
    for wave in group_waves(graph_of(name, tuple(p for p in PASSES if p != left_out))).nodes:
        made = {o for m in wave.attrs.members for o in m.outputs}
        plain = [m for m in wave.attrs.members if m.op != "head"]
        assert len(plain) <= MAX_JOBS
        assert not made & {i for m in plain for i in m.inputs}
        for head in (m for m in wave.attrs.members if m.op == "head"):
            parts, logits = head.inputs[: len(head.attrs.columns)], head.inputs[len(head.attrs.columns) :]
            assert made.issuperset(parts)
            assert not made & set(logits)


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("wide_deep", [("lookup",), ("deep.0",), ("deep.1", "head")]),
        ("deepfm", [("lookup",), ("fm", "deep.0"), ("deep.1",), ("deep.2", "head")]),
        ("deepfm-1-layer", [("lookup",), ("fm", "deep.0"), ("head",)]),  # the head reads fm, of its own wave, as a logit
        ("dcn", [("lookup",), ("cross", "deep.0"), ("deep.1", "head")]),
        ("dcnv2-parallel", [("lookup",), ("cross.0", "deep.0"), ("cross.1", "deep.1"), ("cross.2", "deep.2", "head")]),
        (
            "dcnv2-low-rank",
            [("lookup",), ("cross.0.v", "deep.0"), ("cross.0", "deep.1"), ("cross.1.v",), ("cross.1",), ("head",)],
        ),
        ("dcnv2-uneven", [("lookup",), ("cross.0", "deep.0"), ("cross.1", "deep.1"), ("deep.2",), ("head",)]),
    ],
)
def test_a_level_is_one_launch(name, launches):
    waves = group_waves(graph_of(name))
    assert [tuple(sorted(m.name for m in (n.attrs.members or (n,)))) for n in waves.nodes] == [
        tuple(sorted(x)) for x in launches
    ]


def test_the_limits_of_a_launch_are_those_of_the_kernel():
    assert (core.MAX_JOBS, core.MAX_LOGITS) == (arguments.MAX_JOBS, arguments.MAX_LOGITS)
    assert set(core.ACTIVATIONS) == set(KINDS)
    assert chains.MAX_LINKS == chain_kernel.MAX_LINKS


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_is_all_of_a_model_behind_its_lookup(name):
    waves = group_waves(graph_of(name))
    chain = group_chain(waves)
    lookup, whole = chain.nodes
    assert (lookup, whole.op) == (waves.nodes[0], "chain")
    assert whole.attrs.members == tuple(members(waves)[1:])
    assert whole.outputs == (chain.output,) == (waves.output,)
    assert set(whole.inputs) == {i for m in whole.attrs.members for i in m.inputs} & set(lookup.outputs)


@pytest.mark.parametrize("left_out", PASSES)
@pytest.mark.parametrize("name", MODELS)
def test_a_graph_with_other_operators_is_no_chain(name, left_out):
    waves = group_waves(graph_of(name, tuple(p for p in PASSES if p != left_out)))
    others = [n for n in waves.nodes[1:] if n.op not in ("wave", "head")]
    assert (group_chain(waves) is None) == bool(others)
