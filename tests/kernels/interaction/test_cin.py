"""The compressed interaction network: kernel and plain twin against the float64 formula, term by term."""

import numpy as np
import pytest
import torch

from kernels import reference
from tests import model_oracle
from tests.backends import BACKENDS
from tests.kernels.lane_state import lane_state

EPS = np.finfo(np.float32).eps
SHAPES = [
    (1, 1, (1,), False),
    (3, 4, (5,), False),
    (7, 10, (6, 4, 3), True),
    (8, 16, (16, 16), False),
    (39, 16, (20, 64), True),
    (13, 3, (10, 130), True),
    (9, 40, (70, 8), False),
    (5, 129, (2, 3), False),
]


def case(fields, dim, units, halves, bias, rows):
    rng = np.random.default_rng(fields * dim)
    layers, p, before = [], {}, fields
    for k, n in enumerate(units):
        weight = (rng.standard_normal((n, before * fields)) / np.sqrt(before * fields)).astype(np.float32)
        b = rng.standard_normal(n).astype(np.float32)
        layers.append((torch.from_numpy(weight), torch.from_numpy(b) if bias else None))
        p |= {f"cin.{k}.weight": weight.astype(np.float64), f"cin.{k}.bias": b.astype(np.float64)}
        before = n // 2 if halves else n
    return layers, p, rng.standard_normal((rows, fields * dim)).astype(np.float32)


def run(x, fields, dim, layers, activation, halves, device, precision="fp32", warps=None, slope=0.0, dtype=torch.float32):
    if device == "cpu":
        return reference.cin(torch.from_numpy(x), fields, dim, layers, activation, slope, halves).numpy()
    from kernels.interaction.cin import Cin

    cin = Cin(fields, dim, layers, activation, slope, halves, dtype, precision, torch.device(device))
    if warps:
        cin._row_warps = lambda rows, blocks: warps
    rows = len(x)
    wide = torch.full((rows, x.shape[1] + 3), torch.nan, device=device, dtype=dtype)
    wide[:, :-3] = torch.from_numpy(x)
    width = sum(n if not halves or k == len(layers) - 1 else n - n // 2 for k, n in enumerate(len(w) for w, _ in layers))
    maps = [torch.full((rows + 1, cin.scratch_columns), torch.nan, device=device) for _ in range(2)]
    out = torch.full((rows + 1, width + 1), torch.nan, device=device, dtype=dtype)
    state = lane_state(rows, device)
    cin(state, wide, rows, (maps[0], maps[1]), out)
    assert torch.isnan(out[rows:]).all()
    assert torch.isnan(out[:, -1]).all()
    return out[:rows, :-1].float().cpu().numpy()


def magnitude(x, p, units, halves, fields, dim, bias):
    """What all terms add up to without their signs."""
    return model_oracle.cin(
        np.abs(x).reshape(-1, fields, dim), {k: np.abs(v) for k, v in p.items()}, units, "identity", halves, bias
    )


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["identity", "relu"])
@pytest.mark.parametrize("rows", [1, 2, 19])
@pytest.mark.parametrize(("fields", "dim", "units", "halves"), SHAPES)
def test_maps_are_weighted_sums_of_all_products_of_fields(fields, dim, units, halves, rows, activation, bias, device):
    layers, p, x = case(fields, dim, units, halves, bias, rows)
    x64 = x.astype(np.float64).reshape(rows, fields, dim)
    want = model_oracle.cin(x64, p, units, activation, halves, bias)
    got = run(x, fields, dim, layers, activation, halves, device)
    assert (np.abs(got - want) <= 8 * EPS * magnitude(x64, p, units, halves, fields, dim, bias)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [8, 4, 2, 1])
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_every_cut_of_a_layer_into_warps_gives_the_same_maps(rows, warps):
    layers, p, x = case(39, 16, (40, 12), True, True, rows)
    x64 = x.astype(np.float64).reshape(rows, 39, 16)
    want = model_oracle.cin(x64, p, (40, 12), "relu", True)
    got = run(x, 39, 16, layers, "relu", True, "cuda:0", warps=warps)
    assert (np.abs(got - want) <= 8 * EPS * magnitude(x64, p, (40, 12), True, 39, 16, True)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("tf32", torch.float32), ("bf16", torch.bfloat16)])
def test_lower_precisions_lose_no_more_than_their_digits(precision, dtype):
    layers, p, x = case(39, 16, (40, 12), True, True, 100)
    x = torch.from_numpy(x).to(dtype).float().numpy()
    x64 = x.astype(np.float64).reshape(-1, 39, 16)
    want = model_oracle.cin(x64, p, (40, 12), "identity", True)
    got = run(x, 39, 16, layers, "identity", True, "cuda:0", precision=precision, dtype=dtype)
    # Both factors of a product, in each of two layers, have 11 digits; a bf16 result has 8.
    bound = 4 * 2.0**-11 * magnitude(x64, p, (40, 12), True, 39, 16, True) + (
        2.0**-8 * np.abs(want) if dtype != torch.float32 else 0
    )
    assert (np.abs(got - want) <= bound).all()


@pytest.mark.gpu
def test_more_columns_than_a_block_takes_are_refused():
    from kernels.interaction.cin import Cin

    with pytest.raises(ValueError, match="cin: got 3 fields of dim 300, expected at most 80 and 256"):
        Cin(3, 300, [(torch.zeros(1, 9), None)], "identity", 0.0, False, torch.float32, "fp32", torch.device("cuda", 0))
