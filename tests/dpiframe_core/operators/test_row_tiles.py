"""Tiles of rows score as whole batches, and bound calls compute what the functions do."""

import pytest
import torch

from dpiframe_core import compile as compile_module
from dpiframe_core.compiler.cpu_scores import cpu_lane
from dpiframe_core.compiler.examples import example_block
from dpiframe_core.graph.aten import AtenCall, Constant, Window, contiguous
from dpiframe_core.operators import row_tiles
from dpiframe_core.operators.generic.aten_functions import AtenOperator
from dpiframe_core.operators.generic.fewer_passes import weighted_sums
from tests.dpiframe_core.compiler.history_models import DIM, MODELS, Common, example, schema
from tests.dpiframe_core.compiler.modules import randomised
from tests.dpiframe_core.compiler.test_history_models import exact

ROWS = 5


@pytest.mark.parametrize("name", ["sasrec", "ccpm"])
def test_batches_of_any_size_score_alike_tile_by_tile(name, monkeypatch):
    monkeypatch.setattr(row_tiles, "_CACHE", 1)
    module = randomised(MODELS[name](), seed=1)
    made = compile_module(module, schema(), example(16))
    lane = cpu_lane(made.graph, made.schema, made.tables, made.dense)
    for rows in (1, 7, 8, 9, 29, 8):
        found = lane.run([example_block(made.schema, example(rows, seed=rows), {"hist": 0})])
        assert found.scores.shape == (rows, 1)
        want = exact(module, example(rows, seed=rows))
        torch.testing.assert_close(torch.from_numpy(found.scores).double(), want.reshape(rows, 1), rtol=0, atol=1e-5)


class MaskedMean(Common):
    """A mean of the history; `seen`: what else reads the vectors times the mask."""

    def __init__(self, seen=False):
        super().__init__(DIM)
        self.seen = seen

    def forward(self, x):
        there = (x["hist"] != 0).unsqueeze(2).float()
        kept = there * self.items(x["hist"])
        mean = kept.sum(1) / there.sum(1).clamp(min=1)
        return self.scored(x, mean + kept.amax(1) if self.seen else mean)


@pytest.mark.parametrize("seen", [False, True])
def test_a_sum_of_vectors_times_their_weights_is_one_product_where_nothing_else_reads_these(seen):
    module = randomised(MaskedMean(seen), seed=1)
    made = compile_module(module, schema(), example(16))
    lane = cpu_lane(made.graph, made.schema, made.tables, made.dense)
    nodes = {n.name: n for n in made.graph.nodes}
    weighted_sums(made.graph, nodes)
    calls = [n.attrs.aten.op for n in nodes.values() if n.attrs.aten is not None]
    assert ("aten.mul" in calls, "aten.matmul" in calls) == (seen, not seen)
    for rows in (1, 30):  # the first row's history is empty
        values = example(rows, seed=rows)
        found = torch.from_numpy(lane.run([example_block(made.schema, values, {"hist": 0})]).scores)
        torch.testing.assert_close(found.double(), exact(module, values).reshape(rows, 1), rtol=0, atol=1e-5)


def of(sizes, value=0):
    return Window(value, sizes, contiguous(sizes))


def strided(sizes, strides, offset=0):
    return Window(0, sizes, strides, offset)


CALLS = {
    "overlapping windows": AtenCall("aten.linear", (strided((9, 6), (2, 1)), Constant(0), Constant(1)), (), (9, 4)),
    "windows down a column": AtenCall("aten.linear", (strided((5, 2, 6), (2, 1, 2)), Constant(0), Constant(1)), (), (5, 2, 4)),
    "a product without a bias": AtenCall("aten.linear", (of((4, 6)), Constant(0)), (), (4, 4)),
    "softmax of columns apart": AtenCall("aten.softmax", (strided((4, 3), (6, 1)),), (2,), (4, 3)),
    "softmax of another dimension": AtenCall("aten.softmax", (of((4, 6)),), (1,), (4, 6)),
    "layer norm of columns apart": AtenCall("aten.layer_norm", (strided((4, 4), (6, 1)), Constant(1)), (1, 1e-5), (4, 4)),
    "two dimensions normed": AtenCall("aten.layer_norm", (of((2, 3, 4)),), (2, 1e-5), (2, 3, 4)),
    "a choice by a constant": AtenCall("aten.where", (Constant(2), of((4, 6)), strided((4, 6), (0, 1))), (), (4, 6)),
    "a constant mask": AtenCall("aten.masked_fill.Scalar", (of((4, 6)), Constant(2)), ("-inf",), (4, 6)),
    "a mask": AtenCall("aten.masked_fill.Scalar", (of((4, 6)), of((4, 6), 1)), (2.0,), (4, 6)),
    "rows of a constant": AtenCall("aten.take_along_dim", (Constant(0), of((24, 1), 1)), (1, False), (24, 6)),
    "of its own row": AtenCall("aten.take_along_dim", (of((4, 6)), of((24, 1), 1)), (1, True), (24, 6)),
    "of each column": AtenCall("aten.take_along_dim", (of((4, 6)), of((4, 6), 1)), (1, True), (4, 6)),
    "sorted": AtenCall("aten.sort", (of((4, 6)),), (1, True), (4, 6)),
    "where they stood": AtenCall("aten.sort.positions", (of((4, 6)),), (2, False), (4, 6)),
    "a number less a value": AtenCall("aten.rsub.Scalar", (of((24,)),), (3,), (24,)),
    "prelu": AtenCall("aten.prelu", (of((24,)), Constant(3)), (), (24,)),
    "gelu": AtenCall("aten.gelu", (of((24,)),), (False,), (24,)),
    "compared": AtenCall("aten.le", (of((4, 6)), Constant(2)), (), (4, 6)),
    "joined": AtenCall("aten.cat", (of((4, 6)), Constant(0), of((4, 6), 1)), (1,), (12, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_bound_call_gives_what_the_function_does_each_time(name):
    draw = torch.Generator().manual_seed(3)
    params = [torch.randn(4, 6, generator=draw), torch.randn(4, generator=draw)]
    params += [(torch.rand(4, 6, generator=draw) > 0.5).float(), torch.rand(24, generator=draw)]
    call = CALLS[name]
    used = [o.param for o in call.operands if isinstance(o, Constant)]
    places = {param: i for i, param in enumerate(used)}
    operands = tuple(Constant(places[o.param]) if isinstance(o, Constant) else o for o in call.operands)
    operator = AtenOperator(AtenCall(call.op, operands, call.args, call.sizes), [params[p] for p in used], torch.device("cpu"))
    x, index, out = torch.empty(ROWS, 24), torch.empty(ROWS, 24), torch.full((ROWS, call.sizes[0] * prod_of(call)), torch.nan)
    bound = operator.bound([x, index], out)
    for positions in ([0, 1, 2, 3], [0, -1, 3, 4], [0, torch.nan, 1, 9]):  # the last two are none, or count from the end
        x.copy_(torch.randn(ROWS, 24, generator=draw))
        index.copy_(torch.tensor(positions)[torch.randint(0, 4, (ROWS, 24), generator=draw)])
        bound()
        torch.testing.assert_close(out, operator([x, index]), rtol=1e-5, atol=1e-5, equal_nan=True)


def prod_of(call):
    return torch.Size(call.sizes[1:]).numel()
