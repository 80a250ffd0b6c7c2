"""What is written over a tensor takes that tensor's type; what would write into another row is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.modules import Embeddings, example, randomised, schema
from tests.dpiframe_core.compiler.operations.lowered import Lowered

pytestmark = pytest.mark.bulk


def rows(v):
    return torch.arange(v.shape[0])


def whole(v):
    made = torch.zeros(v.shape[0], 8, dtype=torch.long)
    made[:] = v[:, 0]
    return made


def column(v):
    made = v.long()
    made[:, 0] = v[:, 1] * 2
    return made


def truths(v):
    made = v > 0
    made[:, 0] = made[:, 1] * 2
    made[:, 2] = v[:, 3]
    return made


def shifted(v):
    made = v * 1
    made[:, 1:] = v[:, :3]
    made[:, :-1] += 2 * v[:, 1:]
    made[:, :, ::3] = 0.5
    return made


def into_zeros(v):
    made = torch.zeros(v.shape[0], 4, 8)
    made[:, 1:3] = v[:, 2:]
    made[:, :, 5:].add_(v[:, :, :3])
    made[:, 3:].relu_()
    return made


def constants(v):
    made = v[:, 0] * 1
    made[rows(v), v[:, 0].argmax(1)] = torch.ones(v.shape[0])
    made[rows(v)[:, None], v[:, 0].topk(2, 1).indices] = torch.tensor([3.0, -3.0])
    made[rows(v)[:, None], v[:, 1].topk(3, 1).indices] = v[:, 2, :1]
    return made


def at(v):
    return v[:, 0, :1].abs().long().clamp(max=3)


# v[rows, 4, 8]
WRITTEN = {
    "numbers into integers": whole,
    "a column into integers": column,
    "numbers into truths": truths,
    "copied": lambda v: v.int().copy_(v * 3) + (v > 0).copy_(v),
    "a slice": shifted,
    "a slice of zeros": into_zeros,
    "constants by rows": constants,
    "truths added": lambda v: (
        torch.zeros(v.shape[0], 8, dtype=torch.bool).scatter_add(1, at(v).repeat(1, 2), v[:, 0, :2] < 9) * 3.0
    ),
    "truths put and added": lambda v: (v[:, 0] > 0).index_put((rows(v), at(v)[:, 0]), v[:, 1, 0] < 9, accumulate=True) * 3.0,
    "a number for truths": lambda v: (v > 0).masked_fill(v < 1, 2) * 1.5 + F.pad(v > 0, (1, 1), value=2)[..., 1:-1],
    "a number for integers": lambda v: (
        (v * 3).long().masked_fill(v < 1, 2.5) + F.pad((v * 3).long(), (1, 1), value=2.5)[..., :8]
    ),
    "put into integers": lambda v: (v * 3).long()[:, 0].scatter(1, at(v), 2.5).index_fill(1, torch.tensor([7]), 3.5),
    "put into truths": lambda v: (v > 0)[:, 0].scatter(1, at(v), 2).index_fill(1, torch.tensor([7]), 2) * 1.5,
    "powers of integers": lambda v: (v * 2).long() ** 2 + (v * 2).long() ** torch.tensor([0, 1, 2, 3] * 2),
    "numbers at both sides": lambda v: torch.atan2(v, torch.tensor(1.0)) + torch.logical_or(v, torch.tensor(0.0)) * (v > 0),
    "and of a constant": lambda v: (
        torch.logical_and(v > 0, torch.tensor(True)) * v + torch.logical_xor(v > 0, torch.tensor(True))
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_torch_writes(name, device):
    lowered = Lowered(WRITTEN[name], 4, 8)
    for n in (1, 2, 7):
        v = torch.randn(n, 4, 8, generator=torch.Generator().manual_seed(n)) * 1.7
        want = WRITTEN[name](v.clone()).double()
        torch.testing.assert_close(lowered(v, device).double(), want, rtol=1e-5, atol=1e-5)
        assert want.std() > 0


class Step(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step, self.embeddings = step, Embeddings(8)
        self.queries, self.places = nn.Parameter(torch.zeros(1, 2, 8)), nn.Parameter(torch.zeros(3, 4))
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return torch.sigmoid(self.step(self, self.embeddings(x)).flatten(1).sum(1, keepdim=True))


def other_rows(m, v):
    made = v[:, 0] * 1
    made[rows(v)[:, None], v[:, 1].argmax(1)] = 2.5
    return made


def all_rows(m, v):
    made = v[:, 0] * 1
    made[rows(v)[None], v[:, 1].topk(1, 1).indices] = 2.5
    return made


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (other_rows, "got an assignment by an index of rows of another rank, expected"),
        (all_rows, "got an assignment by an index of rows of another rank, expected"),
        (lambda m, v: v.index_fill(0, torch.tensor([0]), 3.0), "got elements put among the rows of the batch"),
        (lambda m, v: v.transpose(0, 1).index_fill(1, torch.tensor([0]), 3.0).mT, "got elements put among the rows"),
        (lambda m, v: v / torch.ones(v.shape[0]).sum(), "got aten.sum.default over the rows of a constant"),
        (lambda m, v: v[:, 0] * torch.ones(v.shape[0], 1).cumsum(0), "got aten.cumsum.default over the rows of a constant"),
        (lambda m, v: v[:, 0] + F.softmax(torch.zeros(v.shape[0], 8), 0), "over the rows of a constant"),
        (lambda m, v: v * (2 ** v.long()), "got a power of integers by what may be below 0, expected numbers"),
        (lambda m, v: v.prod(1, dtype=torch.bool) * 1.0, "got aten.prod.dim_int with dtype=torch.bool, expected a cast ahead"),
        (lambda m, v: v.sum(1, dtype=torch.bool) * 1.0, "got aten.sum.dim_IntList with dtype=torch.bool, expected a cast"),
        (lambda m, v: torch.zeros(v.shape[0], 4, 8).index_copy(1, torch.tensor([0, 2]), v[:, :2]), "got index_copy into a con"),
        (lambda m, v: m.places.index_select(1, v[:, 0, 0].long().clamp(0, 3))[:, None], "of such operands"),
    ],
)  # fmt: skip
def test_what_would_mix_rows_or_lose_a_type_is_refused(step, message):
    made = schema(8)
    with pytest.raises(InputError) as refused:
        compile_module(randomised(Step(step)), made, example(made))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "step",
    [
        lambda m, v: m.heads(m.queries.expand(v.shape[0], -1, -1), v, v, need_weights=False)[0],
        lambda m, v: F.scaled_dot_product_attention(m.queries.expand(v.shape[0], -1, -1), v, v),
        lambda m, v: F.scaled_dot_product_attention(v, m.queries.expand(v.shape[0], -1, -1), v[:, :2], is_causal=True),
        lambda m, v: F.scaled_dot_product_attention(v, *[m.queries.expand(v.shape[0], -1, -1)] * 2),
    ],
    ids=["heads", "queries", "keys", "keys and values"],
)  # fmt: skip
def test_attention_takes_queries_or_keys_that_were_learned(step):
    made, module = schema(8), randomised(Step(step))
    compiled = compile_module(module, made, example(made))
    assert compiled.deviation <= 1e-5
    assert compiled.golden.scores.std() > 1e-4
