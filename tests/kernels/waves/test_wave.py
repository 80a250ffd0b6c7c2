"""Waves: every tile against float64 products of the rounded factors, jobs side by side, and the head behind them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.dense.library import LIBRARY
from kernels.waves.wave_tiles import (
    CLUSTERED_TILES,
    CLUSTERS,
    CROSSED_TILES,
    EXACT_TILES,
    LONE_TILES,
    MOST_HEAD_COLUMNS,
    STATIC_BYTES,
    TILES,
    WIDE_TILES,
    CrossedTile,
    WideTile,
    clustered,
    tiles_for,
)
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state, words_of_another_batch

EPS = {"fp32": 2**-23, "tf32": 2**-10, "bf16": 2**-8}  # of a factor or an output; sums are float32


CLUSTERED = tuple(replace(tile, cluster=n) for tile in CLUSTERED_TILES for n in CLUSTERS)


def test_every_tile_fits_a_multiprocessor_and_divides_into_its_warps():
    for tile in (*TILES, *WIDE_TILES, *EXACT_TILES, *CROSSED_TILES, *CLUSTERED):
        assert tile.shared_bytes + STATIC_BYTES <= 227 * 1024
        assert tile.threads <= 1024
    for wide in (*WIDE_TILES, *EXACT_TILES):
        assert wide.stages % wide.along_k == 0
        assert wide.stages > wide.along_k
    for tile in TILES:
        along_rows, along_columns, along_k = tile.warps
        assert tile.rows % (16 * along_rows) == 0
        assert tile.columns % (16 * along_columns) == 0 or tile.columns == 8
        assert 4 * tile.span % along_k == 0
        assert tile.stages >= 2


def test_every_number_of_rows_has_tiles():
    for rows in (1, 2, 15, 16, 17, 64, 1000, 4096, 65536):
        for wide in ((), (*WIDE_TILES, *CROSSED_TILES), EXACT_TILES):
            own = tiles_for(rows, wide)
            smallest = 99 * 1024 - STATIC_BYTES  # of shared memory, on GPUs from sm_86 on
            assert any(t.shared_bytes <= smallest and t.columns <= MOST_HEAD_COLUMNS for t in own)
            assert all(t.rows <= max(16, 2 * rows) for t in own)


def test_the_halves_of_a_weight_are_tf32_and_add_up_to_its_digits():
    from kernels.waves.packed_weights import tf32_halves

    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((40, 24)) * 10.0 ** rng.integers(-20, 20, (40, 24))).float()
    weight[3, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.finfo(torch.float32).max])
    weight[4, :2].view(torch.int32)[:] = torch.tensor([0x7FFFFFFF, 0x7F800001])  # NaN that cutting would make -0 or infinity
    both = tf32_halves(weight)
    high, low = both.double()[:40], both.double()[40:]
    assert (both[~both.isnan()].view(torch.int32) & 0x1FFF == 0).all()
    assert torch.equal(high.isnan(), weight.isnan())
    assert (low[~weight.isfinite()] == 0).all()
    assert torch.equal(both[:40][weight.isinf()], weight[weight.isinf()])
    finite = weight.isfinite()
    off = (high + low - weight.double()).abs()[finite]
    largest = weight.double().abs()[finite] == torch.finfo(torch.float32).max  # rounding would have made it infinite: it is cut
    assert (off <= torch.where(largest, 2.0**-10, 2.0**-23) * weight.double().abs()[finite]).all()


def random_linear(rng, out, width):
    return torch.from_numpy(rng.standard_normal((out, width)) / width**0.5).float(), torch.from_numpy(
        rng.standard_normal(out)
    ).float()


def put(rng, rows, width, dtype, device="cuda"):
    """[rows, padded width]: random columns, zero padding columns, as the layers before leave them."""
    from kernels.dense.linear import padded

    x = torch.zeros(rows, padded(width), device=device)
    x[:, :width] = torch.from_numpy(rng.standard_normal((rows, width))).float()
    return x.to(dtype)


def wide_tiles(precision):
    return EXACT_TILES if precision == "fp32" else (*WIDE_TILES, *CROSSED_TILES)


def wave_on(device, *what):
    from kernels.waves.wave import Wave

    return Wave(*what, torch.device(device))


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernels' own code, run on the host."""
    from kernels.waves import wave

    host_cuda.put_under(monkeypatch, wave, run_folder)


