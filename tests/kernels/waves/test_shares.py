"""Shares of contexts in a wave's products: with them and without, each row's output is that of its whole x, in float64."""

import numpy as np
import pytest
import torch

from kernels.runtime.state import StateWord
from kernels.waves.wave_jobs import chunk_columns, most_contexts, share_marks
from kernels.waves.wave_tiles import EXACT_TILES, TILES, WIDE_TILES
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state
from tests.kernels.waves.test_wave import EPS, put, random_linear, wave_on

CONTEXTS = (1, 2, 7, 0)  # 0: as many as rows, far too many for shares


@pytest.fixture
def on_host(monkeypatch, run_folder):
    from kernels.waves import wave

    host_cuda.put_under(monkeypatch, wave, run_folder)


def check_shares(chunks, rows, bucket, precision, tiles, device):
    """A DCN-V2 layer, a plain one with shares of half their columns, and one of all columns of each row, side by side.

    chunks: of a row's own columns before, of the context's, and of a row's own behind, the last of these not whole.
    """
    from kernels.waves.wave_jobs import LinearJob, Operands, ShareOperands

    rng = np.random.default_rng(rows)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    chunk = chunk_columns(dtype)
    first, end = chunks[0] * chunk, (chunks[0] + chunks[1]) * chunk
    width = end + chunks[2] * chunk - (chunks[2] > 0) * 5
    (w, b), (w2, b2), (w3, b3) = (random_linear(rng, n, width) for n in (width, 37, 40))
    jobs = [LinearJob(w, b, cross=True, shared=(first, end)), LinearJob(w2, b2, "relu", shared=(first, end))]
    jobs.append(LinearJob(w3, b3, "relu"))
    wave, outs = wave_on(device, jobs, None, precision), (width, 37, 40)
    exact = [t.to(dtype).double().to(device) for t in (w, b, w2, b2, w3, b3)]
    for contexts in CONTEXTS:
        contexts = contexts or rows
        q = torch.from_numpy(np.sort(np.r_[np.arange(contexts), rng.integers(0, contexts, rows)])[:rows]).to(torch.int32)
        q = q[torch.from_numpy(rng.permutation(rows))]  # a batch of one request may have its rows in any order
        q = torch.clamp(q, max=contexts - 1).to(device)
        x = put(rng, bucket, width, dtype, device)
        of_context = put(rng, contexts, end - first, dtype, device)
        x[:rows, first:end] = of_context[q.long()]
        x0 = put(rng, bucket, width, dtype, device)
        room = most_contexts(bucket)
        shared_x = torch.full((max(room, 3), end - first), torch.nan, dtype=dtype, device=device)
        shared_x[: min(contexts, room)] = of_context[:room]
        own_q = torch.full((bucket,), -1, dtype=torch.int32, device=device)
        own_q[:rows] = q
        xs, x0s = x[:rows, :width].double(), x0[:rows, :width].double()
        want = [x0s * (xs @ exact[0].T + exact[1]) + xs, *((xs @ exact[i].T + exact[i + 1]).relu() for i in (2, 4))]
        terms = [x0s.abs() * (xs.abs() @ exact[0].abs().T + 1) + xs.abs()]
        terms += [xs.abs() @ exact[i].abs().T + 1 for i in (2, 4)]
        for number, tile in enumerate(tiles, 3):
            state = lane_state(rows, device, batch_number=number)
            state[StateWord.CONTEXTS] = contexts
            marks = [torch.zeros(share_marks(bucket, n), dtype=torch.int32, device=device) for n in outs[:2]]
            shares = [torch.full((room, -(-n // 8) * 8), torch.nan, device=device) for n in outs[:2]]
            own = [ShareOperands(shared_x, own_q, s, m) for s, m in zip(shares, marks, strict=True)]
            got = [torch.full((bucket, -(-n // 8) * 8), torch.nan, dtype=dtype, device=device) for n in outs]
            given = [Operands(x, got[0], x0, shares=own[0]), Operands(x, got[1], shares=own[1]), Operands(x, got[2])]
            wave.run(given, bucket, None, state, tile)
            for out, expected, room_for, n in zip(got, want, terms, outs, strict=True):
                off = (out[:rows, :n].double() - expected).abs()
                assert (off <= 2 * EPS[precision] * room_for).all(), (tile.name, contexts)
                assert out[rows:].isnan().all(), "padding is left alone"
            for s, m in zip(shares, marks, strict=True):
                apart = contexts <= room
                assert bool((m == number).any()) == apart
                assert int(s.isfinite().all(1).sum()) == (contexts if apart else 0)
            if device == "cpu" and contexts != 7:
                continue
            before = [t.clone() for t in got]
            wave.run(given, bucket, None, state, tile)
            assert all(torch.equal(a[:rows], t[:rows]) for a, t in zip(got, before, strict=True)), "bit-equal from run to run"


def wide_tiles(precision):
    return EXACT_TILES if precision == "fp32" else WIDE_TILES


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("rows", "bucket"), [(17, 32), (256, 256), (300, 512)])
@pytest.mark.parametrize("chunks", [(0, 1, 1), (3, 5, 0), (2, 9, 11)])
def test_every_tile_adds_the_shares_of_contexts(chunks, rows, bucket, precision):
    check_shares(chunks, rows, bucket, precision, (*TILES[1:], *wide_tiles(precision)), "cuda:0")


@pytest.mark.bulk
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.whole), "bf16"])
def test_on_the_host_too_tiles_add_the_shares_of_contexts(on_host, precision):
    names = "mma-32x32-w1x1x8-k4-s6", "mma-64x64-w2x2x1-k1-s4"
    tiles = [TILES[1], *(t for t in TILES if t.name in names), *(t for t in wide_tiles(precision) if t.along_k > 1)]
    check_shares((1, 2, 3), 40, 128, precision, [*tiles[:3], *tiles[-1:]], "cpu")
    check_shares((0, 9, 2), 130, 144, precision, tiles[1:2] + tiles[-1:], "cpu")


@pytest.mark.parametrize("shared", [(0, 16), (32, 40), (32, 96), (0, 64)])
def test_columns_that_are_no_part_in_whole_chunks_are_refused(on_host, shared):
    from kernels.waves.wave_jobs import LinearJob

    with pytest.raises(ValueError, match=r"wave shares: got columns \d+ to \d+ of 64, expected a part, in multiples of 32"):
        wave_on("cpu", [LinearJob(torch.ones(8, 64), None, shared=shared)], None, "tf32")


def test_shares_want_their_operands(on_host):
    from kernels.waves.wave_jobs import LinearJob, Operands

    wave = wave_on("cpu", [LinearJob(torch.ones(8, 64), None, shared=(0, 32))], None, "tf32")
    with pytest.raises(ValueError, match="wave: got no operands of shares"):
        wave.run([Operands(torch.ones(16, 64), torch.ones(16, 8))], 16, None, lane_state(16, "cpu"), TILES[0])
