"""Folding keeps what torch's own layers compute, in evaluation, to float32 rounding of float64 results."""

import pytest
import torch

from dpiframe_core.batch_norm import BatchNorm, fold_after, fold_before

EPS32 = torch.finfo(torch.float32).eps


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


def check(got, want, terms):
    assert got[0].dtype == got[1].dtype == torch.float32
    assert ((want - terms[0]).abs() <= 8 * EPS32 * terms[1]).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
@pytest.mark.parametrize("before", [True, False])
def test_a_folded_layer_equals_the_two_it_came_from(before, eps, affine, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(13, 7, bias=bias).double()
    norm, own = random_norm(13 if before else 7, affine, eps)
    x = torch.randn(50, 13, dtype=torch.float64)
    with torch.no_grad():
        want = linear(norm(x)) if before else norm(linear(x))
        parts = (own, linear.weight, linear.bias) if before else (linear.weight, linear.bias, own)
        weight, shift = (fold_before if before else fold_after)(*parts)
        terms = x.abs() @ weight.double().abs().t() + shift.double().abs()
        check((weight, shift), want, (x @ weight.double().t() + shift.double(), terms))


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
    with pytest.raises(ValueError, match=r"batch norm: got \(5,\) means, expected 13, as many as the layer's input"):
        fold_before(own, torch.zeros(7, 13), None)
