"""Which ways count as good as the fastest, where the test says how long each takes."""

from contextlib import nullcontext

import pytest
import torch

from kernels.runtime import fastest


class Graph:
    def replay(self):
        pass

    def reset(self):
        pass


@pytest.mark.parametrize(
    ("ms", "names"),
    [
        ({"a": 1.0, "b": 1.03, "c": 1.05}, ["a", "b"]),
        ({"a": 1.05, "b": 1.03, "c": 1.0}, ["c", "b"]),
        ({"a": 1.03, "b": 1.02, "c": 1.01, "d": 1.0}, ["d", "c", "b"]),  # three at most
        ({"a": 1.0}, ["a"]),
    ],
)
def test_ways_within_4_percent_are_as_good_the_best_first(monkeypatch, ms, names):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(fastest, "_tuning_stream", lambda device: None)
    monkeypatch.setattr(fastest, "launched_ms", lambda ways, stream: dict.fromkeys(ways, 1.0))
    monkeypatch.setattr(fastest, "_captured", lambda way, repeats: Graph())
    monkeypatch.setattr(fastest, "least_ms", lambda graphs, stream, rounds: ms)
    ways = dict.fromkeys(ms, lambda: None)
    assert fastest.ranked(ways) == names
    assert fastest.fastest(ways) == names[0]
