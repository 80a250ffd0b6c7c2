"""What a wave's `tune` keeps beside its choice; the ranking is the test's, as it is of no GPU."""

from contextlib import nullcontext

import pytest
import torch

from kernels.waves import wave as module
from kernels.waves.wave import Wave
from kernels.waves.wave_jobs import LinearJob, Operands
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state

ROWS = 64


@pytest.fixture
def rankings(monkeypatch, run_folder):
    """How many ways `tune` had ranked, at each of its calls: in reverse, the first three."""
    calls = []
    host_cuda.put_under(monkeypatch, module, run_folder)
    monkeypatch.setattr(module, "overlapping", nullcontext)
    monkeypatch.setattr(Wave, "bound", lambda self, *_: None)
    monkeypatch.setattr(module, "ranked", lambda ways: calls.append(len(ways)) or [*ways][::-1][:3])
    return calls


def tuned(found, recalled=None):
    wave = Wave([LinearJob(torch.ones(64, 64), None)], None, "tf32", torch.device("cpu"))
    if recalled:
        wave.recalled[ROWS] = recalled
    x, out = torch.ones(ROWS, 64), torch.ones(ROWS, 64)
    wave.tune(found, [Operands(x, out)], ROWS, None, lane_state(ROWS, "cpu"))
    return wave


def test_a_wave_keeps_what_was_as_good_as_its_choice_and_may_take_that(rankings):
    wave = tuned({})
    first, *others = [*wave.ways(ROWS)][::-1][:3]
    assert (wave.choices, wave.tied) == ({ROWS: first}, {ROWS: others})
    assert wave.choose(ROWS, others[0]) == first
    assert wave.choices == {ROWS: others[0]}


def test_a_wave_like_another_is_ranked_once_and_has_the_same_others(rankings):
    found = {}
    one, two = tuned(found), tuned(found)
    assert rankings == [len(one.ways(ROWS))]
    assert (one.choices, one.tied) == (two.choices, two.tied)


def test_a_recalled_choice_has_no_others(rankings):
    name = next(iter(tuned({}).ways(ROWS)))
    rankings.clear()
    wave = tuned({}, recalled=name)
    assert (wave.choices, wave.tied, rankings) == ({ROWS: name}, {ROWS: []}, [])
