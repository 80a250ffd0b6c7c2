"""A tower against float64: its MLP, and the dots of its output and other vectors; on the emulator and on a GPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.interaction import tower as tower_module
from kernels.interaction.pairs import Pairs
from kernels.interaction.tower import Tower, TowerLayer, takes
from tests.kernels.host_cuda import put_under
from tests.kernels.lane_state import lane_state

DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16}
ROUNDING = {"tf32": 2.0**-10, "bf16": 2.0**-8}  # of a factor that is cut, and of a value that is stored
DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {
    "one layer": ((5, 16), Pairs(3, 16, 16, False)),
    "kaggle": ((13, 512, 256, 64), Pairs(27, 64, 64, False)),
    "four layers": ((13, 200, 70, 40, 128), Pairs(9, 128, 1, False)),
    "two layers with a diagonal": ((17, 100, 8), Pairs(5, 8, 8, True)),
    "two vectors": ((1, 33, 16), Pairs(2, 16, 0, False)),
    "more than 32 fields": ((13, 64, 16), Pairs(41, 16, 16, False)),
}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch, run_folder):
    if request.param == "cuda":
        return "cuda:0"
    put_under(monkeypatch, tower_module, run_folder)
    return "cpu"


def matrix(values, dtype, device, rows, first=0):
    """In columns of a wider one, rows aligned, its other columns NaN, pads 0 (which meet zero weights)."""
    width = -(-values.shape[1] // 8) * 8
    wide = torch.full((rows, first + width + 8), torch.nan, dtype=dtype, device=device)
    own = wide[:, first : first + width]
    own[:] = 0
    own[: len(values), : values.shape[1]] = torch.from_numpy(values).to(device, dtype)
    return own


def drawn(shape, precision, rows, seed):
    widths, pairs = shape
    rng = np.random.default_rng(seed)
    activations = (["relu", "identity", "sigmoid", "gelu"] * 2)[seed % 2 :]
    layers = [
        TowerLayer(
            torch.from_numpy(rng.standard_normal((n, k)) / np.sqrt(k)).float(),
            torch.from_numpy(rng.standard_normal(n) / 3).float() if i != 1 else None,
            activations[i],
        )
        for i, (k, n) in enumerate(pairwise(widths))
    ]
    x = rng.standard_normal((rows, widths[0]))
    vectors = rng.standard_normal((rows, (pairs.fields - 1) * pairs.dim))
    return layers, x, vectors


def rounded(values, precision):
    """As they lie in memory."""
    return torch.from_numpy(np.asarray(values)).to(DTYPES[precision]).double().numpy()


def activate(v, kind):
    t = torch.from_numpy(v)
    plain = {"relu": torch.relu, "identity": lambda z: z, "sigmoid": torch.sigmoid, "gelu": torch.nn.functional.gelu}
    return plain[kind](t).numpy()


def oracle(layers, x, vectors, pairs, precision):
    """float64 of rounded weights, and how far a value may be off: each layer's rounding, through the weights behind it."""
    h, off = rounded(x, precision), np.zeros_like(x)
    eps = ROUNDING[precision]
    for layer in layers:
        w = rounded(layer.weight, precision)
        z = h @ w.T + (0 if layer.bias is None else layer.bias.double().numpy())
        off = (off + eps * np.abs(h)) @ np.abs(w).T + eps * np.abs(h) @ np.abs(w).T
        h = activate(z, layer.activation)
        off = 1.2 * off + eps * np.abs(h)
    v = np.concatenate([h, rounded(vectors, precision)], 1).reshape(len(x), pairs.fields, pairs.dim)
    d = np.concatenate([off, np.zeros((len(x), vectors.shape[1]))], 1).reshape(v.shape) + eps * np.abs(v)
    ij = [(i, j) for i in range(pairs.fields) for j in range(i + 1 if pairs.diagonal else i)]
    want = np.stack([(v[:, i] * v[:, j]).sum(1) for i, j in ij], 1)
    bound = np.stack([(d[:, i] * np.abs(v[:, j]) + np.abs(v[:, i]) * d[:, j] + d[:, i] * d[:, j]).sum(1) for i, j in ij], 1)
    want, bound = np.concatenate([h[:, : pairs.keep], want], 1), np.concatenate([off[:, : pairs.keep], bound], 1)
    return want, bound + eps * np.abs(want)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("rows", [1, 19, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tower_is_its_layers_and_the_dots_behind_them(name, rows, precision, device):
    if device == "cpu" and (rows == 40) == (name in ("kaggle", "four layers")):
        pytest.skip("the emulator takes seconds for it")
    shape = SHAPES[name]
    pairs = shape[1]
    bucket, dtype = rows + 5, DTYPES[precision]
    layers, x, vectors = drawn(shape, precision, rows, len(name) + rows)
    want, bound = oracle(layers, x, vectors, pairs, precision)
    on_device = [TowerLayer(o.weight, o.bias, o.activation) for o in layers]
    kernel = Tower(on_device, pairs, precision, torch.device(device))
    given = matrix(x, dtype, device, bucket, 8), matrix(vectors, dtype, device, bucket, 16)
    outs = []
    for _ in range(2):
        wide = torch.full((bucket, -(-want.shape[1] // 8) * 8 + 16), torch.nan, dtype=dtype, device=device)
        kernel(lane_state(rows, device), *given, bucket, wide[:, 8:-8])
        if device != "cpu":
            torch.cuda.synchronize()
        outs.append(wide.cpu().float().numpy())
    assert np.array_equal(*outs, equal_nan=True)
    (got, _), columns = outs, want.shape[1]
    assert np.isnan(got[rows:]).all()
    assert np.isnan(got[:, :8]).all()
    assert np.isnan(got[:, -8:]).all()
    assert (np.nan_to_num(got[:rows, 8 + columns : -8]) == 0).all()  # NaN where a pad of 16 bytes ends before it
    assert (np.abs(got[:rows, 8 : 8 + columns] - want) <= bound).all()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_row_of_infinities_leaves_the_rows_beside_and_after_it_alone(precision, device):
    shape = ((13, 40, 70, 16), Pairs(5, 16, 16, False))
    rows = 19 if device == "cpu" else 16 * 300
    layers, x, vectors = drawn(shape, precision, rows, 3)
    layers = [TowerLayer(layer.weight, layer.bias, "identity") for layer in layers]
    want, bound = oracle(layers, x, vectors, shape[1], precision)
    hurt = [2, 17] if device == "cpu" else list(range(2, rows, 31))
    x[hurt], vectors[hurt] = np.inf, np.nan
    out = torch.zeros(rows, 32, dtype=DTYPES[precision], device=device)
    kernel = Tower(layers, shape[1], precision, torch.device(device))
    given = (matrix(v, DTYPES[precision], device, rows) for v in (x, vectors))
    kernel(lane_state(rows, device), *given, rows, out)
    whole = np.setdiff1d(np.arange(rows), hurt)
    got = out.cpu().double().numpy()[:, : want.shape[1]]
    assert (np.abs(got - want) <= bound)[whole].all()
    assert not np.isfinite(got[hurt]).all(1).any()


@pytest.mark.parametrize(
    ("widths", "activations", "pairs", "precision"),
    [
        ((13, 64, 16), ("relu", "prelu"), Pairs(5, 16, 16, False), "bf16"),
        ((13, 64, 16), ("relu", "relu"), Pairs(5, 16, 16, False), "fp32"),
        ((13, 64, 16), ("relu", "relu"), Pairs(5, 16, 16, False), "fp8"),
        ((600, 1024, 16), ("relu", "relu"), Pairs(5, 16, 16, False), "bf16"),
        ((300, 64, 16), ("relu", "relu"), Pairs(5, 16, 16, False), "bf16"),
        ((13, 64, 16), ("relu", "relu"), Pairs(5, 8, 8, False), "bf16"),
        ((13, 64, 4), ("relu", "relu"), Pairs(5, 4, 4, False), "bf16"),
        ((13, 64, 16), ("relu", "relu"), Pairs(5, 16, 20, False), "bf16"),
        ((13, 64, 128), ("relu", "relu"), Pairs(27, 128, 128, False), "tf32"),
        ((13, 8, 8, 8, 8, 8), ("relu",) * 5, Pairs(5, 8, 8, False), "bf16"),
    ],
)  # fmt: skip
def test_what_has_no_such_kernel_is_left_to_others(widths, activations, pairs, precision):
    assert takes((13, 64, 16), ("relu", "relu"), Pairs(5, 16, 16, False), "bf16", 99 * 1024)
    assert not takes(widths, activations, pairs, precision, 227 * 1024)


def test_a_tower_needs_room_in_shared_memory():
    widths, activations, pairs = (13, 512, 256, 64), ("relu",) * 3, Pairs(27, 64, 64, False)
    assert takes(widths, activations, pairs, "tf32", 227 * 1024)
    assert not takes(widths, activations, pairs, "tf32", 99 * 1024)
    assert takes(widths, activations, pairs, "bf16", 99 * 1024)


def test_operands_that_do_not_fit_are_refused(monkeypatch, run_folder):
    put_under(monkeypatch, tower_module, run_folder)
    layers, x, vectors = drawn(((13, 24, 8), Pairs(3, 8, 8, False)), "bf16", 2, 1)
    kernel = Tower(layers, Pairs(3, 8, 8, False), "bf16", torch.device("cpu"))
    x, vectors = (matrix(v, torch.bfloat16, "cpu", 2) for v in (x, vectors))
    out = torch.zeros(2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tower vectors: got shape"):
        kernel(lane_state(2, "cpu"), x, vectors[:, :8], 2, out)
    with pytest.raises(ValueError, match=r"tower x: got torch\.float32"):
        kernel(lane_state(2, "cpu"), x.float(), vectors, 2, out)
    with pytest.raises(ValueError, match=r"tower: got widths \[13, 24, 8\], Pairs\(.*\) at fp32"):
        Tower(layers, Pairs(3, 8, 8, False), "fp32", torch.device("cpu"))
