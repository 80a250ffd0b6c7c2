"""Elements put or added at positions of a row, as sparse gates have it; and order statistics, which are elements in order."""

import pytest
import torch
from torch import nn

from dpiframe_core import compile as compile_module
from dpiframe_core.errors import InputError
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.modules import Embeddings, example, randomised, schema
from tests.dpiframe_core.compiler.operations.lowered import Lowered
from tests.dpiframe_core.compiler.served import any_rows_score_as
from tests.dpiframe_core.compiler.test_sequences import GPU_ONLY

pytestmark = pytest.mark.bulk


def best(h):
    return h[:, 0].topk(3, 1)


def rows(h):
    return torch.arange(h.shape[0])


def in_place(h):
    made = torch.zeros(h.shape[0], 8)
    made.scatter_(-1, best(h).indices, best(h).values.softmax(1))
    return made


def one_a_row(h):
    made = h[:, 0] * 1
    made[rows(h), h[:, 0].argmax(1)] = 2.5
    made[rows(h), -1 - h[:, 0].argmin(1)] = h[:, 1, 0]
    return made


def several_a_row(h):
    made = torch.zeros_like(h[:, 0])
    made[rows(h).unsqueeze(1), best(h).indices] = best(h).values
    return made


def buckets(h):
    return torch.bucketize(h[:, 0].contiguous(), torch.tensor([-0.5, 0.0, 0.5]))


# h[rows, 4, 8]
SCATTERED = {
    "a gate of the best": lambda h: torch.zeros_like(h[:, 0]).scatter(1, best(h).indices, best(h).values.softmax(1)),
    "a gate put in place": in_place,
    "all but the best hidden": lambda h: torch.full_like(h[:, 0], -torch.inf).scatter(1, best(h)[1], best(h)[0]).softmax(1),
    "the best marked": lambda h: torch.zeros_like(h[:, 0]).scatter(1, best(h).indices, 1.0),
    "the best as a mask": lambda h: h[:, 0].masked_fill(
        ~torch.zeros_like(h[:, 0], dtype=torch.bool).scatter(1, best(h).indices, True), 0
    ),
    "into a value": lambda h: h.scatter(1, h.argmax(1, keepdim=True), h[:, :2] * 3),
    "into the last dimension": lambda h: h.scatter(2, h.argsort(2)[:, :, 5:], h),
    "steps in front": lambda h: h.transpose(0, 1).scatter(0, h.argmin(1)[None], 7.0).transpose(0, 1),
    "a constant put": lambda h: h[:, 0].scatter(1, best(h).indices, torch.arange(3.0).expand(h.shape[0], 3)),
    "added": lambda h: h.scatter_add(1, h.argsort(1)[:, 1:3], h * 2),
    "added several times": lambda h: torch.zeros(h.shape[0], 4).scatter_add(1, buckets(h), h[:, 1]),
    "counted": lambda h: torch.zeros(h.shape[0], 4).scatter_add(1, buckets(h), torch.ones_like(h[:, 0])),
    "added by its other name": lambda h: h[:, 0].scatter_reduce(1, best(h).indices, h[:, 1], "sum"),
    "one a row": one_a_row,
    "several a row": several_a_row,
    "several a row, added": lambda h: h[:, 0].index_put((rows(h).unsqueeze(1), buckets(h)), h[:, 1], accumulate=True),
    "at constant positions": lambda h: (
        h.index_fill(1, torch.tensor([2, 0]), 0.5).index_copy(2, torch.tensor([6, 1]), h[..., :2])
    ),
}  # fmt: skip
ORDERED = {
    "median": lambda h: h.median(2).values + h.median(1, keepdim=True)[0][:, 0, :4],
    "its position": lambda h: h.median(2)[1],
    "k-th": lambda h: h.kthvalue(3, 2).values * h.kthvalue(8, dim=2, keepdim=True)[0][..., 0],
    "quantile": lambda h: h.quantile(0.3, dim=2) + h.quantile(1.0, dim=1, keepdim=True)[:, 0, :4] - h.quantile(0.0, 2),
    "decimals": lambda h: (h * 100).round(decimals=1) + (h * 100).round(decimals=-2) + h.round(decimals=0),
    "limits": lambda h: (1 / h.relu()).isinf() * 2 + h,
}
TRACES_QUANTILES = torch.__version__ >= "2.13"  # 2.11 cannot for any number of rows
if not TRACES_QUANTILES:
    del ORDERED["quantile"]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", SCATTERED | ORDERED)
def test_a_spelling_gives_what_torch_gives(name, device):
    function = (SCATTERED | ORDERED)[name]
    lowered = Lowered(function, 4, 8)
    for n in (1, 5):
        h = torch.randn(n, 4, 8, generator=torch.Generator().manual_seed(n))
        want = function(h).double()
        torch.testing.assert_close(lowered(h, device).double(), want, rtol=1e-5, atol=1e-6)
        assert want.std() > 0


