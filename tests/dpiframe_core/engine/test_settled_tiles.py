"""Tiles that were as fast alone are tried in the program; times are what the test says a program takes with them."""

from contextlib import nullcontext

import pytest
import torch

from dpiframe_core.engine.cuda_bucket import settled
from kernels.runtime import fastest


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
