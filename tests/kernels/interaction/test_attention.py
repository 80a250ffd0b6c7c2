"""Target attention: kernel and plain twin against the float64 formula of [q, k, q - k, q * k], one key at a time."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from dpiframe_core.graph.architecture import LeakyReLU, TargetAttention
from kernels import reference
from tests import model_oracle
from tests.backends import BACKENDS
from tests.kernels.lane_state import lane_state

KINDS = ["relu", "sigmoid", "tanh", "prelu", "dice", "gelu", LeakyReLU(slope=0.2)]


def unit(units, activation="dice", **options):
    return TargetAttention(targets=("a",), sequences=("b",), hidden_units=units, activation=activation, **options)


def case(own, dim, length, rows, seed=0):
    """Parameters, q[B, d], keys[B, L, d] and mask[B, L]: the first row's empty, the last one's full; padded keys are zero."""
    rng = np.random.default_rng(seed + dim + length)
    p, before = {}, 4 * dim
    for i, n in enumerate((*own.hidden_units, 1)):
        name = f"u.{i}" if i < len(own.hidden_units) else "u.out"
        p[f"{name}.weight"] = rng.standard_normal((n, before)) / np.sqrt(before)
        p |= {f"{name}.{key}": 0.3 * rng.standard_normal(n) for key in ("bias", "alpha", "scale", "shift")}
        before = n
    p = {name: value.astype(np.float32) for name, value in p.items()}
    q, keys = rng.standard_normal((rows, dim)).astype(np.float32), rng.standard_normal((rows, length, dim)).astype(np.float32)
    mask = (np.arange(length) < rng.integers(0, length + 1, (rows, 1))).astype(np.float32)
    mask[0], mask[-1] = 0, 1
    return p, q, keys * mask[:, :, None] if own.masked else keys, mask


def weights_of(own, p):
    kind, slope = (
        (own.activation.type, own.activation.slope) if isinstance(own.activation, LeakyReLU) else (own.activation, 0.0)
    )
    names = {"prelu": ("alpha",), "dice": ("alpha", "scale", "shift")}.get(kind, ())
    t = {name: torch.from_numpy(value) for name, value in p.items()}
    layers = [
        (t[f"u.{i}.weight"], t[f"u.{i}.bias"], [t[f"u.{i}.{n}"] for n in names]) for i in range(len(own.hidden_units))
    ]  # fmt: skip
    return layers, (t["u.out.weight"], t["u.out.bias"]), kind, slope, own.output_activation, own.softmax


def run(own, p, q, keys, mask, device, parts=1, dtype=torch.float32):
    how = weights_of(own, p)
    rows, length, dim = keys.shape
    if device == "cpu":
        t = [torch.from_numpy(a) for a in (q, keys, mask)]
        return reference.attention(t[0], t[1], t[2] if own.masked else None, *how).numpy()
    from kernels.interaction.attention import Attention, AttentionColumns

    ends = np.linspace(0, dim, parts + 1).astype(int).tolist()  # uneven parts, in x in reverse order
    x, queries, spans, at = [], [], [], 2
    for array, first, width in ((q, queries, 1), (keys, spans, length)):
        for start, end in list(pairwise(ends))[::-1]:
            x.append(array[..., start:end].reshape(rows, -1))
            first.insert(0, at)
            at += (end - start) * width
    dims = tuple(b - a for a, b in pairwise(ends))
    columns = AttentionColumns(
        length, dims, tuple(queries), tuple(spans), tuple(2 + a for a in ends[:-1]), at if own.masked else -1,
        ((0, 0, 2), (2, 2 + dim, dim)),
    )  # fmt: skip
    marks = np.tile(np.float32([3, 4]), (rows, 1))
    joined = np.concatenate([marks, *x, mask, np.full((rows, 1), np.nan, np.float32)], 1)
    attention = Attention(columns, *how, dtype, torch.device(device))
    out = torch.full((rows + 1, 2 + 2 * dim + 1), torch.nan, device=device, dtype=dtype)
    state = lane_state(rows, device)
    attention(state, torch.from_numpy(joined).to(device, dtype), rows, out)
    assert torch.isnan(out[rows:]).all()
    assert torch.isnan(out[:, -1]).all()
    got = out[:rows].float().cpu().numpy()
    assert np.array_equal(got[:, :2], marks)
    if dtype == torch.float32:
        assert np.array_equal(got[:, 2 + dim : 2 + 2 * dim], joined[:, 2 : 2 + dim])
    return got[:, 2 : 2 + dim]


def check(own, dim, length, rows, device, **options):
    p, q, keys, mask = case(own, dim, length, rows)
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    got = run(own, p, q, keys, mask, device, **options)
    # A weight is off by a few roundings of sums whose terms are near 1; the interest sums as many as there are keys.
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(1.0, float(np.abs(keys).sum(1).max()) / 4))


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dim", "length"), [(1, 1), (3, 2), (10, 5), (16, 17), (40, 50), (130, 4), (8, 201)])
def test_the_interest_is_the_sum_of_weighted_keys(dim, length, masked, softmax, device):
    check(unit((9, 5), softmax=softmax, masked=masked), dim, length, 5, device)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("output", ["identity", "sigmoid", "relu"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_activation_of_the_layers_and_of_the_weight(kind, output, device):
    check(unit((16, 7), kind, output_activation=output), 12, 9, 7, device)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("units", [(1,), (33,), (80, 40), (36, 20, 10, 3)])
def test_any_number_and_width_of_layers(units, device):
    check(unit(units), 16, 11, 6, device)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 3])
def test_a_key_of_several_parts_is_put_together(parts):
    check(unit((9, 5)), 13, 6, 4, "cuda:0", parts=parts)


@pytest.mark.gpu
def test_a_row_that_shared_memory_cannot_hold_is_read_from_the_cache():
    check(unit((200,)), 400, 3, 3, "cuda:0")


@pytest.mark.gpu
def test_bfloat16_rows_are_summed_in_float32():
    own = unit((16, 8), "relu", softmax=True)
    p, q, keys, mask = case(own, 16, 40, 9)
    q, keys = (torch.from_numpy(a).bfloat16().float().numpy() for a in (q, keys))
    p64 = {name: value.astype(np.float64) for name, value in p.items()}
    want = model_oracle.attention(q.astype(np.float64), keys.astype(np.float64), mask, p64, "u", own)
    got = run(own, p, q, keys, mask, "cuda:0", dtype=torch.bfloat16)
    np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=1e-5)  # one rounding to 8 digits, at the end


def test_the_first_layer_is_split_without_loss():
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((5, 12)))
    q, k = (torch.from_numpy(rng.standard_normal(3)) for _ in range(2))
    of_query, of_key, of_product = reference.split_attention(weight)
    whole = weight @ torch.cat([q, k, q - k, q * k])
    torch.testing.assert_close(of_query @ q + of_key @ k + of_product @ (q * k), whole, rtol=1e-12, atol=1e-12)
