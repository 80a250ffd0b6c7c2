"""A tower holds the narrow MLP of a DLRM's numbers and the dots behind it, and nothing else changes."""

import pytest

from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DLRM, DCNv2, DeepFM, DLRMDCNv2
from dpiframe_core.graph.chains import group_chain, group_tower
from dpiframe_core.graph.graph import JOINED, Attrs, Graph, Node
from dpiframe_core.graph.placement import place
from dpiframe_core.graph.schedule import POLICIES
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from tests import model_oracle

KAGGLE = DLRM(bottom_units=(12, 10, 8), hidden_units=(20, 6))
MLPERF = DLRMDCNv2(bottom_units=(12, 8), cross_layers=2, rank=5, hidden_units=(16,))


def waves_of(architecture, numbers=3):
    schema = model_oracle.make_schema(numbers=numbers, dim=8, first_order=isinstance(architecture, DeepFM))
    return group_waves(place(fuse(build_graph(architecture, schema))))


@pytest.mark.parametrize(
    ("architecture", "members"),
    [
        (KAGGLE, ["linear", "linear", "linear", "dot"]),
        (DLRM(bottom_units=(8,), hidden_units=(20, 6)), ["linear", "dot"]),
        (DLRM(bottom_units=(12, 8), hidden_units=()), ["linear", "linear", "dot"]),
    ],
)
def test_a_tower_is_the_bottom_of_a_dlrm_and_its_dots(architecture, members):
    waves = waves_of(architecture)
    graph = group_tower(waves)
    (tower,) = (n for n in graph.nodes if n.op == "tower")
    assert [m.op for m in tower.attrs.members] == members
    others = [n for n in graph.nodes if n is not tower]
    assert others == [n for n in waves.nodes if n in others]
    assert {m for n in others for m in (n.attrs.members or (n,))} | set(tower.attrs.members) == {
        m for n in waves.nodes for m in (n.attrs.members or (n,))
    }
    Graph(graph.nodes, graph.widths, graph.params, graph.output)  # refuses a value read before it is made
    first, *rest = tower.attrs.members
    assert tower.inputs[0] == first.inputs[0]
    assert tower.inputs[1:] == rest[-1].inputs[1:]
    steps = POLICIES["sequential"](graph, 1).steps
    assert len(steps) == sum(n.op != JOINED for n in waves.nodes) - len(members) + 1


@pytest.mark.parametrize(
    "architecture",
    [
        DLRM(bottom_units=(12, 10, 9, 7, 8), hidden_units=(20,)),  # five layers
        MLPERF,  # no dot; as towers its layers were measured to take longer
        DCNv2(cross_layers=2, hidden_units=(16, 8)),  # its layers have company
        DeepFM(hidden_units=(24,)),
    ],
)
def test_a_graph_without_such_an_mlp_has_no_tower(architecture):
    assert group_tower(waves_of(architecture)) is None


def test_a_dlrm_can_be_a_chain_and_other_graphs_around_a_dot_cannot():
    waves = waves_of(KAGGLE)
    lookup, chain = group_chain(waves).nodes
    assert (lookup, chain.op) == (waves.nodes[0], "chain")
    assert [m.op for m in chain.attrs.members] == ["linear"] * 3 + ["dot"] + ["linear"] * 2 + ["head"]
    assert group_chain(waves_of(DLRM(bottom_units=(8,), hidden_units=()))) is None  # the head reads the dot
    assert group_chain(waves_of(MLPERF)) is None


def test_layers_that_others_read_too_are_no_tower():
    waves = waves_of(KAGGLE)
    second = waves.nodes[2]
    reader = Node("reader", "activation", second.outputs, ("read",), "deep", attrs=Attrs(activation="relu"))
    widths = {**waves.widths, "read": waves.widths[second.outputs[0]]}
    assert second.op == "wave"
    assert group_tower(Graph((*waves.nodes[:-1], reader, waves.nodes[-1]), widths, waves.params, waves.output)) is None
