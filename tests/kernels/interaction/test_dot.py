"""Pairwise dots: the kernel and its plain twin against float64 formulas; a float32 sum is within 8 * eps * sum|terms| of the
float64 one.
"""

import numpy as np
import pytest
import torch

from kernels import reference
from tests.backends import BACKENDS
from tests.kernels.lane_state import lane_state
from tests.kernels.operands import padded_rows

EPS = np.finfo(np.float32).eps


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
        parts = [(padded_rows(part, device), part.shape[1]) for part in (x[:, :split], x[:, split:]) if part.shape[1]]
        Dot(fields, dim, keep, diagonal, torch.float32, torch.device(device))(lane_state(rows, device), parts, rows, out)
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
        dot(lane_state(1, "cuda"), [(torch.zeros(1, 4, device="cuda"), 4)] * 2, 1, torch.zeros(1, 3, device="cuda"))