def check_products(width, rows, precision, tiles, device):
    """A DCN-V2 layer, a plain one, and DCN-V2 layers of low rank, one with its bias outside, side by side, in every tile."""
    from kernels.waves.wave_jobs import LinearJob, Operands

    rng = np.random.default_rng(width + rows)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    (w, b), (w2, b2) = random_linear(rng, width, width), random_linear(rng, 37, width)
    u, b3 = random_linear(rng, width, 24)
    jobs = [LinearJob(w, b, "identity", True), LinearJob(w2, b2, "relu"), LinearJob(u, b3, cross=True)]
    jobs.append(LinearJob(u, b3, cross=True, outer_bias=True))
    wave = wave_on(device, jobs, None, precision)
    x0, x, v = (put(rng, rows, n, dtype, device) for n in (width, width, 24))
    state = lane_state(rows, device)
    exact = [t.to(dtype).double().to(device) for t in (w, b, w2, b2, u, b3)]
    xs, x0s = x[:, :width].double(), x0[:, :width].double()
    product, low = xs @ exact[0].T + exact[1], v.double() @ exact[4].T + exact[5]
    want = x0s * product + xs, (xs @ exact[2].T + exact[3]).relu(), x0s * low + xs, x0s * (low - exact[5]) + exact[5] + xs
    scale = (
        x0s.abs() * (xs.abs() @ exact[0].abs().T + 1) + xs.abs(),
        xs.abs() @ exact[2].abs().T + 1,
        *[(x0s.abs() + 1) * (v.double().abs() @ exact[4].abs().T + 1) + xs.abs()] * 2,
    )
    for tile in tiles:
        outs = [torch.full((rows, -(-n // 8) * 8), torch.nan, dtype=dtype, device=device) for n in (width, 37, width, width)]
        given = [Operands(x, outs[0], x0), Operands(x, outs[1]), *(Operands(v, out, x0, x) for out in outs[2:])]
        wave.run(given, rows, None, state, tile)
        for out, expected, terms, n in zip(outs, want, scale, (width, 37, width, width), strict=True):
            assert ((out[:, :n].double() - expected).abs() <= 2 * EPS[precision] * terms).all(), tile.name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("rows", [1, 17, 127, 300])
@pytest.mark.parametrize("width", [8, 72, 624, 1030])
def test_every_tile_multiplies_and_crosses_exactly(width, rows, precision):
    check_products(width, rows, precision, (*TILES, *wide_tiles(precision)), "cuda:0")


def of_precision(tiles, precision):
    return [t for t in tiles if precision != "fp32" or not isinstance(t, WideTile)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("width", "rows"), [(8, 1), (624, 17), (1030, 127), (3456, 1), (3456, 300)])
def test_the_blocks_of_a_cluster_compute_a_tile_exactly(width, rows, precision):
    check_products(width, rows, precision, of_precision(CLUSTERED, precision), "cuda:0")


@pytest.mark.bulk
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.whole), "tf32", "bf16"])
def test_on_the_host_too_the_blocks_of_a_cluster_compute_a_tile_exactly(on_host, precision):
    for (width, rows), tile in zip(((8, 1), (72, 17), (328, 70), (1030, 3), (264, 130)), CLUSTERED_TILES[:5], strict=True):
        for cluster in (2, 4) if width < 1000 else (8,):
            check_products(width, rows, precision, of_precision([replace(tile, cluster=cluster)], precision), "cpu")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_what_a_wave_names_to_be_compiled_is_what_its_ways_load(on_host, monkeypatch, precision):
    from kernels.waves import wave as module
    from kernels.waves.wave_jobs import LinearJob, Operands

    asked = []
    monkeypatch.setattr(module, "loaded", lambda source, shared_bytes: asked.append(source))
    rng, dtype = np.random.default_rng(5), torch.bfloat16 if precision == "bf16" else torch.float32
    weight, bias = random_linear(rng, 256, 2048)
    crossed = [LinearJob(*random_linear(rng, 256, 64), cross=True)]
    for jobs, depth in (([LinearJob(weight, bias, "relu")], 2048), (crossed, 64)):
        wave = wave_on("cpu", jobs, None, precision)
        for rows in (1, 16, 100, 1030):
            asked.clear()
            x, x0, out = (put(rng, rows, n, dtype, "cpu") for n in (depth, 256, 256))
            for tile in wave.ways(rows).values():
                if tile is not None:
                    wave.bound([Operands(x, out, x0, x0)], rows, None, lane_state(rows, "cpu"), tile)
            assert set(asked) == {*wave.sources(rows)}
        wave.recalled[16] = wave.tiles_for(16)[0].name
        assert len(wave.sources(16)) == 1


def test_clusters_are_for_few_tiles_of_a_deep_product():
    def names(rows, *layers):
        return {t.name: t.cluster for t in clustered(tiles_for(rows, WIDE_TILES), rows, layers, 132)}

    assert names(1, (512, 108)).keys() >= {f"mma-16x16-w1x1x16-k8-s5-c{n}" for n in CLUSTERS}
    assert names(1, (512, 54)).keys() >= {f"mma-16x16-w1x1x16-k8-s5-c{n}" for n in (2, 4)}
    assert 8 not in names(1, (512, 54)).values(), "too little for eight"
    assert not names(1, (512, 20)), "too little for two"
    assert not names(4096, (512, 108)).keys() & {"wgmma-64x64-w2-s12-c2"}, "the GPU is full"
    assert not names(1, (4096, 108))
    assert names(1, (256, 108), (256, 20)) == names(1, (512, 108)), "a wave is as deep as its deepest layer"


def test_a_wave_tries_clusters_where_the_gpu_has_them_and_no_context_shares(on_host, monkeypatch):
    from kernels.waves.wave_jobs import LinearJob

    def clusters(job, precision="tf32", rows=1):
        return {name for name in wave_on("cpu", [job], None, precision).ways(rows) if "-c" in name}

    deep = LinearJob(torch.ones(512, 3456), None)
    assert {f"mma-16x16-w1x1x8-k4-s5-c{n}" for n in CLUSTERS} <= clusters(deep)
    assert not any(name.startswith("wgmma") for name in clusters(deep, "fp32", 256)), "tiles of strict fp32 have none"
    assert any(name.startswith("wgmma") for name in clusters(deep, "tf32", 256))
    assert not clusters(LinearJob(torch.ones(512, 64), None))
    assert not clusters(LinearJob(torch.ones(512, 3456), None, shared=(0, 128)), rows=256)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not clusters(deep)


@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["fp32", pytest.param("tf32", marks=pytest.mark.whole), "bf16"])
def test_on_the_host_too_tiles_multiply_and_cross_exactly(on_host, precision):
    """The smallest tile, one whose warps split all of K, one with warps along rows and columns; for warpgroups those of shared
    K, and one of many rows.
    """
    tiles = [*TILES[:2], *(t for t in TILES if t.name in ("mma-32x32-w1x1x8-k4-s6", "mma-64x64-w2x2x1-k1-s4"))]
    wide = EXACT_TILES if precision == "fp32" else WIDE_TILES
    tiles += [*(t for t in wide if t.along_k > 1), next(t for t in wide if (t.rows, t.columns) == (128, 128))]
    tiles += () if precision == "fp32" else CROSSED_TILES[:1]
    assert len(tiles) >= 5
    for width, rows in ((8, 1), (72, 17), (200, 70), (328, 130)):
        check_products(width, rows, precision, tiles, "cpu")


