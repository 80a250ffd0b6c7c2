"""Attention over fields on a CPU, in C and without a compiler, against the float64 formula."""

import numpy as np
import pytest
import torch

from kernels.attention import field_attention_cpu
from kernels.attention.field_attention_cpu import CpuFieldAttention
from kernels.runtime.c_build import cpu_library
from tests.kernels.attention.test_field_attention import SHAPES, case, oracle

MORE = [(26, 16, 2, 16), (64, 64, 3, 32), (5, 1, 1, 17), (20, 64, 4, 1)]


@pytest.fixture(params=["c", "torch"])
def _both_ways(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(field_attention_cpu, "cpu_library", lambda: None)
    elif cpu_library() is None:
        pytest.skip("there is no C compiler")


pytestmark = pytest.mark.usefixtures("_both_ways")


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("fields", "dim", "heads", "size"), [*SHAPES, *MORE])
def test_a_layer_is_the_formula(fields, dim, heads, size, plain, rows):
    projections, x = case(fields, dim, heads, size, not plain, not plain, rows)
    layer = CpuFieldAttention(fields, heads, projections, -0.3, "identity" if plain else "relu")
    wide = torch.full((rows, fields * dim + 5), torch.nan)
    wide[:, 2:-3] = torch.from_numpy(x)
    want = oracle(x, fields, heads, projections, -0.3, not plain)
    np.testing.assert_allclose(layer(wide[:, 2:-3]).numpy(), want, rtol=0, atol=2e-5)


def test_large_logits_choose_and_a_row_that_is_no_number_is_alone():
    projections, x = case(17, 7, 3, 3, rows=6)
    layer = CpuFieldAttention(17, 3, projections, 1e4, "relu")
    want = layer(torch.from_numpy(x)).numpy()
    assert np.isfinite(want).all()
    np.testing.assert_allclose(want[:1], oracle_of_most(x[:1], projections), rtol=0, atol=2e-5)
    x[3, 5] = np.nan
    got = layer(torch.from_numpy(x)).numpy()
    assert np.isnan(got[3]).any()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))


def oracle_of_most(x, projections):
    """Logits so far apart that each field takes the value of one."""
    v = x.astype(np.float64).reshape(17, 7)
    q, k, values, rest = ((v @ w.double().numpy().T + b.double().numpy()).reshape(17, 3, 3) for w, b in projections)
    chosen = np.einsum("fhs,ghs->fhg", q, k).argmax(2)
    return np.maximum(np.stack([values[chosen[:, h], h] for h in range(3)], 1) + rest, 0).reshape(1, -1)


def test_x_of_another_width_is_refused():
    projections, x = case(3, 10, 2, 5)
    layer = CpuFieldAttention(3, 2, projections, 1.0, "relu")
    with pytest.raises(ValueError, match=r"field attention: got x \(3, 29\), expected 30 columns"):
        layer(torch.from_numpy(x)[:, :-1])
