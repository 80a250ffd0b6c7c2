"""Tiles that were as fast alone are tried in the program; times are what the test says a program takes with them."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dpiframe_core.engine import cuda_lane
from dpiframe_core.engine.calibration import Calibration
from dpiframe_core.engine.cuda_bucket import settled
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.operators.cuda import CudaOperators
from kernels.runtime import fastest
from kernels.waves.wave import Wave


class OneWave:
    def __init__(self, name):
        self.name = name

    def choose(self, name):
        before, self.name = self.name, name
        return before


class Bucket:
    """A program with the tiles that its waves have now. As its graph it says how long it takes."""

    def __init__(self, graph):
        self.graph, self.released = graph, False

    def release(self):
        assert not self.released
        self.released = True


class Program:
    def __init__(self, waves, microseconds):
        self.waves, self.microseconds, self.captured = waves, microseconds, []

    def capture(self):
        self.captured.append(Bucket(self.microseconds[tuple(w.name for w in self.waves)]))
        return self.captured[-1]


@pytest.fixture(autouse=True)
def told_times(monkeypatch):
    monkeypatch.setattr(fastest, "least_ms", lambda graphs, stream, rounds: dict(graphs))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.parametrize(
    ("times", "tiles", "kept"),
    [
        ({"aa": 55, "ba": 45, "bb": 44}, "bb", 44),  # each is tried beside what was found so far
        ({"aa": 55, "ba": 55, "ab": 45}, "ab", 45),
        ({"aa": 55, "ba": 56, "ab": 60}, "aa", 55),
        ({"aa": 55, "ba": 54.5, "ab": 54.6}, "aa", 55),  # no more than noise
    ],
)
def test_a_program_keeps_the_tiles_that_it_is_fastest_with(times, tiles, kept):
    waves = [OneWave("a"), OneWave("a")]
    program = Program(waves, {tuple(names): t for names, t in times.items()})
    best = settled(program.capture(), [(w.choose, "b") for w in waves], program.capture, None)
    assert (best.graph, "".join(w.name for w in waves)) == (kept, tiles)
    assert len(program.captured) == 3
    assert [b.released for b in program.captured] == [b is not best for b in program.captured]


def test_a_program_whose_waves_have_no_other_tiles_is_not_captured_again():
    program = Program([OneWave("a")], {("a",): 55})
    own = program.capture()
    assert settled(own, [], program.capture, None) is own
    assert program.captured == [own]
    assert not own.released


def test_what_is_tied_for_a_bucket_is_told_once():
    wave = object.__new__(Wave)
    wave._choice, wave.tied = {64: "a", 128: "a"}, {64: ["b", "c"], 128: ["d"]}
    operators = SimpleNamespace(_kernels={"wave.0": wave, "another": object()})
    told = CudaOperators.tied(operators, 64)
    assert [name for _, name in told] == ["b", "c"]
    assert [take(name) for take, name in told] == ["a", "b"]
    assert (wave.choices, wave.tied) == ({64: "c", 128: "a"}, {128: ["d"]})
    assert CudaOperators.tied(operators, 64) == []


def test_a_lane_settles_the_program_that_it_keeps_when_the_others_are_released(monkeypatch):
    class Operators:
        def __init__(self, name):
            self.name = name

        def rough(self, rows):
            return False

        def tied(self, rows):
            return [self.name, rows]

    programs = {name: SimpleNamespace(name=name, operators=Operators(name)) for name in ("waves", "streams")}
    buckets = {name: Bucket(name) for name in programs}
    lane = SimpleNamespace(
        _known=lambda rows: None, _wanted=lambda rows: [*programs.values()], _tuned=lambda *_, brief: True, _capture=True,
        _captured=lambda program, rows, pool: buckets[program.name], _calibrations={}, _programs=programs, _streams=["stream"],
    )  # fmt: skip
    monkeypatch.setattr(cuda_lane, "_calibrated", lambda rows, captured: Calibration(rows, "streams", {}))
    asked = []
    monkeypatch.setattr(
        cuda_lane, "settled", lambda own, tied, capture, stream: asked.append((own, tied, capture(), stream)) or own
    )
    assert CudaLane._prepared(lane, 64, None) is buckets["streams"]
    assert asked == [(buckets["streams"], ["streams", 64], buckets["streams"], "stream")]
    assert (buckets["waves"].released, buckets["streams"].released) == (True, False)