@pytest.mark.parametrize("device", BACKENDS)
def test_what_is_put_nowhere_and_what_is_put_over_have_no_part_in_what_is_left(device):
    """A sum by weights 0 and 1 would be NaN for every element of the row."""
    x = torch.tensor([[torch.nan, 1, 2, torch.inf, 3, 5]])
    into = Lowered(lambda x: x[:, :3].scatter(1, x[:, :3].argsort(1)[:, 2:], x[:, 4:5]), 6)(x, device)  # NaN is the largest
    assert into.tolist() == [[3, 1, 2]]
    added = Lowered(lambda x: x[:, 1:3].scatter_add(1, x[:, 1:3].argsort(1)[:, :1], x[:, 5:]), 6)(x, device)
    assert added.tolist() == [[6, 2]]
    apart = Lowered(lambda x: x[:, 1:3].scatter(1, x[:, 1:3].argsort(1), x[:, 3:5]), 6)(x, device)
    assert apart.tolist() == [[torch.inf, 3]]


@pytest.mark.parametrize("device", BACKENDS)
def test_of_several_elements_for_one_position_the_largest_is_put(device):
    """torch puts any of them."""
    x = torch.tensor([[0, 0, 1, 3.0, -2, 5], [2, 2, 2, -7, -4, -5]])
    got = Lowered(lambda x: torch.zeros(x.shape[0], 3).scatter(1, x[:, :3].long(), x[:, 3:]), 6)(x, device)
    assert got.tolist() == [[3, 5, 0], [0, 0, -4]]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("add", [False, True])
def test_a_position_that_is_none_gives_no_number(add, device):
    """torch raises for these. Below 0 an index counts from the end, and scatter does not."""
    x = torch.tensor([[-4.0], [-3], [-1], [0], [2], [3], [torch.nan]]).repeat(1, 2)
    x[:, 1] = 5

    def scattered(x):
        none, at = torch.zeros(x.shape[0], 3), x[:, :1].long()
        return none.scatter_add(1, at, x[:, 1:]) if add else none.scatter(1, at, x[:, 1:])

    nan, first, last = [torch.nan] * 3, [5.0, 0, 0], [0, 0, 5.0]
    want = torch.tensor([nan, nan, nan, first, last, nan, nan])
    torch.testing.assert_close(Lowered(scattered, 2)(x, device), want, rtol=0, atol=0, equal_nan=True)

    def by_index(x):
        return torch.zeros(x.shape[0], 3).index_put((rows(x), x[:, 0].long()), x[:, 1], accumulate=add)

    want = torch.tensor([nan, first, last, first, last, nan, nan])
    torch.testing.assert_close(Lowered(by_index, 2)(x, device), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", [name for name in ("median", "quantile", "k-th") if name in ORDERED])
def test_order_statistics_of_what_has_a_nan_are_torchs(name, device):
    h = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    h[1, 2, 3] = torch.nan
    if name != "quantile":  # torch's is NaN next to infinite ones
        h[2, 0, 0], h[2, 3, 1] = torch.inf, -torch.inf
    want = ORDERED[name](h)
    torch.testing.assert_close(Lowered(ORDERED[name], 4, 8)(h, device), want, rtol=1e-5, atol=1e-6, equal_nan=True)


class Step(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step, self.embeddings = step, Embeddings(8)

    def forward(self, x):
        return torch.sigmoid(self.step(self.embeddings(x)).flatten(1).sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda h: h.scatter(0, torch.zeros_like(h, dtype=torch.long), h), "got scatter at constant positions, expected"),
        (lambda h: h.scatter(0, h.argmax(1, keepdim=True), h), "got a scatter among the rows of the batch"),
        (lambda h: h.scatter(1, h[..., :3].argmax(1, keepdim=True), h), r"got scatter of \[1, 1, 3\] into \[1, 4, 8\] a row"),
        pytest.param(
            lambda h: h.quantile(0.3, 1, interpolation="nearest"), "got a quantile, nearest, expected a linear one",
            marks=pytest.mark.skipif(not TRACES_QUANTILES, reason="torch cannot trace it"),
        ),
        (
            lambda h: h.index_put((rows(h), h[:, 0].argmax(1)), h[:, 0]),
            r"got an assignment by an index of rows, expected x\[torch.arange\(n\), i\] = .. of \[n, columns\]",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_put_is_refused(step, message):
    made = schema(8)
    with pytest.raises(InputError, match=message):
        compile_module(randomised(Step(step)), made, example(made))


class SparseExperts(nn.Module):
    """A mixture of which each row has its two best experts (Shazeer et al. 2017), and a softmax over these."""

    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings(8)
        self.gate, self.experts = nn.Linear(32, 6), nn.ModuleList(nn.Linear(32, 4) for _ in range(6))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        h = self.embeddings(x).flatten(1)
        logits = self.gate(h)
        best, at = logits.topk(2, 1)
        weights = torch.zeros_like(logits).scatter(1, at, best.softmax(1))
        found = torch.stack([expert(h).relu() for expert in self.experts], 1)
        return torch.sigmoid(self.out((weights.unsqueeze(2) * found).sum(1)))


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
def test_a_mixture_of_the_best_experts_scores_as_it_did(device, policy, tmp_path):
    made, module = schema(8), randomised(SparseExperts())
    compile_module(module, made, example(made)).write(tmp_path / "b", name="experts")
    any_rows_score_as(module, tmp_path / "b", example(made), device, policy)
