"""Tables to int8 and back, against the formula in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.embedding.quantize import largest_error, quantize

MAGNITUDES = st.floats(1e-30, 1e30)


def values(stored, scale):
    return stored.double().numpy() * scale.double().numpy()


@given(st.integers(1, 40), st.lists(MAGNITUDES, min_size=1, max_size=9), st.integers(0, 2**32 - 1))
def test_every_value_comes_back_within_half_of_its_columns_scale(rows, magnitudes, seed):
    weight = torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, len(magnitudes))) * magnitudes).astype("f4"))
    stored, scale = quantize(weight)
    assert (stored.dtype, stored.shape, scale.dtype, scale.shape) == (torch.int8, weight.shape, torch.float32, weight.shape[1:])
    assert (stored.amin(0) >= -127).all()
    assert (stored.abs().amax(0) == 127).all(), "each column uses the whole range"
    np.testing.assert_allclose(scale.double().numpy(), weight.double().abs().amax(0).numpy() / 127, rtol=1e-6)
    off = np.abs(values(stored, scale) - weight.double().numpy())
    assert (off <= scale.double().numpy() * 0.50001).all()
    assert largest_error(weight, stored, scale) == pytest.approx(off.max(), abs=1e-6 * float(weight.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tables_are_taken_as_their_values(dtype):
    weight = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for got, want in zip(quantize(weight), quantize(weight.float()), strict=True):
        assert torch.equal(got, want)


def test_columns_of_zeros_and_of_next_to_nothing_have_a_usable_scale():
    weight = torch.zeros(3, 3)
    weight[1, 1], weight[2, 2] = -1e-45, 1e-38
    stored, scale = quantize(weight)
    assert (scale >= torch.finfo(torch.float32).tiny).all()
    assert np.abs(values(stored, scale) - weight.double().numpy()).max() <= torch.finfo(torch.float32).tiny


def test_a_table_of_many_parts_is_quantised_as_a_whole():
    weight = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(1))
    weight[150_000, 0] = 50
    before = weight.clone()
    stored, scale = quantize(weight)
    np.testing.assert_allclose(scale.numpy(), weight.abs().amax(0).numpy() / 127, rtol=1e-6)
    assert np.abs(values(stored, scale) - weight.double().numpy()).max() <= 0.50001 * float(scale.max())
    assert torch.equal(weight, before)
    weight[199_999, 1] += 3
    assert largest_error(weight, stored, scale) == pytest.approx(3, abs=0.02)


def test_quantising_what_was_quantised_changes_nothing():
    stored, scale = quantize(torch.randn(64, 5, generator=torch.Generator().manual_seed(2)))
    again, scale_again = quantize(stored.float() * scale)
    assert torch.equal(again, stored)
    torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0)
