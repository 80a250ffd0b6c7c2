"""Cross networks, and the mixture of experts of some: each kernel and its plain twin against float64 formulas."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu import dense
from tests.backends import BACKENDS
from tests.kernels.lane_state import lane_state
from tests.kernels.operands import padded_rows

EPS = np.finfo(np.float32).eps


def float64_cross(x, w, b):
    xl = x = x.astype(np.float64)
    for wi, bi in zip(w.astype(np.float64), b.astype(np.float64), strict=True):
        xl = x * (xl @ wi)[:, None] + bi + xl
    return xl


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("layers", [1, 2, 6, 32])
@pytest.mark.parametrize("width", [1, 31, 624])
def test_all_dcn_layers_at_once_equal_the_layers_one_by_one(width, layers, device):
    rng = np.random.default_rng(layers)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((19, width), (layers, width), (layers, width)))
    w /= 4 * width**0.5
    want = float64_cross(x, w, b)
    bound = 64 * EPS * np.abs(want).max()
    if device == "cpu":
        got = dense.CrossV1(torch.from_numpy(w), torch.from_numpy(b), None)(torch.from_numpy(x))
    else:
        from kernels.interaction.cross import CrossV1

        got = torch.full((19, width), torch.nan, device=device)
        cross = CrossV1(torch.from_numpy(w), torch.from_numpy(b), None, torch.float32, torch.device(device))
        cross(lane_state(19, device), padded_rows(x, device, pad=1), 19, got)
    # The recurrence multiplies rounding errors, so the bound is relative to the largest intermediate value.
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=0, atol=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("tasks", [1, 3])
def test_the_folded_dcn_head_equals_the_cross_output_times_the_head(tasks):
    from kernels.interaction.cross import CrossV1

    rng = np.random.default_rng(tasks)
    shapes = ((33, 100), (4, 100), (4, 100), (tasks, 100))
    x, w, b, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    w /= 40
    want = float64_cross(x, w, b) @ v.astype(np.float64).T
    got = torch.full((33, tasks), torch.nan, device="cuda")
    cross = CrossV1(*map(torch.from_numpy, (w, b, v)), torch.float32, torch.device("cuda", 0))
    cross(lane_state(33, "cuda"), padded_rows(x, "cuda", pad=0), 33, got)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=0, atol=64 * EPS * np.abs(want).max())


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(("experts", "rank", "pad"), [(1, 8, 1), (1, 8, 4), (4, 3, 1), (4, 64, 4), (7, 33, 1)])
@pytest.mark.parametrize("rows", [1, 19])
def test_a_mixture_weighs_each_expert_by_the_softmax_of_its_gate(rows, experts, rank, pad, device):
    rng = np.random.default_rng(experts)
    x, gates = rng.standard_normal((rows, experts * rank)).astype(np.float32), 3 * rng.standard_normal((rows, experts))
    gates = gates.astype(np.float32)
    e = np.exp(gates.astype(np.float64))
    want = x * np.repeat(e / e.sum(1, keepdims=True), rank, 1)
    if device == "cpu":
        got = reference.mixture(torch.from_numpy(x), torch.from_numpy(gates))
    else:
        from kernels.interaction.cross import mixture

        room = torch.full((rows, experts * rank + pad), torch.nan, device=device)
        got, given = room[:, :-pad], (padded_rows(x, device, pad), padded_rows(gates, device))
        mixture(lane_state(rows, device), *given, rows, experts, rank, got)
        assert room[:, -pad:].isnan().all(), "columns of others"
    assert (np.abs(got.cpu().numpy() - want) <= 16 * EPS * np.abs(want)).all()  # two exponentials, a sum and a quotient
