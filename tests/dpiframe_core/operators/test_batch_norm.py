"""Folding keeps what torch's own layers compute, in evaluation, to float64 rounding."""

import pytest
import torch

from dpiframe_core.operators.batch_norm import BatchNorm, fold_after

EPS64 = torch.finfo(torch.float64).eps


def random_norm(width, affine, eps):
    layer = torch.nn.BatchNorm1d(width, eps=eps, affine=affine).double().eval()
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.01, 9)
        layer.running_var[0] = 0  # a unit that never moved: its eps alone is left
        if affine:
            layer.weight.normal_()
            layer.bias.normal_()
    own = BatchNorm(layer.running_mean, layer.running_var, eps, layer.weight, layer.bias)
    return layer, own


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_a_folded_layer_equals_the_two_it_came_from(eps, affine, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(13, 7, bias=bias).double()
    norm, own = random_norm(7, affine, eps)
    x = torch.randn(50, 13, dtype=torch.float64)
    with torch.no_grad():
        weight, shift = fold_after(linear.weight, linear.bias, own)
        assert weight.dtype == shift.dtype == torch.float64
        terms = x.abs() @ weight.abs().t() + shift.abs()
        assert ((norm(linear(x)) - x @ weight.t() - shift).abs() <= 32 * EPS64 * terms).all()


def test_the_scale_and_shift_of_a_dice_gate_are_its_batch_norm():
    torch.manual_seed(1)
    norm, own = random_norm(9, False, 1e-9)
    x = torch.randn(20, 9, dtype=torch.float64)
    scale, shift = own.scale_and_shift()
    torch.testing.assert_close(x * scale + shift, norm(x), rtol=1e-9, atol=1e-9)


def test_a_batch_norm_of_another_width_is_refused():
    _, own = random_norm(5, True, 1e-5)
    with pytest.raises(ValueError, match=r"batch norm: got \(5,\) means, expected 7, as many as the layer's output"):
        fold_after(torch.zeros(7, 13), None, own)