def check_lone(width, rank, rows, precision, tiles, device, outer=False):
    """A cross layer of low rank, or of full rank where rank is 0, alone in its wave; some rows of the bucket are padding."""
    from kernels.waves.wave_jobs import LinearJob, Operands

    rng, dtype = np.random.default_rng(width + rows), torch.bfloat16 if precision == "bf16" else torch.float32
    w, b = random_linear(rng, width, rank or width)
    wave = wave_on(device, [LinearJob(w, b, cross=True, outer_bias=outer)], None, precision)
    x0, xl = (put(rng, rows, width, dtype, device) for _ in range(2))
    x = put(rng, rows, rank, dtype, device) if rank else xl
    true, exact = rows - rows // 3, x[:, : rank or width].double()
    product = exact @ w.to(dtype).double().to(device).T
    bias, a, last = b.double().to(device), x0[:, :width].double(), xl[:, :width].double()
    want = a * product + bias + last if outer else a * (product + bias) + last
    room = 2 * EPS[precision] * ((a.abs() + 1) * (exact.abs() @ w.double().to(device).abs().T + 1) + last.abs())
    for tile in tiles:
        if not tile.holds(dtype.itemsize):
            continue
        first = None
        for _ in range(2):
            out = torch.full((rows, -(-width // 8) * 8 + 8), torch.nan, dtype=dtype, device=device)
            wave.run([Operands(x, out[:, :-8], x0, xl if rank else None)], rows, None, lane_state(true, device), tile)
            assert ((out[:true, :width].double() - want[:true]).abs() <= room[:true]).all(), tile.name
            assert out[:, -8:].isnan().all(), "columns of others"
            assert first is None or torch.equal(first[:true, :width], out[:true, :width]), "bit-equal from run to run"
            first = out


@pytest.mark.gpu
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(
    ("width", "rank", "rows"), [(8, 8, 64), (72, 24, 127), (624, 0, 300), (3456, 512, 1024), (1030, 600, 64)]
)
def test_a_cross_layer_alone_takes_tiles_that_bring_x0_and_xl_through_the_ring(width, rank, rows, precision, outer):
    check_lone(width, rank, rows, precision, LONE_TILES, "cuda:0", outer)


@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_on_the_host_too_a_cross_layer_alone_takes_such_tiles(on_host, precision):
    for width, rank, rows, outer in ((8, 8, 64, False), (72, 24, 127, True), (300, 0, 200, False), (136, 300, 300, False)):
        check_lone(width, rank, rows, precision, LONE_TILES, "cpu", outer)


def test_a_lone_tile_holds_whole_lines_of_x0_and_xl():
    assert all(t.holds(2) for t in LONE_TILES)
    assert not CrossedTile(128, 64, 4).holds(1), "half a line of fp8"
    assert not CrossedTile(128, 128, 3).holds(4), "four buffers of float32"


def test_such_tiles_are_for_one_cross_layer_without_a_head_alone(on_host):
    from kernels.waves.wave_jobs import LinearJob

    def names(jobs, bias=None, precision="bf16"):
        return {name for name in wave_on("cpu", jobs, bias, precision).ways(4096) if name.startswith("crossed")}

    plain, crossed = LinearJob(torch.ones(8, 8), None), LinearJob(torch.ones(8, 8), None, cross=True)
    headed = LinearJob(torch.ones(8, 8), None, cross=True, head=torch.ones(1, 8))
    assert len(names([crossed])) == len(LONE_TILES)
    for precision, size in (("tf32", 4), ("fp8", 1)):
        assert names([crossed], precision=precision) == {t.name for t in LONE_TILES if t.holds(size)} != set()
    for other in ([plain], [crossed, plain], [crossed, crossed]):
        assert not names(other)
    assert not names([headed], torch.ones(1))
    assert not names([crossed], precision="fp32")


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape)).float()


def activations(rng, units):
    """Each kind with its parameters, and its formula in float64."""
    alpha, scale, shift = normal(rng, units), normal(rng, units), normal(rng, units)
    a, s, t = (v.double() for v in (alpha, scale, shift))
    return {
        "relu": ((), lambda v: v.clamp(min=0)),
        "sigmoid": ((), lambda v: 1 / (1 + (-v).exp())),
        "tanh": ((), lambda v: v.tanh()),
        "gelu": ((), lambda v: v * (1 + torch.special.erf(v / 2**0.5)) / 2),
        "gelu_tanh": ((), lambda v: v * (1 + ((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3)).tanh()) / 2),
        "leaky_relu": ((), lambda v: torch.where(v < 0, 0.3 * v, v)),
        "prelu": ((alpha,), lambda v: torch.where(v < 0, a * v, v)),
        "dice": ((alpha, scale, shift), lambda v: v * (a + (1 - a) / (1 + (-s * v - t).exp()))),
    }


def check_activations(rows, precision, tiles, device):
    """A layer of each activation, side by side."""
    from kernels.waves.wave_jobs import LinearJob, Operands

    rng = np.random.default_rng(rows)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    kinds, (w, b) = activations(rng, 37), random_linear(rng, 37, 72)
    wave = wave_on(device, [LinearJob(w, b, k, params=p, slope=0.3) for k, (p, _) in kinds.items()], None, precision)
    x = put(rng, rows, 72, dtype, device)
    exact = x.cpu().double() @ w.to(dtype).double().T + b.double()
    room = 8 * EPS[precision] * (x.cpu().double().abs() @ w.double().abs().T + 1)  # a formula's slope is less than 4 here
    for tile in tiles:
        outs = [torch.full((rows, 40), torch.nan, dtype=dtype, device=device) for _ in kinds]
        wave.run([Operands(x, out) for out in outs], rows, None, lane_state(rows, device), tile)
        for out, (kind, (_, formula)) in zip(outs, kinds.items(), strict=True):
            assert ((out[:, :37].cpu().double() - formula(exact)).abs() <= room).all(), (tile.name, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("rows", [1, 300])
def test_every_activation_follows_its_product(rows, precision):
    check_activations(rows, precision, (*TILES, *wide_tiles(precision)), "cuda:0")


@pytest.mark.bulk
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.whole), "bf16"])
def test_on_the_host_too_every_activation_follows_its_product(on_host, precision):
    wide = EXACT_TILES if precision == "fp32" else WIDE_TILES
    check_activations(70, precision, (TILES[0], shared_k(wide)), "cpu")


