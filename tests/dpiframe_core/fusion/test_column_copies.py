"""A copy of a lookup's columns becomes an output of the lookup where it is whole features, and the scores stay."""

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_model
from dpiframe_core.engine.engine import Engine
from dpiframe_core.features.schema import FeatureSchema, Table
from dpiframe_core.fusion.passes import PASSES, fuse
from tests.dpiframe_core.compiler.modules import categorical, example

FIELDS, DIM = 5, 8
SCHEMA = FeatureSchema(
    features=tuple(categorical(f"f{i}", f"f{i}") for i in range(FIELDS)),
    tables=tuple(Table(name=f"f{i}", rows=20, dim=DIM) for i in range(FIELDS)),
)


class Gated(nn.Module):
    """All fields times a gate on the columns from `first` to `last`, as FinalMLP selects features."""

    def __init__(self, first, last):
        super().__init__()
        self.tables = nn.ModuleDict({f"f{i}": nn.Embedding(20, DIM) for i in range(FIELDS)})
        self.first, self.last = first, last
        self.gate = nn.Sequential(nn.Linear(last - first, 6), nn.ReLU(), nn.Linear(6, FIELDS * DIM), nn.Sigmoid())
        self.out = nn.Linear(FIELDS * DIM, 1)

    def forward(self, x):
        e = torch.cat([table(x[name]) for name, table in self.tables.items()], 1)
        return self.out(e * self.gate(e[:, self.first : self.last]))


@pytest.fixture
def gated(request):
    torch.manual_seed(3)
    module = Gated(*request.param).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.5)
    return module


def compiled(module):
    return compile_model(module, SCHEMA, example(SCHEMA), logits=True)


def fused(module):
    return fuse(compiled(module).graph)


@pytest.mark.parametrize("gated", [(0, 16), (8, 24), (32, 40)], indirect=True)
def test_a_copy_of_whole_features_is_written_by_the_lookup(gated):
    graph = fused(gated)
    (lookup,) = [n for n in graph.nodes if n.op == "lookup"]
    assert [n.op for n in graph.nodes if n.op == "aten"] == []
    first, last = gated.first // DIM, gated.last // DIM
    assert [[s.feature for s in out] for out in lookup.attrs.outputs_of_concat()] == [
        [f"f{i}" for i in range(FIELDS)], [f"f{i}" for i in range(first, last)],
    ]  # fmt: skip
    assert [graph.widths[o] for o in lookup.outputs] == [FIELDS * DIM, gated.last - gated.first]


@pytest.mark.parametrize("gated", [(0, 12), (4, 16), (4, 12)], indirect=True)
def test_a_copy_of_a_features_part_stays_a_copy(gated):
    graph = fused(gated)
    assert [n.attrs.aten.op for n in graph.nodes if n.op == "aten"] == ["aten.clone"]


@pytest.mark.parametrize("gated", [(0, 16), (8, 24)], indirect=True)
def test_the_scores_stay_those_of_the_module(gated, tmp_path):
    compiled(gated).write(tmp_path / "b", name="gated")
    engine = Engine.load(tmp_path / "b", "cpu")
    assert [n.op for n in engine.graph.nodes].count("aten") == 0
    assert engine.warmup().golden_error < 1e-6  # the golden rows are the module's own scores
    engine.close()


@pytest.mark.parametrize("gated", [(0, 16)], indirect=True)
def test_without_the_pass_the_copy_stays(gated):
    passes = [name for name in PASSES if name != "column_copies"]
    assert [n.op for n in fuse(compiled(gated).graph, passes).nodes].count("aten") == 1
