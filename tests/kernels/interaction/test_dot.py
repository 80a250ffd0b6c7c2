"""Pairwise dots and mixtures: each kernel and its plain twin against float64 formulas; a float32 sum is within
8 * eps * sum|terms| of the float64 one.
"""

import numpy as np
import pytest
import torch

from kernels import reference
from tests.backends import BACKENDS

EPS = np.finfo(np.float32).eps


def state(rows, device):
    return torch.tensor([rows, 0, 0, 7], dtype=torch.int32, device=device)


def padded(array, device):
    """float32 on the device, in rows with a column of NaN behind them that nothing may read."""
    wide = torch.full((array.shape[0], array.shape[1] + 1), torch.nan, device=device)
    wide[:, :-1] = torch.from_numpy(array)
    return wide


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 129])
@pytest.mark.parametrize(
    ("fields", "dim", "keep"),
    [(1, 5, 5), (2, 1, 0), (3, 3, 3), (5, 10, 7), (8, 4, 4), (9, 31, 31), (27, 128, 128), (40, 16, 0)],
)
def test_dots_are_all_pairs_below_the_diagonal_row_by_row(fields, dim, keep, rows, diagonal, device):
    if fields == 1 and not diagonal:
        pytest.skip("one vector has no pairs")
    rng = np.random.default_rng(fields * dim)
    x = rng.standard_normal((rows, fields * dim)).astype(np.float32)
    v = x.astype(np.float64).reshape(rows, fields, dim)
    pairs = [(i, j) for i in range(fields) for j in range(i + 1 if diagonal else i)]
    want = np.stack([(v[:, i] * v[:, j]).sum(1) for i, j in pairs], 1)
    terms = np.stack([np.abs(v[:, i] * v[:, j]).sum(1) for i, j in pairs], 1)
    if device == "cpu":
        got = reference.dot(torch.from_numpy(x), fields, dim, keep, diagonal)
    else:
        from kernels.interaction.dot import Dot

        out = torch.full((rows + 2, keep + len(pairs) + 1), torch.nan, device=device)
        split = dim if fields > 1 else fields * dim
        parts = [(padded(part, device), part.shape[1]) for part in (x[:, :split], x[:, split:]) if part.shape[1]]
        Dot(fields, dim, keep, diagonal, torch.float32, torch.device(device))(state(rows, device), parts, rows, out)
        assert torch.isnan(out[rows:]).all()
        assert torch.isnan(out[:, -1]).all()
        got = out[:rows, :-1].cpu()
    assert np.array_equal(got[:, :keep].numpy(), x[:, :keep])
    assert (np.abs(got[:, keep:].numpy() - want) <= 8 * EPS * terms).all()


@pytest.mark.gpu
def test_dots_of_parts_that_do_not_add_up_are_refused():
    from kernels.interaction.dot import Dot

    dot = Dot(3, 4, 0, False, torch.float32, torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"dot: got parts of widths \[4, 4\], expected one or two of 12 columns together"):
        dot(state(1, "cuda"), [(torch.zeros(1, 4, device="cuda"), 4)] * 2, 1, torch.zeros(1, 3, device="cuda"))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(("experts", "rank"), [(1, 8), (4, 3), (7, 33)])
@pytest.mark.parametrize("rows", [1, 19])
def test_a_mixture_weighs_each_expert_by_the_softmax_of_its_gate(rows, experts, rank, device):
    rng = np.random.default_rng(experts)
    x, gates = rng.standard_normal((rows, experts * rank)).astype(np.float32), 3 * rng.standard_normal((rows, experts))
    gates = gates.astype(np.float32)
    e = np.exp(gates.astype(np.float64))
    want = x * np.repeat(e / e.sum(1, keepdims=True), rank, 1)
    if device == "cpu":
        got = reference.mixture(torch.from_numpy(x), torch.from_numpy(gates))
    else:
        from kernels.interaction.interaction import mixture

        got = torch.full((rows, experts * rank), torch.nan, device=device)
        mixture(state(rows, device), padded(x, device), padded(gates, device), rows, experts, rank, got)
    assert (np.abs(got.cpu().numpy() - want) <= 16 * EPS * np.abs(want)).all()  # two exponentials, a sum and a quotient
