"""The compressed interaction network: kernel and plain twin against the float64 formula, term by term."""

from itertools import product

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.interaction.cin_wgmma import CinTile
from tests import model_oracle
from tests.backends import BACKENDS
from tests.kernels import host_cuda
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
    cin = cin_on(device, fields, dim, layers, activation, halves, precision, slope)
    if warps:
        cin._row_warps = lambda rows, blocks: warps
    return run_tile(cin, x, width_of(layers, halves), None, device, dtype)


def cin_on(device, fields, dim, layers, activation, halves, precision, slope=0.0):
    from kernels.interaction.cin import Cin

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Cin(fields, dim, layers, activation, slope, halves, dtype, precision, torch.device(device))


def width_of(layers, halves):
    units = [len(w) for w, _ in layers]
    return sum(n - n // 2 if halves else n for n in units[:-1]) + units[-1]


def run_tile(cin, x, width, tile, device, dtype, padding=0):
    """Of all rows of x, and behind them `padding` rows that are none: their fields are NaN, and nothing is written there."""
    rows = len(x)
    wide = torch.full((rows + padding, x.shape[1] + 3), torch.nan, device=device, dtype=dtype)
    wide[:rows, :-3] = torch.from_numpy(x)
    maps = [torch.full((rows + padding + 1, cin.scratch_columns), torch.nan, device=device) for _ in range(2)]
    out = torch.full((rows + padding + 1, width + 1), torch.nan, device=device, dtype=dtype)
    cin.run(lane_state(rows, device), wide, rows + padding, (maps[0], maps[1]), out, tile)
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


def check_precision(precision, fields, dim, units, halves, rows, tiles, device, activation="identity", bias=True, padding=0):
    """Every tile, and None for cin.cu, within what the digits of a precision lose.

    bf16 has 8 digits, so that a number is off by 2^-9 at most: each product z of two factors, each weight, each map that goes
    on, and the result; cin.cu has bf16 fields alone. tf32 has 11. Layers of `units` go on from one to the next.
    """
    layers, p, x = case(fields, dim, units, halves, bias, rows)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.from_numpy(x).to(dtype).float().numpy()
    x64 = x.astype(np.float64).reshape(-1, fields, dim)
    want = model_oracle.cin(x64, p, units, activation, halves, bias)
    terms = magnitude(x64, p, units, halves, fields, dim, bias)
    cin, width = cin_on(device, fields, dim, layers, activation, halves, precision), width_of(layers, halves)
    for tile in (t for t in tiles if t is None or t in cin.tiles):
        wide = tile is not None and precision == "bf16"
        lost = (3 * len(units) * 2.0**-9 if wide else 4 * 2.0**-11) * terms + 2.0**-8 * np.abs(want) * (precision == "bf16")
        got = run_tile(cin, x, width, tile, device, dtype, padding)
        assert (np.abs(got - want) <= lost).all(), tile
        assert np.array_equal(got, run_tile(cin, x, width, tile, device, dtype, padding)), tile


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("rows", [1, 19, 300])
@pytest.mark.parametrize(("fields", "dim", "units", "halves"), [*(s for s in SHAPES if s[0] >= 5), (48, 16, (10, 130), True)])
def test_lower_precisions_lose_no_more_than_their_digits(fields, dim, units, halves, rows, precision):
    tiles = [CinTile(2, 128, 4), CinTile(1, 128, 8)]
    if fields in (13, 39):  # a kernel takes most of a second to compile
        tiles += [CinTile(2, 128, 1), CinTile(2, 128, 2), CinTile(1, 128, 1), CinTile(1, 32, 8)]
    check_precision(precision, fields, dim, units, halves, rows, [*tiles, None], "cuda:0")
    check_precision(precision, fields, dim, units, halves, rows, tiles, "cuda:0", "identity", False, 64)


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernels' own code, run on the host."""
    from kernels.interaction import cin_wgmma

    host_cuda.put_under(monkeypatch, cin_wgmma, run_folder)


@pytest.mark.covering(1)
@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(
    ("fields", "dim", "units", "halves", "rows", "tile"),
    [
        (5, 4, (3, 6, 4), False, 17, CinTile(1, 128, 1)),
        (7, 10, (6, 4, 3), True, 19, CinTile(2, 128, 2)),
        (8, 16, (16, 16), False, 3, CinTile(1, 128, 2)),
        (13, 3, (10, 130), True, 50, CinTile(2, 128, 4)),
        (6, 5, (40, 20), False, 13, CinTile(1, 32, 2)),
        (9, 65, (20, 8), False, 2, CinTile(2, 128, 1)),
        (12, 7, (20, 8), True, 39, CinTile(1, 64, 1)),
        (10, 8, (36, 8), True, 25, CinTile(2, 128, 1)),
        (39, 16, (20, 64), True, 5, CinTile(1, 128, 8)),
    ],
)
def test_on_the_host_too_tiles_lose_no_more_than_their_digits(on_host, fields, dim, units, halves, rows, tile, precision):
    assert tile in cin_on("cpu", fields, dim, case(fields, dim, units, halves, True, 1)[0], "relu", halves, precision).tiles
    check_precision(precision, fields, dim, units, halves, rows, [tile], "cpu", "relu", fields % 2 == 1, 40)


def test_every_number_of_rows_has_a_few_tiles_of_whole_clusters_that_fit_a_multiprocessor(on_host):
    for precision, (fields, dim, units, halves) in product(("tf32", "bf16"), SHAPES):
        layers = case(fields, dim, units, halves, True, 1)[0]
        cin = cin_on("cpu", fields, dim, layers, "relu", halves, precision)
        assert bool(cin.tiles) == (fields >= 5 and dim <= 128)
        for rows in (1, 2, 19, 128, 1000, 70000):
            ways = cin.tiles_for(rows)
            assert ways.pop("mma") is None
            assert set(ways.values()) <= set(cin.tiles)
            assert len(ways) <= 4
            assert {t.warpgroups for t in ways.values()} == {t.warpgroups for t in cin.tiles}
            for tile, n in product(ways.values(), units):
                assert tile.shares <= 8
                assert tile.blocks(rows, dim, n) % tile.shares == 0
                assert tile.block_columns(n) % (2 * tile.shares) == 0
        for tile, layer in product(cin.tiles, cin._layers):
            assert tile.resident * (layer.wide.shared_bytes(tile) + 1024) <= 228 * 1024


def check_whole_numbers(device, tiles):
    """Small enough for 8 digits all along: what is left out, or taken twice, shows."""
    rng = np.random.default_rng(1)
    fields, dim, units, rows = 39, 4, (20, 17), 20
    x = rng.integers(-1, 2, (rows, fields * dim)).astype(np.float32)
    layers, p, before = [], {}, fields
    for k, n in enumerate(units):
        weight = (rng.integers(-1, 2, (n, before * fields)) * (rng.random((n, before * fields)) < 0.05)).astype(np.float32)
        layers.append((torch.from_numpy(weight), None))
        p[f"cin.{k}.weight"] = weight.astype(np.float64)
        before = n // 2
    want = model_oracle.cin(x.astype(np.float64).reshape(rows, fields, dim), p, units, "identity", True, False)
    assert np.abs(want).max() <= 256
    assert (want != 0).mean() > 0.8
    for precision in ("tf32", "bf16"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        cin = cin_on(device, fields, dim, layers, "identity", True, precision)
        for tile in tiles:
            assert np.array_equal(run_tile(cin, x, 10 + 17, tile, device, dtype), want), (precision, tile)


@pytest.mark.gpu
def test_whole_numbers_come_out_exactly():
    check_whole_numbers("cuda:0", (CinTile(2, 128, 1), CinTile(2, 128, 2), CinTile(1, 128, 8), None))


@pytest.mark.bulk
def test_on_the_host_too_whole_numbers_come_out_exactly(on_host):
    check_whole_numbers("cpu", (CinTile(2, 128, 1), CinTile(1, 128, 4)))


@pytest.mark.gpu
def test_more_columns_than_a_block_takes_are_refused():
    from kernels.interaction.cin import Cin

    with pytest.raises(ValueError, match="cin: got 3 fields of dim 300, expected at most 80 and 256"):
        Cin(3, 300, [(torch.zeros(1, 9), None)], "identity", 0.0, False, torch.float32, "fp32", torch.device("cuda", 0))
