"""Attention over fields: the kernel (on a GPU, and its code on the host) and its plain twin against the float64 formula."""

import numpy as np
import pytest
import torch

from dpiframe_core.fusion import field_attention as in_graphs
from kernels import reference
from kernels.attention import field_attention
from tests.backends import BACKENDS
from tests.kernels.host_cuda import put_under
from tests.kernels.lane_state import lane_state

SHAPES = [  # fields, dim, heads, size
    (1, 4, 1, 4),
    (3, 10, 2, 5),
    (16, 16, 2, 16),
    (17, 7, 3, 3),
    (39, 16, 2, 16),
    (39, 32, 2, 16),
    (64, 40, 1, 32),
]


def case(fields, dim, heads, size, residual=True, bias=True, rows=3):
    rng = np.random.default_rng(fields * dim + heads)
    projections = [
        (
            torch.from_numpy((rng.standard_normal((heads * size, dim)) * dim**-0.5).astype(np.float32)),
            torch.from_numpy(rng.standard_normal(heads * size).astype(np.float32)) if bias else None,
        )
        for _ in range(3 + residual)
    ]
    return projections, rng.standard_normal((rows, fields * dim)).astype(np.float32)


def oracle(x, fields, heads, projections, scale, relu):
    """Term by term in float64."""
    v = x.astype(np.float64).reshape(len(x), fields, -1)
    q, k, values, *rest = (v @ w.double().numpy().T + (0 if b is None else b.double().numpy()) for w, b in projections)
    size = q.shape[2] // heads
    out = np.zeros_like(q)
    for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        for b in range(len(x)):
            for f in range(fields):
                weights = np.exp(scale * np.array([q[b, f, own] @ k[b, g, own] for g in range(fields)]))
                out[b, f, own] = sum(weights[g] / weights.sum() * values[b, g, own] for g in range(fields))
    out += rest[0] if rest else 0
    return (np.maximum(out, 0) if relu else out).reshape(len(x), -1)


def run(x, fields, heads, projections, scale, activation, device, precision="fp32", dtype=torch.float32):
    layer = field_attention.FieldAttention(
        fields, heads, projections, scale, activation, dtype, precision, torch.device(device)
    )
    rows = len(x)
    wide = torch.full((rows + 2, -(-x.shape[1] // 8) * 8 + 8), torch.nan, dtype=dtype, device=device)
    wide[:rows, : x.shape[1]] = torch.from_numpy(x)
    out = torch.full((rows + 2, fields * len(projections[0][0]) + 3), torch.nan, dtype=dtype, device=device)
    layer(lane_state(rows, device), wide, rows + 2, out)
    assert torch.isnan(out[rows:]).all(), "rows of padding are not written"
    assert torch.isnan(out[:, -3:]).all()
    return out[:rows, :-3].float().cpu().numpy()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("fields", "dim", "heads", "size"), SHAPES)
def test_the_plain_twin_is_the_formula(fields, dim, heads, size, residual):
    projections, x = case(fields, dim, heads, size, residual)
    got = reference.field_attention(torch.from_numpy(x), fields, heads, projections, 0.3, "relu").numpy()
    np.testing.assert_allclose(got, oracle(x, fields, heads, projections, 0.3, True), rtol=0, atol=2e-5)


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("fields", "dim", "heads", "size"), SHAPES)
@pytest.mark.parametrize(
    ("precision", "dtype", "digits"), [("fp32", torch.float32, 20), ("tf32", torch.float32, 10), ("bf16", torch.bfloat16, 7)]
)
def test_a_layer_is_the_formula_to_the_digits_of_its_precision(
    fields, dim, heads, size, precision, dtype, digits, device, monkeypatch, run_folder
):
    if device == "host":
        put_under(monkeypatch, field_attention, run_folder)
    plain = fields % 3 == 0  # neither residual nor biases nor activation
    projections, x = case(fields, dim, heads, size, not plain, not plain)
    x = torch.from_numpy(x).to(dtype).float().numpy()
    rounded = [(w.to(dtype).float(), b) for w, b in projections]
    want = oracle(x, fields, heads, rounded, 0.3, not plain)
    activation = "identity" if plain else "relu"
    got = run(x, fields, heads, projections, 0.3, activation, device if device != "host" else "cpu", precision, dtype)
    # A softmax weight is off by as much as its logit: some 10 numbers of magnitude 2.
    assert np.abs(got - want).max() <= 24 * 2.0**-digits


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_many_rows_are_each_their_own_and_the_same_again(rows):
    projections, x = case(39, 16, 2, 16, rows=rows)
    args = x, 39, 2, projections, 0.3, "relu", "cuda:0", "bf16", torch.bfloat16
    first = run(*args)
    assert (run(*args) == first).all()
    some = [0, rows // 2, rows - 1]
    assert (run(x[some], *args[1:]) == first[some]).all()


def test_the_search_in_graphs_looks_for_what_the_kernel_takes():
    own = field_attention.MOST_FIELDS, field_attention.MOST_DIM, field_attention.MOST_SIZE
    assert own == (in_graphs.MOST_FIELDS, in_graphs.MOST_DIM, in_graphs.MOST_SIZE)


@pytest.mark.parametrize("device", BACKENDS)
def test_more_than_a_warp_takes_is_refused(device):
    projections, _ = case(3, 4, 1, 40)
    with pytest.raises(ValueError, match="got 3 fields of dim 4 and heads of 40, expected at most 64, 64 and 32"):
        field_attention.FieldAttention(3, 1, projections, 1.0, "relu", torch.float32, "fp32", torch.device(device))
