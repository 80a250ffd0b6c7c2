"""Calls that change a value: taken for ordinary ones where nobody sees the difference, else left to torch's decompositions."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_model
from dpiframe_core.compiler.trace import made_functional
from tests.dpiframe_core.compiler.modules import MODULES, example, randomised
from tests.dpiframe_core.compiler.operations.lowered import Lowered
from tests.dpiframe_core.compiler.test_spellings import Step, schema

pytestmark = pytest.mark.bulk


class Of(nn.Module):
    """x[rows, 4] and a weight w[4, 4] through a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.arange(16.0).reshape(4, 4) / 7 - 1, requires_grad=False)

    def forward(self, x):
        return self.function(x, self.w)


def exported(function):
    rows = torch.export.Dim("rows", min=1)
    return torch.export.export(Of(function), (torch.linspace(-2, 2, 12).reshape(3, 4),), dynamic_shapes=({0: rows},))


def several(x, w):
    made = x @ w
    made += w[0]
    made.relu_()
    return made.mul_(0.5)


def read_again(x, w):
    made = x @ w
    return made.relu_() + made


UNSEEN = {
    "a sum": lambda x, w: (x + 1).add_(w[0]),
    "several": several,
    "an activation": lambda x, w: F.relu(F.linear(x, w), inplace=True) * x,
    "read again": read_again,  # torch's trace reads the result there
    "zeros": lambda x, w: x.new_zeros((x.shape[0], 4)).add_(x).masked_fill_(x > 0, 0.5),
    "no value": lambda x, w: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device="cpu"),  # detached in place
    "a constant": lambda x, w: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_only_the_call_itself_reads_may_as_well_be_another_value(name):
    program = exported(UNSEEN[name])
    want = program.module()(x := torch.linspace(-3, 1, 20).reshape(5, 4))
    assert made_functional(program.graph)
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert not any(c._schema.is_mutable for c in calls if isinstance(c, torch._ops.OpOverload))
    program.graph_module.recompile()
    torch.testing.assert_close(program.module()(x), want, rtol=0, atol=0)
    torch.testing.assert_close(want, UNSEEN[name](x.clone(), Of(None).w), rtol=0, atol=1e-6)


def seen_in_a_view(x, w):
    made = x * 2
    half = made[:, :2]
    made.relu_()
    return half


def view_changed(x, w):
    made = x * 2
    made[:, :2].relu_()
    return made


SEEN = {
    "by a view": seen_in_a_view,
    "in a view": view_changed,
    "by reshape": lambda x, w: x.reshape(-1).relu_().reshape(-1, 4) + x,
    "by dropout": lambda x, w: F.dropout(x, 0.5, False).relu_() + x,
    "of an input": lambda x, w: x.add_(1),
    "of another dtype": lambda x, w: (x + 1).add_(w.double()[0]),
    "within a block": lambda x, w: _without_gradients(x, w),
}


def _without_gradients(x, w):
    with torch.enable_grad():
        return (x + 1).relu_()


@pytest.mark.parametrize("name", SEEN)
def test_what_others_may_see_is_left_to_torch(name):
    with torch.no_grad():
        assert not made_functional(exported(SEEN[name]).graph)


STEPS = {
    "read again": lambda m, v: read_again(v, m.w),
    "by a view": lambda m, v: torch.cat([v.flatten(1), seen_in_a_view(v.flatten(1), None)], 1),
    "unseen": lambda m, v: several(v.flatten(1)[:, :8], m.w),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_module_that_changes_values_keeps_its_scores(name):
    module, made = randomised(Step(STEPS[name])), schema(8)
    compiled = compile_model(module, made, example(made))
    assert compiled.deviation <= 1e-5
    assert compiled.golden.scores.std() > 1e-4


@pytest.mark.parametrize("name", ["mlp", "transformer", "mixed"])
def test_a_module_without_such_calls_is_taken_as_torch_exports_it(name, monkeypatch):
    """Its decompositions take longer than all else that compile does."""
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    make, schema_of, options = MODULES[name]
    made = schema_of(8)
    assert compile_model(randomised(make(8)), made, example(made), **options).deviation <= 1e-5


def changed(h):
    """A view that is changed, and the tensor behind it read: torch is left to take it apart."""
    made = h * 1.5
    made.transpose(1, 2).mul_(2)
    return made


BEHIND = {
    "causal attention": lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "last item": lambda h: h[torch.arange(h.shape[0]), (h[:, :, 0] > 0).sum(1) - 1],
    "convolution": lambda h: F.conv1d(h.mT, torch.ones(3, 4, 3, dtype=h.dtype), padding="same"),
    "convolution of images": lambda h: F.conv2d(h[:, None], torch.ones(3, 1, 2, 4, dtype=h.dtype)),
    "pooling": lambda h: F.max_pool1d(h.mT, 2) * F.avg_pool1d(h.mT, 2) + F.adaptive_max_pool1d(h.mT, 1),
    "ranking": lambda h: h.gather(1, h.topk(3, 1)[1].sort(1)[0]),
    "classes": lambda h: F.one_hot(torch.bucketize(h[..., 0].contiguous(), torch.tensor([-0.5, 0.5], dtype=h.dtype)), 3),
    "norms": lambda h: F.group_norm(h.mT, 2) + F.instance_norm(h.mT),
}


@pytest.mark.parametrize("name", BEHIND)
def test_calls_behind_one_that_is_taken_apart_stay_what_they_are(name):
    h = torch.linspace(-1, 1, 5 * 6 * 4).cos().reshape(5, 6, 4) * torch.linspace(-3, 2, 24).reshape(6, 4)
    got = Lowered(lambda h: BEHIND[name](changed(h)), 6, 4)(h)
    torch.testing.assert_close(got.double(), BEHIND[name](changed(h.double())).double(), rtol=1e-5, atol=1e-5)
