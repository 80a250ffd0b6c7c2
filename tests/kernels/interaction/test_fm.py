"""The factorization machine: the kernel and its plain twin against all pairs in float64; a float32 sum is within 8 * eps *
sum|terms| of it.
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
@pytest.mark.parametrize("rows", [1, 7, 129])
@pytest.mark.parametrize(("fields", "dim"), [(1, 1), (2, 3), (39, 16), (26, 10), (5, 31), (4, 32), (3, 33), (13, 128)])
def test_fm_is_the_sum_of_all_pairwise_products(fields, dim, rows, device):
    rng = np.random.default_rng(fields * dim)
    offset = 5
    x = rng.standard_normal((rows, offset + fields * dim)).astype(np.float32)
    v = x[:, offset:].astype(np.float64).reshape(rows, fields, dim)
    want = sum((v[:, i] * v[:, j]).sum(1) for i in range(fields) for j in range(i))
    terms = (np.abs(v).sum(1) ** 2 + (v**2).sum(1)).sum(1)
    if device == "cpu":
        got = reference.fm(padded_rows(x, device, pad=0), offset, fields, dim)
    else:
        from kernels.interaction.fm import fm

        got = torch.full((rows, 1), torch.nan, device=device)
        fm(lane_state(rows, device), padded_rows(x, device, pad=3), rows, offset, fields, dim, got)
    assert (np.abs(got.cpu().numpy()[:, 0] - want) <= 8 * EPS * terms).all()
