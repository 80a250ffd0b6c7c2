"""Which way is the fastest, with ways whose work differs; on a GPU alone, whose clock it is."""

import pytest
import torch

from kernels.runtime import fastest as module
from kernels.runtime.fastest import fastest, least_ms

pytestmark = pytest.mark.gpu


def products(size, times, calls, name):
    a = torch.zeros(size, size, device="cuda")
    out = torch.zeros_like(a)

    def way():
        calls[name] = calls.get(name, 0) + 1
        for _ in range(times):
            torch.mm(a, a, out=out)

    return way


def test_the_way_with_the_least_work_is_found_and_those_far_behind_are_launched_three_times():
    calls = {}
    ways = {f"{n} products": products(1024, n, calls, f"{n} products") for n in (8, 1, 64)}
    assert fastest(ways) == "1 products"
    assert calls["64 products"] == 3
    assert calls["1 products"] > 3


def test_graphs_clearly_behind_are_replayed_once():
    calls, graphs, replays = {}, {}, {}
    stream = module._tuning_stream(0)
    with torch.cuda.stream(stream):
        for n in (1, 9):
            way = products(1024, n, calls, str(n))
            way()
            graphs[str(n)] = module._captured(way, 2)

    class Counted:
        def __init__(self, name):
            self.name = name

        def replay(self):
            replays[self.name] = replays.get(self.name, 0) + 1
            graphs[self.name].replay()

    with torch.cuda.stream(stream):
        best = least_ms({name: Counted(name) for name in graphs}, stream, 5)
    assert best["1"] < best["9"]
    assert replays == {"1": 5, "9": 1}
