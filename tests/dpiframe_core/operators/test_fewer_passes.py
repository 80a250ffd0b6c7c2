"""What a CPU computes by fewer passes scores as the module does."""

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_module
from dpiframe_core.compiler.cpu_scores import cpu_lane
from dpiframe_core.compiler.examples import example_block
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.operators.generic import bound_calls
from dpiframe_core.operators.generic.fewer_passes import pooled_lookup, split_linears, weighted_sums
from tests.dpiframe_core.compiler.history_models import DIM, STEPS, Common, example, schema
from tests.dpiframe_core.compiler.modules import randomised
from tests.dpiframe_core.compiler.test_history_models import exact

# What DIN's first layer may read of an item q beside each step k: and whether that is split.
READ = {
    "as published": (lambda q, k: [q.expand_as(k), k, q - k, q * k], True),
    "in another order": (lambda q, k: [k * q, k - q, k, q.expand_as(k)], True),
    "without a difference": (lambda q, k: [q.repeat(1, STEPS, 1), k, q.expand_as(k) * k], True),
    "the product alone": (lambda q, k: [q * k], True),
    "the product twice": (lambda q, k: [q * k, k * q], True),
    "no product": (lambda q, k: [q.expand_as(k), k, q - k], False),
    "a square": (lambda q, k: [q * k, k * k], False),
    "a shifted difference": (lambda q, k: [q.expand_as(k), k.roll(1, 1) - q, q * k], False),
}


class Din(Common):
    """Attention by a layer of what `read` gives; `twice`: two layers read it, and something else the product."""

    def __init__(self, read, bias=True, twice=False):
        super().__init__(DIM)
        width = DIM * len(read(torch.zeros(1, 1, DIM), torch.zeros(1, STEPS, DIM)))
        self.read, self.twice = read, twice
        self.first, self.other, self.out = nn.Linear(width, 12, bias=bias), nn.Linear(width, 12), nn.Linear(12, 1)

    def forward(self, x):
        q, k = self.items(x["item"]).unsqueeze(1), self.items(x["hist"])
        joined = torch.cat(self.read(q, k), -1)
        hidden = torch.sigmoid(self.first(joined)) * (self.other(joined) if self.twice else 1)
        weights = self.out(hidden) * (x["hist"] != 0).unsqueeze(2).float()
        pooled = (weights * k).sum(1)
        return self.scored(x, pooled + (q * k).amax(1) if self.twice else pooled)


@pytest.mark.parametrize("how", [{}, {"bias": False}, {"twice": True}])
@pytest.mark.parametrize("name", READ)
def test_layers_of_a_vector_beside_each_step_read_the_two_apart(name, how, monkeypatch):
    read, split = READ[name]
    module = randomised(Din(read, **how), seed=1)
    made = compile_module(module, schema(), example(16))
    nodes = {n.name: n for n in made.graph.nodes}
    assert len(split_linears(made.graph, nodes, made.dense)) == split * (8 if "twice" in how else 4)
    joins = [
        n for n in nodes.values() if n.attrs.aten is not None and n.attrs.aten.op == "aten.cat" and n.attrs.aten.args == (2,)
    ]
    assert not (split and joins)
    for copied in (1, 1 << 17):  # a row's weights at a time, and all
        monkeypatch.setattr(bound_calls, "_COPIED", copied)
        scores_as_exact(module, made)


def scores_as_exact(module, made):
    lane = cpu_lane(made.graph, made.schema, made.tables, made.dense)
    for rows in (1, 30):  # the first row's history is empty
        values = example(rows, seed=rows)
        found = torch.from_numpy(lane.run([example_block(made.schema, values, {"hist": 0})]).scores)
        torch.testing.assert_close(found.double(), exact(module, values).reshape(rows, 1), rtol=0, atol=1e-5)


class Marked(Common):
    """A history's vectors times what `weights` makes of its marks, summed; `seen`: what else of the vectors is read."""

    def __init__(self, weights, seen):
        super().__init__(DIM)
        self.weights, self.seen = weights, seen

    def forward(self, x):
        h, marks = self.items(x["hist"]), (x["hist"] != 0).unsqueeze(2).float()
        return self.scored(x, (h * self.weights(marks)).sum(1) / marks.sum(1).clamp(min=1) + self.seen(h))


# Of the steps, which weights; what else is read of the vectors; and whether the lookup sums them.
SUMS = {
    "all that there are": (lambda m: m, lambda h: 0, True),
    "the marks of the steps before": (lambda m: m.roll(1, 1), lambda h: 0, False),
    "other weights": (lambda m: m * 0.5, lambda h: 0, False),
    "the last vector is read, too": (lambda m: m, lambda h: h[:, -1], False),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_lookup_sums_vectors_times_their_marks_where_nothing_else_reads_them(name):
    *how, pooled = SUMS[name]
    module = randomised(Marked(*how), seed=1)
    made = compile_module(module, schema(), example(16))
    graph = fuse(made.graph)
    nodes = {n.name: n for n in graph.nodes}
    weighted_sums(graph, nodes)
    (lookup,) = [n for n in graph.nodes if n.op == "lookup"]
    plan = plan_lookup(lookup, made.schema)
    slots = pooled_lookup(lookup, plan, nodes).x_slots
    assert [s.columns for s in slots if s.columns > 1] == [STEPS] * pooled
    assert len(plan.x_slots) - len(slots) == (STEPS - 1) * pooled
    scores_as_exact(module, made)
