"""Attention over fields is found among generic operators where it is that, and the scores stay."""

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_model
from dpiframe_core.engine.engine import Engine
from dpiframe_core.features.schema import FeatureSchema, Table
from dpiframe_core.fusion.passes import fuse
from tests.dpiframe_core.compiler.modules import categorical, example

FIELDS, DIM, HEADS, SIZE = 5, 8, 2, 4
SCHEMA = FeatureSchema(
    features=tuple(categorical(f"f{i}", f"f{i}") for i in range(FIELDS)),
    tables=tuple(Table(name=f"f{i}", rows=20, dim=DIM) for i in range(FIELDS)),
)


class Interacting(nn.Module):
    """AutoInt's layer, in the spellings that people use."""

    def __init__(
        self, dim, *, heads=HEADS, size=SIZE, residual=True, scale=True, relu=True, bias=False, over=-1, reads_twice=False
    ):
        super().__init__()
        self.heads, self.size, self.scale, self.relu, self.over, self.reads_twice = heads, size, scale, relu, over, reads_twice
        self.q, self.k, self.v = (nn.Linear(dim, heads * size, bias=bias) for _ in range(3))
        self.r = nn.Linear(dim, heads * size, bias=bias) if residual else None

    def forward(self, x):
        rows, fields = x.shape[0], x.shape[1]
        q, k, v = (m(x).view(rows, fields, self.heads, self.size).transpose(1, 2) for m in (self.q, self.k, self.v))
        logits = torch.matmul(q, k.transpose(-1, -2))
        weights = torch.softmax(logits / self.size**0.5 if self.scale else logits, self.over)
        y = torch.matmul(weights, v).transpose(1, 2).contiguous().view(rows, fields, -1)
        if self.r is not None:
            y = y + self.r(x)
        if self.relu:
            y = torch.relu(y)
        return y * q.mean((1, 2, 3))[:, None, None] if self.reads_twice else y


class Chunked(nn.Module):
    """The same with one linear layer for all projections, cut into parts."""

    def __init__(self, dim, *, heads=HEADS, size=SIZE, bias=False):
        super().__init__()
        self.heads, self.size = heads, size
        self.project = nn.Linear(dim, 4 * heads * size, bias=bias)

    def forward(self, x):
        q, k, v, residual = self.project(x).chunk(4, 2)
        q, k, v = (t.unflatten(2, (self.heads, self.size)).transpose(1, 2) for t in (q, k, v))
        mixed = torch.matmul(torch.matmul(q, k.transpose(2, 3)).mul(0.3).softmax(3), v)
        return torch.relu(mixed.transpose(1, 2).flatten(2) + residual)


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(20, DIM) for _ in range(FIELDS))
        self.layers = nn.Sequential(*layers)
        self.out = nn.Linear(FIELDS * HEADS * SIZE, 1)

    def forward(self, x):
        fields = torch.stack([e(x[f"f{i}"]) for i, e in enumerate(self.embed)], 1)
        return torch.sigmoid(self.out(self.layers(fields).flatten(1))).squeeze(1)


def fused(*layers):
    torch.manual_seed(1)
    compiled = compile_model(Model(*layers).eval(), SCHEMA, example(SCHEMA))
    return compiled, fuse(compiled.graph)


@pytest.mark.parametrize(
    "options", [{}, {"residual": False}, {"scale": False}, {"relu": False}, {"bias": True}, {"heads": 1, "size": 8}]
)
def test_a_layer_becomes_one_operator_and_scores_the_same(options, tmp_path):
    compiled, graph = fused(Interacting(DIM, **options), Interacting(HEADS * SIZE, **options))
    assert [n.op for n in graph.nodes] == ["lookup", "field_attention", "field_attention", "head"]
    compiled.write(tmp_path / "b", name="autoint")
    engine = Engine.load(tmp_path / "b", "cpu")
    assert engine.warmup().golden_error < 1e-6
    engine.close()


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"heads": 1, "size": 8}])
def test_projections_of_one_layer_are_found_by_their_columns(options, tmp_path):
    compiled, graph = fused(Chunked(DIM, **options), Chunked(HEADS * SIZE, **options))
    assert [n.op for n in graph.nodes] == ["lookup", "field_attention", "field_attention", "head"]
    assert graph.nodes[1].attrs.field_heads.firsts == (0, 8, 16, 24)
    compiled.write(tmp_path / "b", name="autoint")
    engine = Engine.load(tmp_path / "b", "cpu")
    assert engine.warmup().golden_error < 1e-6
    engine.close()


@pytest.mark.parametrize("options", [{"over": -2}, {"reads_twice": True}, {"heads": 1, "size": 40}], ids=str)
def test_what_is_another_thing_stays_generic(options):
    width = options.get("heads", HEADS) * options.get("size", SIZE)
    layers = Interacting(DIM, **options), nn.Linear(width, HEADS * SIZE)
    _, graph = fused(*layers)
    assert "field_attention" not in [n.op for n in graph.nodes]
    assert "aten" in [n.op for n in graph.nodes]


def test_without_the_pass_the_operators_stay():
    compiled, _ = fused(Interacting(DIM))
    assert "field_attention" not in [n.op for n in fuse(compiled.graph, ["lookup", "head"]).nodes]
