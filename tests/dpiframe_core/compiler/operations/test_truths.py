"""Truth values stay truths, and a number made of them is one, on other rows than those that a module was compiled with."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from dpiframe_core.errors import InputError
from tests.backends import BACKENDS
from tests.dpiframe_core.compiler.operations.lowered import Lowered

TABLE = torch.arange(6.0).view(2, 3)


def truths(x):
    return x[..., 0] > 0


def attended(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.unsqueeze(1).expand(-1, 4, -1))


# x[n, 4, 3] -> what torch gives for it
OF_TRUTHS = {
    "a mask": lambda x: attended(x, truths(x)),
    "a mask as numbers, which are added": lambda x: attended(x, truths(x).to(x.dtype)),
    "a mask from a maximum": lambda x: attended(x, torch.stack([truths(x), x[..., 1] > 0], 2).max(2)[0]),
    "a mask in order": lambda x: attended(x, (x[..., 0] > -9) & truths(x).sort(1, descending=True)[0]),
    "a sum, which is their or": lambda x: truths(x)[:, 1:] + truths(x)[:, :-1],
    "a sum to a truth": lambda x: torch.sum(truths(x), 1, dtype=torch.bool),
    "a count": lambda x: truths(x).sum(1) + truths(x).long().cumsum(1)[:, -1],
    "with a constant": lambda x: (truths(x) & True) ^ ((x[..., 1] > 0) | False),
    "equal to one": lambda x: truths(x) == True,  # noqa: E712
    "chosen": lambda x: torch.where(x[..., 1] > 0, truths(x), False) | truths(x).masked_fill(x[..., 2] > 0, True),
    "a position in a table": lambda x: TABLE[truths(x).long()],
    "a class": lambda x: F.one_hot(truths(x).long(), 2),
}
# A tensor without dimensions is divided by, a number is not: it is multiplied by the reciprocal.
QUOTIENTS = {
    "of a tensor": lambda x: (torch.tensor(82.0).to(x.dtype) / x).floor(),
    "of a number": lambda x: (82.0 / x).floor(),
}


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", OF_TRUTHS)
def test_truths_are_as_torch_has_them(name, device):
    x = torch.randn(40, 4, 3, generator=torch.Generator().manual_seed(5))
    x[0, :, 0] = 1
    x[1, 1:, 0] = -1
    want = OF_TRUTHS[name](x)
    torch.testing.assert_close(Lowered(OF_TRUTHS[name], 4, 3)(x, device), want.float(), rtol=0, atol=1e-6, equal_nan=True)
    assert want.float().nan_to_num().std() > 0


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_quotient_is_rounded_as_torch_rounds_it(name):
    x = torch.arange(1.0, 121).view(10, 4, 3)
    assert torch.equal(Lowered(QUOTIENTS[name], 4, 3)(x), QUOTIENTS[name](x))


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda x: truths(x).sum(1) & torch.tensor(1), "got aten.__and__.Tensor of integers, expected truth values"),
        (lambda x: ~x.long(), "got aten.bitwise_not.default of integers, expected truth values"),
        (lambda x: x.sum(1, dtype=torch.int64), "expected a cast ahead of it"),
        (lambda x: torch.cat([x[:, :0], x], 1), "got a slice of nothing, expected at least one element"),
        (lambda x: torch.lgamma(x), "got aten.lgamma.default, expected an operation"),
    ],
)
def test_what_would_be_another_number_is_refused(function, fault):
    with pytest.raises(InputError, match=fault):
        Lowered(function, 4, 3)


def test_numbers_and_positions_that_tensors_hold_are_those_numbers():
    number, at = torch.tensor(0.3), torch.tensor(2)

    def function(x):
        y = x.clone()
        y[:, 1] = x[:, 0] * number.item()
        y[:, 3] = 0.7
        return y + F.leaky_relu(x, number.item()) + x[:, at.item()].unsqueeze(1) + torch.full_like(x, number.item())

    x = torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(Lowered(function, 4, 3)(x), function(x), rtol=0, atol=1e-6)


BOUNDS = torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)  # of which float32 holds none
COMPARED = {
    "gt": lambda x: x.unsqueeze(3) > BOUNDS,
    "ge": lambda x: x.unsqueeze(3) >= BOUNDS,
    "lt, from the left": lambda x: torch.lt(BOUNDS, x.unsqueeze(3)),
    "le": lambda x: x.unsqueeze(3) <= BOUNDS,
    "bucketize": lambda x: torch.bucketize(x, BOUNDS),
    "bucketize, right": lambda x: torch.bucketize(x, BOUNDS, right=True),
}


@pytest.mark.parametrize("name", COMPARED)
def test_float64_constants_are_compared_as_torch_compares_them(name):
    near = BOUNDS.float()
    x = torch.cat([near, near.nextafter(near * 0), near.nextafter(near + 1), near + 0.05]).view(1, 4, 3)
    assert torch.equal(Lowered(COMPARED[name], 4, 3)(x), COMPARED[name](x).float())


def test_equality_with_float64_constants_that_float32_does_not_hold_is_refused():
    with pytest.raises(InputError, match="got eq of values and float64 constants, expected float32 ones"):
        Lowered(lambda x: x == BOUNDS, 4, 3)
    assert Lowered(lambda x: x == BOUNDS.round(), 4, 3)(torch.ones(1, 4, 3)).tolist() == [[[0, 0, 1]] * 4]


WHOLE = {
    "times": lambda x: x.long() * 7919,
    "plus": lambda x: (x.long() + 1) - x.long(),
    "parity": lambda x: (x.long() + 1) % 2,
    "of sums": lambda x: x.long().sum(1) % 7,
    "behind a view": lambda x: x.long().flatten(1)[:, 3:] * 3 + 1,
    "squared": lambda x: x.int() ** 2 % 100 + x.long().square() % 7,
    "hashed": lambda x: (x.long() * 31 + 7) % 1000,
    "hashed twice": lambda x: (x.long().abs() % 1000003) * 31 % 97,
    "from 0 on": lambda x: x.long().clamp(min=0) * 7919 % 1000,
    "sorted": lambda x: x.long().sort(1)[0] * 7919 % 1000 + x.long().max(1, keepdim=True).values * 31,
    "compared": lambda x: x.long() * 7919 > 100,
    "chosen by": lambda x: torch.where(x.long() * 7919 > 100, x.long() // 3600, 1),
    "a bucket": lambda x: torch.bucketize((x.long() * 100).float(), torch.tensor([-1e12, 1e12])),
    "truths": lambda x: (x > 0).long() * 9000 * 3000 % 10,
}


@pytest.mark.parametrize("name", WHOLE)
def test_integers_are_those_of_torch_or_none_at_all(name):
    """Of integers from 2^24 on float32 does not hold each."""
    made = Lowered(WHOLE[name], 4, 3)
    x = torch.randint(-20, 20, (6, 4, 3), generator=torch.Generator().manual_seed(1)).float()
    if name != "truths":
        assert torch.equal(made(x), WHOLE[name](x).float())
    for far in (x * 6173, x + (1 << 24), x * 0 + (1 << 24), x * (1 << 20)):
        got, want = made(far), WHOLE[name](far).float()
        refused = got.flatten(1).isnan().any(1)
        assert torch.equal(got[~refused], want[~refused])
        assert got[refused].isnan().all()
    assert refused.any()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.long() @ x.long().transpose(1, 2),
        lambda x: x.long().cumsum(1),
        lambda x: x.long() - 16777217,
        lambda x: torch.zeros(x.shape[0], 2, 3, dtype=torch.long).index_add(1, torch.tensor([0, 1, 1, 1]), x.long()),
        lambda x: (x > 0).long() * 16777217 % 10,
    ],
)
def test_integers_that_cannot_be_looked_at_are_refused(function):
    with pytest.raises(InputError, match=r"got .* (of integers and|cast to integers)"):
        Lowered(function, 4, 3)


def test_truths_that_are_added_at_positions_are_truths():
    def added(x):
        made = torch.zeros(x.shape[0], 4, dtype=torch.bool).index_add(1, torch.tensor([1, 1, 2]), x[:, :3, 0] > 0)
        return made.float() + (~made).float() * 3

    x = torch.randn(7, 4, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Lowered(added, 4, 3)(x), added(x))