def test_a_wave_is_compiled_for_its_own_activations_alone():
    from kernels.waves.wave_jobs import LinearJob, job_constants

    def kinds(*names):
        return int(job_constants([LinearJob(torch.ones(8, 8), None, n) for n in names], 1, torch.float32)["KINDS"])

    assert kinds("identity", "relu") == 0
    assert kinds("relu", "sigmoid", "dice", "dice") == 1 << 2 | 1 << 7
    assert kinds("leaky_relu") == kinds("prelu")


def check_library(precision, device):
    from kernels.waves.wave_jobs import LinearJob, Operands

    rng, dtype = np.random.default_rng(0), torch.bfloat16 if precision == "bf16" else torch.float32
    x = put(rng, 1030, 136, dtype, device)[:, :72]  # columns of a wider matrix
    for activation, (w, b) in (("relu", random_linear(rng, 37, 72)), ("identity", random_linear(rng, 40, 70))):
        wave = wave_on(device, [LinearJob(w, b, activation)], None, precision)
        out = torch.full((1030, 80), torch.nan, dtype=dtype, device=device)
        wave.run([Operands(x, out[:, :40])], 1030, None, lane_state(1030, device), wave.ways(1030)[LIBRARY])
        product = x[:, : w.shape[1]].cpu().double() @ w.to(dtype).double().T + b.double()
        room = 2 * EPS[precision] * (x[:, : w.shape[1]].cpu().double().abs() @ w.double().abs().T + 1)
        got, want = out[:, : len(b)].cpu().double(), product.relu() if activation == "relu" else product
        assert ((got - want).abs() <= room).all()
        assert out[:, :40].isfinite().all(), "pad columns must stay finite"
        assert out[:, 40:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_cublas_computes_one_layer_of_many_rows(precision):
    from kernels.dense.linear import matmul_precision

    with torch.inference_mode(), matmul_precision(precision):
        check_library(precision, "cuda:0")


def test_on_the_host_too_a_library_computes_one_layer_of_many_rows(on_host):
    check_library("fp32", "cpu")


def test_cublas_is_a_way_for_one_plain_layer_of_many_rows_alone(on_host):
    from kernels.waves.wave_jobs import LinearJob

    layer, crossed = LinearJob(torch.ones(8, 8), None, "relu"), LinearJob(torch.ones(8, 8), None, cross=True)
    smooth = LinearJob(torch.ones(8, 8), None, "dice", params=[torch.ones(8)] * 3)
    assert LIBRARY in wave_on("cpu", [layer], None, "bf16").ways(1024)
    assert LIBRARY not in wave_on("cpu", [layer], None, "bf16").ways(1000)
    for jobs, bias, precision in (([layer] * 2, None, "bf16"), ([layer], torch.ones(1), "bf16"), ([crossed], None, "bf16")):
        assert LIBRARY not in wave_on("cpu", jobs, bias, precision).ways(4096)
    assert LIBRARY not in wave_on("cpu", [smooth], None, "bf16").ways(4096)


def shared_k(tiles):
    """The first one whose K warpgroups share."""
    return next(t for t in tiles if isinstance(t, WideTile) and t.along_k > 1)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_rows_beyond_the_true_number_are_not_written(precision):
    check_padding(precision, (*TILES, *wide_tiles(precision), *of_precision(CLUSTERED, precision)), "cuda:0")


@pytest.mark.bulk
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.whole), "bf16"])
def test_on_the_host_too_rows_beyond_the_true_number_are_not_written(on_host, precision):
    wide = EXACT_TILES if precision == "fp32" else WIDE_TILES
    check_padding(precision, (TILES[0], replace(TILES[0], cluster=2), shared_k(wide), shared_k(wide[::-1])), "cpu")


