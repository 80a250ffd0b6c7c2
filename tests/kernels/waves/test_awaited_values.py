"""What blocks of a launch leave for one another (awaited_values.cuh): whoever waits takes words of its own batch alone."""

import math
from functools import partial

import pytest
import torch

from kernels.waves import chain as chain_module
from kernels.waves import wave as wave_module
from kernels.waves.wave_arguments import WaveArguments
from kernels.waves.wave_jobs import HeadOperands, LinearJob, Operands
from kernels.waves.wave_tiles import TILES, WIDE_TILES
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state, words_of_another_batch
from tests.kernels.waves.test_chain import Model
from tests.kernels.waves.test_gates import Gated

FOR_EVER = "threads that wait for each other for ever"
ROWS = 40


@pytest.fixture
def altered(monkeypatch, run_folder):
    """Has a module launch its kernels on the host, with arguments that a function changes first."""

    def alter(module, change):
        def launch(kernel, blocks, threads, args, **others):
            change(*args)
            host_cuda.launch(kernel, blocks, threads, args, **others)

        host_cuda.put_under(monkeypatch, module, run_folder)
        monkeypatch.setattr(module, "launch", launch)

    return alter


def leave_a_gap(*args):
    """A slot between those of two layers, which no block has sums for."""
    wave = next(a for a in args if isinstance(a, WaveArguments))
    wave.jobs[2].slot += 1
    wave.head.slots += 1


@pytest.mark.parametrize("tile", [TILES[0], TILES[15], WIDE_TILES[0]], ids=lambda t: t.name)
def test_the_head_behind_a_wave_waits_for_every_sum_of_its_own_batch(altered, tile):
    altered(wave_module, leave_a_gap)
    layers = [LinearJob(torch.ones(n, 8), None, head=torch.ones(1, n) / n / 8) for n in (8, 6 * tile.columns)]
    other = LinearJob(torch.ones(8, 8), None)  # of which the head reads and awaits nothing
    wave = wave_module.Wave([layers[0], other, layers[1], other], torch.tensor([-2.0]), "tf32", torch.device("cpu"))
    x, scores, done = torch.ones(ROWS, 8), torch.zeros(ROWS, 1), torch.zeros(5, dtype=torch.int32)
    given = [Operands(x, out) for out in (None, torch.empty(ROWS, 8)) * 2]
    words = words_of_another_batch(ROWS * 8, "cpu")
    run = partial(wave.run, given, ROWS, HeadOperands([], scores, done, words), lane_state(ROWS, "cpu"), tile)
    with pytest.raises(AssertionError, match=FOR_EVER):
        run()
    assert (scores == 0).all()
    assert (done == 0).all()
    words[1::8] = 7 << 32 | 0x3F000000  # a half, of this batch
    run()
    assert (scores - 1 / (1 + math.exp(-0.5))).abs().max() < 1e-6
    assert (done == 7).all()


@pytest.mark.bulk
@pytest.mark.parametrize(
    ("make", "links"),
    [(partial(Gated, 3, 8, 16), range(11)), (partial(Model, 8, 16, 1), (2, 3))],
    ids=["layers, norms, gates, a mixture and sums of the head", "logits"],
)
def test_a_link_waits_for_all_that_it_reads_of_its_own_batch(altered, make, links):
    silent, elsewhere = [], torch.zeros(4096, dtype=torch.int64)

    def silence(chain, _state):
        for link in silent:
            chain.links[link].out, chain.links[link].head = elsewhere.data_ptr(), 0

    altered(chain_module, silence)
    model = make(precision="tf32", device="cpu")
    model.run(3, 3, 1)
    for batch, link in enumerate(links, 2):
        silent[:] = [link]
        with pytest.raises(AssertionError, match=FOR_EVER):
            model.run(3, 3, batch)
    silent.clear()
    model.run(3, 3, batch + 1)


@pytest.mark.parametrize(
    ("words", "got"),
    [
        (torch.zeros(ROWS * 2 * 2 - 1, dtype=torch.int64), "159 words of torch.int64"),
        (torch.zeros(ROWS * 2 * 2), "160 words of torch.float32"),
    ],
)
def test_a_head_wants_a_word_for_each_sum_of_each_task(altered, words, got):
    altered(wave_module, lambda *_: pytest.fail("launched"))
    layer = LinearJob(torch.ones(8, 8), None, head=torch.ones(2, 8))
    wave = wave_module.Wave([layer, layer], torch.zeros(2), "tf32", torch.device("cpu"))
    head = HeadOperands([], torch.zeros(ROWS, 2), torch.zeros(5, dtype=torch.int32), words)
    assert wave.most_slots == 2
    with pytest.raises(ValueError, match=f"wave head: got {got}, expected 160 of torch.int64"):
        wave.run([Operands(torch.ones(ROWS, 8), None)] * 2, ROWS, head, lane_state(ROWS, "cpu"), TILES[0])


def test_a_chain_fits_beside_what_its_kernel_has_of_shared_memory_itself(monkeypatch):
    from kernels.waves.chain_links import ChainHead, Link

    layer = LinearJob(torch.ones(8, 8), None, head=torch.ones(1, 8))
    chain = chain_module.Chain([Link(layer)], ChainHead(torch.zeros(1)), "fp32", torch.device("cpu"))
    asked = chain._shared_bytes(8)
    for limit, fits in ((asked + 1023, False), (asked + 1024, True)):
        monkeypatch.setattr(chain_module, "shared_limit", lambda _, limit=limit: limit)
        assert chain.fits(8) == fits
