"""Waves of jobs that have little in common: layers of any depth and width, norms, an FM, and the head behind them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.waves.wave_jobs import FmJob, HeadOperands, LinearJob, NormJob, Operands
from kernels.waves.wave_tiles import CLUSTERED_TILES, TILES, WideTile
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state, words_of_another_batch
from tests.kernels.waves.test_gates import normed
from tests.kernels.waves.test_wave import EPS, normal, put, random_linear

OFF = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 2e-2}  # of a score


class Drawn:
    """The jobs of one wave with what they are given; of each its output, what it should be, and how far it may be off."""

    def __init__(self, seed: int, precision: str) -> None:
        self.rng, self.precision = np.random.default_rng(seed), precision
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.rows, self.tasks = (int(self.rng.choice(of)) for of in ((1, 3, 16, 17, 33, 70), (1, 2)))
        self.bucket = self.rows + int(self.rng.integers(0, 40))
        self.jobs, self.given, self.checks = [], [], []
        self.logits = torch.zeros(self.bucket, self.tasks, dtype=torch.float64)
        widths = self.rng.choice([8, 24, 37, 72, 130], 3, replace=False)
        for depth, width in zip(self.rng.choice([8, 40, 72, 200, 328, 1030], 3, replace=False), widths, strict=True):
            self._layer(int(width), int(depth))
        self._norm(int(self.rng.choice([1, 2, 8, 24])), int(self.rng.choice([4, 8, 12, 16, 20, 128])))
        self._norm(8, int(self.rng.choice([1, 2, 3, 5, 33, 100, 132, 200])))
        self._fm()
        self.bias = normal(self.rng, self.tasks)

    def _add(self, job, x, out, want, room) -> None:
        self.jobs.append(job)
        self.given.append(Operands(x, out))
        self.checks.append((out[:, : want.shape[1]], want, room))

    def _out(self, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full((self.bucket, columns), torch.nan, dtype=dtype or self.dtype)

    def _layer(self, width: int, depth: int) -> None:
        (w, b), head = random_linear(self.rng, width, depth), normal(self.rng, self.tasks, width) / 20
        x = put(self.rng, self.bucket, depth, self.dtype, "cpu")
        exact = x[:, :depth].double()
        want = (exact @ w.to(self.dtype).double().T + b.double()).relu()
        room = exact.abs() @ w.double().abs().T + 1 + b.abs().double()
        self._add(LinearJob(w, b, "relu", head=head), x, self._out(-(-width // 8) * 8), want, room)
        self.logits += want @ head.double().T

    def _norm(self, fields: int, dim: int) -> None:
        weight, bias, width = normal(self.rng, dim), normal(self.rng, dim), fields * dim
        x = self._out(-(-width // 8) * 8)
        x[: self.rows, :width] = normal(self.rng, self.rows, width).to(self.dtype)
        want = normed(x[:, :width].double(), fields, 1e-3, weight, bias)
        room = 2 * (4 + 8 * weight.abs() + bias.abs()).double().repeat(fields).expand(self.bucket, -1)
        self._add(NormJob(fields, dim, 1e-3, weight, bias), x, self._out(x.shape[1]), want, room)

    def _fm(self) -> None:
        x = put(self.rng, self.bucket, 40, self.dtype, "cpu")
        v = x[:, 8:40].double().reshape(self.bucket, 4, 8)
        want = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        self._add(FmJob(8, 4, 8), x, self._out(1, torch.float32), want, 100 * torch.ones_like(want))


@pytest.mark.covering(1)
@pytest.mark.bulk
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_jobs_of_any_depth_are_computed_side_by_side_by_blocks_alone_and_by_clusters(seed, precision, monkeypatch, run_folder):
    from kernels.waves import wave

    host_cuda.put_under(monkeypatch, wave, run_folder)
    d = Drawn(seed, precision)
    own = wave.Wave(d.jobs, d.bias, precision, torch.device("cpu"))
    clustered = CLUSTERED_TILES[seed % 4], CLUSTERED_TILES[4 + seed % 3]
    tiles = [TILES[0], *(replace(t, cluster=int(d.rng.choice([2, 4, 8]))) for t in (TILES[0], *clustered))]
    for tile in [t for t in tiles if precision != "fp32" or not isinstance(t, WideTile)]:
        scores, done = torch.full((d.bucket, d.tasks), torch.nan), torch.zeros(-(-d.bucket // 8), dtype=torch.int32)
        words = words_of_another_batch(d.bucket * own.most_slots * d.tasks, "cpu")
        for given in d.given:
            given.out.fill_(torch.nan)
        for batch in (7, 8):  # what one leaves is not what the next one waits for
            state = lane_state(d.rows, "cpu", batch_number=batch)
            own.run(d.given, d.bucket, HeadOperands([], scores, done, words), state, tile)
        for job, (out, want, room) in zip(d.jobs, d.checks, strict=True):
            off = (out[: d.rows].double() - want[: d.rows]).abs()
            assert (off <= 2 * EPS[precision] * room[: d.rows] + 1e-5).all(), (tile.name, job)
            assert out[d.rows :].isnan().all(), "padding"
        want = torch.sigmoid(d.logits + d.bias.double())[: d.rows]
        assert ((scores[: d.rows].double() - want).abs() < OFF[precision]).all(), tile.name