def check_padding(precision, tiles, device):
    from kernels.waves.wave_jobs import LinearJob, Operands

    rng = np.random.default_rng(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    wave = wave_on(device, [LinearJob(*random_linear(rng, 100, 64))], None, precision)
    x, state = put(rng, 512, 64, dtype, device), lane_state(130, device, batch_number=0)
    for tile in tiles:
        out = torch.full((512, 104), torch.nan, dtype=dtype, device=device)
        wave.run([Operands(x, out)], 512, None, state, tile)
        assert out[:130].isfinite().all()
        assert out[130:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("tf32", 1e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_the_head_behind_a_wave_sums_all_parts_and_logits_again_and_again(rows, tasks, precision, tolerance):
    more = [t for t in of_precision(CLUSTERED, precision) if t.columns <= MOST_HEAD_COLUMNS]
    own = (1, 16, 64, 256, 4096)
    tiles = check_head(
        rows, tasks, precision, tolerance, lambda w: {*more, *(t for n in own for t in w.tiles_for(n))}, "cuda:0"
    )
    assert any(isinstance(t, WideTile) for t in tiles)


@pytest.mark.bulk
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_on_the_host_too_the_head_sums_all_parts_and_logits_again_and_again(on_host, precision, tolerance):
    for rows, tasks in ((1, 1), (70, 3)):
        check_head(
            rows, tasks, precision, tolerance,
            lambda w: [w.tiles_for(64)[1], shared_k(w.tiles_for(64)), replace(TILES[0], cluster=2)], "cpu",
        )  # fmt: skip


def check_head(rows, tasks, precision, tolerance, tiles_of, device):
    from kernels.waves.wave_jobs import HeadOperands, LinearJob, Operands

    rng = np.random.default_rng(rows)
    (w, b), (w2, b2) = random_linear(rng, 200, 72), random_linear(rng, 72, 72)
    v, v2 = (torch.from_numpy(rng.standard_normal((tasks, n)) / 20).float() for n in (200, 72))
    bias = torch.from_numpy(rng.standard_normal(tasks)).float()
    jobs = [LinearJob(w, b, "relu", False, v, False), LinearJob(w2, b2, "identity", True, v2, True)]
    wave, dtype = wave_on(device, jobs, bias, precision), torch.bfloat16 if precision == "bf16" else torch.float32
    x, x0 = put(rng, rows, 72, dtype, device), put(rng, rows, 72, dtype, device)
    logits = [torch.from_numpy(rng.standard_normal((rows, n))).float().to(device) for n in (1, tasks)]
    kept = torch.empty(rows, 72, dtype=dtype, device=device)
    words = words_of_another_batch(rows * 40 * tasks, device)
    d = [t.double().to(device) for t in (w, b, w2, b2, v, v2, bias)]
    h = (x.double() @ d[0].T + d[1]).relu()
    crossed = x0.double() * (x.double() @ d[2].T + d[3]) + x.double()
    want = torch.sigmoid(h @ d[4].T + crossed @ d[5].T + d[6] + logits[0].double() + logits[1].double())
    tiles, pinned = tiles_of(wave), {"pin_memory": device != "cpu"}
    for number, tile in enumerate(tiles):
        scores = torch.full((rows, tasks), torch.nan, **pinned)
        done = torch.zeros(-(-rows // 8), dtype=torch.int32, **pinned)
        for batch in (7 + 2 * number, 8 + 2 * number):  # what one leaves is not what the next one waits for
            given = [Operands(x, None), Operands(x, kept, x0)]
            state = lane_state(rows, device, batch_number=batch)
            wave.run(given, rows, HeadOperands(logits, scores, done, words), state, tile)
        if device != "cpu":
            torch.cuda.synchronize()
        np.testing.assert_allclose(scores.numpy(), want.cpu().numpy(), rtol=0, atol=tolerance, err_msg=tile.name)
        assert (done == batch).all()
    return tiles


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_what_is_no_number_stays_none(precision):
    """A GPU's own NaN is 0x7fffffff, which rounding could turn into a zero; an endpoint refuses scores that are not finite."""
    from kernels.waves.wave import Wave
    from kernels.waves.wave_jobs import LinearJob, Operands

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    wave = Wave([LinearJob(torch.ones(8, 8), None, "relu")], None, precision, torch.device("cuda", 0))
    x = torch.ones(3, 8, device="cuda")
    x[0, 3:4].view(torch.int32)[:] = 0x7FFFFFFF
    x[1, 3] = torch.inf
    state = lane_state(3, "cuda", batch_number=0)
    for tile in wave.tiles_for(64):
        out = torch.zeros(3, 8, dtype=dtype, device="cuda")
        wave.run([Operands(x.to(dtype), out)], 3, None, state, tile)
        assert out[0].isnan().all(), tile.name
        assert not out[1].isfinite().any(), tile.name
        assert (out[2] == 8).all(), tile.name


def test_a_job_too_many_is_refused(on_host):
    from kernels.waves.wave_jobs import FmJob, LinearJob

    with pytest.raises(ValueError, match="wave: got 9 jobs and 0 of shares, expected at most 8"):
        wave_on("cpu", [FmJob(0, 2, 4)] * 9, None, "fp32")
    shared = LinearJob(torch.ones(8, 64), None, shared=(0, 32))
    with pytest.raises(ValueError, match="wave: got 5 jobs and 4 of shares, expected at most 8"):
        wave_on("cpu", [FmJob(0, 2, 4), *[shared] * 4], None, "tf32")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 127, 300])
@pytest.mark.parametrize("width", [16, 72, 624])
def test_fp8_multiplies_what_its_numbers_mean(width, rows):
    """Products of e4m3 numbers are exact; only their sum and the rounding of what is stored are not."""
    from kernels.dense.linear import padded
    from kernels.waves.wave import Wave
    from kernels.waves.wave_jobs import FmJob, LinearJob, Operands

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply fp8")
    rng, fp8 = np.random.default_rng(width + rows), torch.float8_e4m3fn
    (w, b), (w2, b2) = random_linear(rng, width, width), random_linear(rng, 37, width)
    u, _ = random_linear(rng, width, 16)
    sx, s0, sv, so = 0.02, 0.03, 0.015, 0.25
    jobs = [
        LinearJob(w, b, "identity", True, x_scale=sx, x0_scale=s0, xl_scale=sx, out_scale=so),
        LinearJob(w2, b2, "relu", x_scale=sx, out_scale=so),
        LinearJob(u, b, cross=True, x_scale=sv, x0_scale=s0, xl_scale=sx, out_scale=so),
        FmJob(0, width // 8, 8, sx),
    ]
    wave = Wave(jobs, None, "fp8", torch.device("cuda", 0))
    x, x0, v = (torch.zeros(rows, padded(n, fp8), device="cuda").index_copy_(1, torch.arange(n, device="cuda"),
                torch.from_numpy(rng.standard_normal((rows, n))).float().cuda() / s).to(fp8)
                for n, s in ((width, sx), (width, s0), (16, sv)))  # fmt: skip
    state = lane_state(rows, "cuda")
    xs, x0s = x[:, :width].double() * sx, x0[:, :width].double() * s0
    rounded = []
    for weight in (w, w2, u):
        scale = weight.abs().amax(1, keepdim=True) / 448
        rounded.append(((weight / scale).to(fp8).double() * scale.double()).cuda())
    product = xs @ rounded[0].T + b.double().cuda()
    low = v.double() * sv @ rounded[2].T + b.double().cuda()
    want = x0s * product + xs, (xs @ rounded[1].T + b2.double().cuda()).relu(), x0s * low + xs
    fields = xs.reshape(rows, -1, 8)
    pairs = 0.5 * (fields.sum(1).square() - fields.square().sum(1)).sum(1, keepdim=True)
    for tile in (*TILES, *WIDE_TILES, *CROSSED_TILES, *CLUSTERED):
        outs = [torch.full((rows, padded(n, fp8)), torch.nan, device="cuda").to(fp8) for n in (width, 37, width)]
        fm = torch.full((rows, 1), torch.nan, device="cuda")
        given = [Operands(x, outs[0], x0), Operands(x, outs[1]), Operands(v, outs[2], x0, x), Operands(x, fm)]
        wave.run(given, rows, None, state, tile)
        for out, expected, n in zip(outs, want, (width, 37, width), strict=True):
            got = out[:, :n].double() * so
            # Half a unit in the last of 4 digits; 2^-10 below the normal numbers; sums, which tensor cores cut to 14 bits.
            room = expected.abs() / 16 + so * 2.0**-10 + 2e-3 * xs.abs().sum(1, keepdim=True) / width**0.5
            assert ((got - expected).abs() <= room).all(), tile.name
        np.testing.assert_allclose(fm.cpu(), pairs.cpu(), rtol=1e-4, atol=1e-4, err_msg=tile.name)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "rank", "rows"), [(16, 16, 64), (624, 16, 300), (624, 512, 1000)])
def test_fp8_cross_layers_alone_multiply_what_their_numbers_mean(width, rank, rows):
    from kernels.dense.linear import padded
    from kernels.waves.wave import Wave
    from kernels.waves.wave_jobs import LinearJob, Operands

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("tiles for Hopper")
    rng, fp8 = np.random.default_rng(width + rows), torch.float8_e4m3fn
    u, b = random_linear(rng, width, rank)
    s0, sl, sv, so = 0.03, 0.02, 0.015, 0.25
    wave = Wave([LinearJob(u, b, cross=True, x_scale=sv, x0_scale=s0, xl_scale=sl, out_scale=so)], None, "fp8",
                torch.device("cuda", 0))  # fmt: skip
    x0, xl, v = (torch.zeros(rows, padded(n, fp8), device="cuda").index_copy_(1, torch.arange(n, device="cuda"),
                 torch.from_numpy(rng.standard_normal((rows, n))).float().cuda() / s).to(fp8)
                 for n, s in ((width, s0), (width, sl), (rank, sv)))  # fmt: skip
    scale = u.abs().amax(1, keepdim=True) / 448
    rounded = ((u / scale).to(fp8).double() * scale.double()).cuda()
    vs = v[:, :rank].double() * sv
    want = x0[:, :width].double() * s0 * (vs @ rounded.T + b.double().cuda()) + xl[:, :width].double() * sl
    for tile in (t for t in LONE_TILES if t.holds(1)):
        out = torch.full((rows, padded(width, fp8)), torch.nan, device="cuda").to(fp8)
        wave.run([Operands(v, out, x0, xl)], rows, None, lane_state(rows, "cuda"), tile)
        got = out[:, :width].double() * so
        room = want.abs() / 16 + so * 2.0**-10 + 4e-3 * vs.abs().sum(1, keepdim=True) / rank**0.5
        assert ((got - want).abs() <= room).all(), tile.name
