"""Softmax, layer norm and choices by norms.c, against the formulas in float64."""

import pytest
import torch

from kernels.norms.norms import RowChoice, RowNorm
from kernels.runtime.c_build import cpu_library

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="needs a C compiler")
WIDTHS = [1, 2, 15, 16, 17, 50, 127]


def numbers(width, rows=37):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 5


@pytest.mark.parametrize("width", WIDTHS)
def test_softmax_is_the_share_of_each_exponential(width):
    x, out = numbers(width), torch.full((37, width), torch.nan)
    RowNorm(x, out, width)()
    each = x.double().exp()
    torch.testing.assert_close(out.double(), each / each.sum(1, keepdim=True), rtol=1e-6, atol=1e-7)


def test_what_a_mask_hides_has_no_share_and_a_row_of_nothing_is_nan():
    x = numbers(50)
    x[:, 7:] = -torch.inf
    x[3], x[4, 2] = -torch.inf, torch.nan
    RowNorm(x, x, 50)()
    assert x[[3, 4]].isnan().all()
    kept = torch.arange(37).apply_(lambda row: row not in (3, 4)).bool()
    assert (x[kept, 7:] == 0).all()
    torch.testing.assert_close(x[kept].sum(1), torch.ones(35))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [0, 1, 2])
def test_layer_norm_has_mean_and_variance_of_each_row(width, affine):
    x, more = numbers(width) + 3, numbers(width)[:2]
    out = torch.full((37, width), torch.nan)
    RowNorm(x, out, width, 1e-3, *more[:affine])()
    own = x.double()
    want = (own - own.mean(1, keepdim=True)) / (own.var(1, keepdim=True, correction=0) + 1e-3).sqrt()
    want = want * more[0].double() if affine else want
    want = want + more[1].double() if affine == 2 else want
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_rows_that_lie_apart_are_refused():
    with pytest.raises(ValueError, match=r"expected contiguous float32 in rows of 8"):
        RowNorm(torch.zeros(4, 16)[:, :8], torch.zeros(4, 8), 8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("broadcast", range(8))
def test_a_choice_takes_each_number_where_its_condition_is_not_zero(width, broadcast):
    draw = torch.Generator().manual_seed(width)
    of = [torch.randn(37, 3, width + 2, generator=draw)[:, :, 1:-1] for _ in range(3)]
    of[0].masked_fill_(torch.rand(of[0].shape, generator=draw) < 0.5, 0)
    of[0][0, 0, 0], of[1][0, 0, 0], of[2][1] = torch.nan, torch.inf, torch.nan
    of = [t[:, :, :1].expand(t.shape) if broadcast >> i & 1 else t for i, t in enumerate(of)]
    out = torch.full((37, 3, width), -7.0)
    RowChoice(of, out)()
    torch.testing.assert_close(out, torch.where(of[0] != 0, of[1], of[2]), rtol=0, atol=0, equal_nan=True)


def test_a_choice_of_numbers_that_lie_apart_is_refused():
    x = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match="expected float32 of one shape"):
        RowChoice([x[:, :, ::2], x[:, :, :4], x[:, :, :4]], torch.empty(2, 3, 4))
