"""Layers one after the other are one call of C where rows are few, and their own operators where not: the same scores."""

import numpy as np
import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_module
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric, Table
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.schedule import breadth_first
from dpiframe_core.operators import layer_series
from dpiframe_core.operators.cpu import CpuOperators, EmbeddingStore
from kernels.cpu import dense, first_layers
from kernels.runtime.c_build import cpu_library

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
EPS = float(np.finfo(np.float32).eps)


class Mixed(nn.Module):
    """A deep part on the embeddings, one behind a norm that no lookup begins, and a linear term."""

    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(70, 8)
        self.deep = nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 9), activation())
        self.normed = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 12), activation(), nn.Linear(12, 9))
        self.out, self.wide = nn.Linear(9, 1), nn.Linear(16, 1)

    def forward(self, x):
        e = torch.cat([self.user(x["user"]), self.item(x["item"])], 1)
        return torch.sigmoid(self.out(self.deep(e) + self.normed(e)) + self.wide(e))


class Deep(nn.Module):
    """Layers from the embeddings, and a number, to the score."""

    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(70, 8)
        self.age = nn.Linear(1, 8, bias=False)
        self.deep = nn.Sequential(nn.Linear(24, 32), activation(), nn.Linear(32, 9), activation(), nn.Linear(9, 1))

    def forward(self, x):
        age = self.age(x["age"].unsqueeze(1))
        return torch.sigmoid(self.deep(torch.cat([self.user(x["user"]), self.item(x["item"]), age], 1)))


def lane_and_block(module, rows):
    def feature(name, scope):
        return Categorical(name=name, scope=scope, values="int", encoder=Identity(), table=name)

    torch.manual_seed(rows)
    tables = [Table(name="user", rows=40, dim=8), Table(name="item", rows=70, dim=8)]
    features = [feature("user", "context"), feature("item", "candidate")]
    example = {"user": torch.randint(0, 40, (rows,)), "item": torch.randint(0, 70, (rows,))}
    if hasattr(module, "age"):
        tables.append(Table(name="age", rows=1, dim=8))
        features.append(Numeric(name="age", table="age"))
        example["age"] = torch.randn(rows)
    schema = FeatureSchema(features=tuple(features), tables=tuple(tables))
    compiled = compile_module(module, schema, example)
    graph = fuse(compiled.graph)
    operators = CpuOperators(graph, schema, EmbeddingStore(schema, compiled.tables, torch.device("cpu")), compiled.dense)
    with torch.no_grad():
        want = module.double()({k: v.double() if v.is_floating_point() else v for k, v in example.items()}).numpy()
    block: RowBlock = compiled.golden.block
    return CpuLane(operators, breadth_first(graph), schema.block_layout, graph), block, want


@pytest.fixture
def calls(monkeypatch):
    """The rows of each call of C."""
    seen = []

    class Seen(dense.Layers):
        def __call__(self, x):
            seen.append(len(x))
            return super().__call__(x)

    monkeypatch.setattr(first_layers, "Layers", Seen)
    monkeypatch.setattr(layer_series, "Layers", Seen)
    return seen


@pytest.mark.parametrize("rows", [2, 5, 130])
@pytest.mark.parametrize(("module", "series"), [(Deep, 1), (Mixed, 2)])
def test_few_rows_take_a_call_for_each_series(calls, module, series, rows):
    lane, block, want = lane_and_block(module().eval(), rows)
    calls.clear()
    got = lane.run([block]).scores
    assert calls == [rows] * series
    assert np.abs(got - want).max() <= 64 * EPS


@pytest.mark.parametrize("module", [Deep, Mixed])
def test_more_rows_go_layer_by_layer_to_the_same_scores(calls, module, monkeypatch):
    monkeypatch.setattr(dense, "_SERIES_PRODUCTS", 8 * 1500)  # rows that a series of some 1,500 products takes
    lane, block, want = lane_and_block(module().eval(), 130)
    calls.clear()
    few, many = block.part(0, 5), lane.run([block]).scores
    assert calls == []
    assert np.abs(many - want).max() <= 64 * EPS
    assert np.abs(lane.run([few]).scores - many[:5]).max() <= 64 * EPS
    assert set(calls) == {5}


def test_an_activation_that_c_does_not_know_ends_a_series(calls):
    lane, block, want = lane_and_block(Deep(nn.Tanh).eval(), 5)
    calls.clear()
    assert np.abs(lane.run([block]).scores - want).max() <= 64 * EPS
    assert calls == []
