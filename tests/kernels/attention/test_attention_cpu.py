"""Target attention on a CPU, in C and without a compiler, against the float64 formula."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.attention import attention_cpu
from kernels.attention.attention_columns import AttentionColumns
from kernels.attention.attention_cpu import CpuAttention
from kernels.runtime.c_build import cpu_library
from tests import model_oracle
from tests.kernels.attention.test_attention import KINDS, case, unit, weights_of


@pytest.fixture(params=["c", "torch"])
def _both_ways(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(attention_cpu, "cpu_library", lambda: None)
    elif cpu_library() is None:
        pytest.skip("there is no C compiler")


pytestmark = pytest.mark.usefixtures("_both_ways")


def made(own, dim, length, rows, parts=1):
    """The layer, x with columns that nobody reads, what is kept of it and the interest by the formula."""
    p, q, keys, mask = case(own, dim, length, rows)
    ends = np.linspace(0, dim, parts + 1).astype(int).tolist()
    dims = tuple(b - a for a, b in pairwise(ends))
    at = 3 + dim + length * dim
    first = tuple(3 + a for a in ends[:-1]), tuple(3 + dim + length * a for a in ends[:-1])
    columns = AttentionColumns(length, dims, *first, tuple(2 + a for a in ends[:-1]), at if own.masked else -1, ((1, 0, 2),))
    split = [keys[..., a:b].reshape(rows, -1) for a, b in pairwise(ends)]
    marks, more = np.tile(np.float32([np.nan, 3, 4]), (rows, 1)), np.full((rows, 5), np.nan, np.float32)
    x = torch.from_numpy(np.concatenate([marks, q, *split, mask, more], 1))
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    return CpuAttention(columns, *weights_of(own, p)), x, np.concatenate([marks[:, 1:], want], 1), keys


def check(own, dim, length, rows=5, parts=1):
    layer, x, want, keys = made(own, dim, length, rows, parts)
    # As in test_attention: the interest sums as many weights as there are keys.
    bound = 2e-6 * max(1.0, float(np.abs(keys).sum(1).max()) / 4)
    np.testing.assert_allclose(layer(x).numpy(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dim", "length", "parts"), [(1, 1, 1), (10, 5, 3), (16, 32, 1), (40, 50, 2), (130, 4, 1), (8, 201, 1)]
)
def test_the_interest_is_the_sum_of_weighted_keys(dim, length, parts, masked, softmax):
    check(unit((9, 5), softmax=softmax, masked=masked), dim, length, parts=parts)


@pytest.mark.parametrize("output", ["identity", "sigmoid", "relu"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_activation_of_the_layers_and_of_the_weight(kind, output):
    check(unit((16, 7), kind, output_activation=output), 12, 9)


@pytest.mark.parametrize("units", [(1,), (33,), (80, 40), (36, 20, 10, 3), (200,)])
def test_any_number_and_width_of_layers(units):
    check(unit(units), 16, 11)


def test_many_rows_are_each_as_alone_and_one_that_is_no_number_is_alone():
    layer, x, _, _ = made(unit((12, 6), softmax=True), 12, 40, 70)
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(layer(x), alone, rtol=0, atol=2e-6)
    x[3, 3] = torch.nan
    got, others = layer(x), torch.arange(70) != 3
    assert torch.isnan(got[3, 2:]).all()
    torch.testing.assert_close(got[others], alone[others], rtol=0, atol=2e-6)


def test_x_that_is_too_narrow_is_refused():
    layer, x, _, _ = made(unit((4,)), 4, 3, 2)
    with pytest.raises(ValueError, match=r"attention: got x \(2, 21\), expected at least 22 columns"):
        layer(x[:, :21])
