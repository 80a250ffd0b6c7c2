"""Which of several ways to compute the same is the fastest on this GPU, by device time. Knows nothing of what they compute."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache

import torch

from kernels.runtime.gc_pause import gc_paused
from kernels.runtime.launch import own_stream

Ways = Mapping[str, Callable[[], object]]
Found = dict[Hashable, list[str]]  # the fastest ways by what is computed: layers that are alike are timed once

_REPEATS, _ROUNDS = 10, 5
_ENOUGH_MS = 0.3  # of a replay: long kernels need no ten launches
# How far behind the best one a way is given up: launched once, when Python's launch is in the time, and replayed.
_LAUNCHED, _LAUNCH_MS, _REPLAYED = 2.0, 0.05, 1.25
_TIED, _MOST_TIED = 1.04, 3  # how far behind the best one a way is as good, and how many are


def fastest(ways: Ways) -> str:
    """The name of the way that takes the least device time."""
    return ranked(ways)[0]


def ranked(ways: Ways) -> list[str]:
    """The names of the way that takes the least device time and of those as good, the best first. Most are far behind, and
    launched but three times; the others are captured in a graph each, several times over, and replayed.
    """
    stream = _tuning_stream(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        for way in ways.values():
            way()  # loads what it needs
        once = launched_ms(ways, stream)
        least = min(once.values())
        repeats = max(2, min(_REPEATS, int(_ENOUGH_MS / max(least, 1e-6))))
        near = [name for name in ways if once[name] <= _LAUNCHED * least + _LAUNCH_MS]
        graphs = {name: _captured(ways[name], repeats) for name in near}
        for graph in graphs.values():
            graph.replay()
        best = least_ms(graphs, stream, _ROUNDS)
    for graph in graphs.values():
        graph.reset()
    names = sorted(best, key=lambda name: best[name])
    return [name for name in names[:_MOST_TIED] if best[name] <= _TIED * best[names[0]]]


def launched_ms(ways: Ways, stream: torch.cuda.Stream) -> dict[str, float]:
    """Device time of each way launched alone, the lesser of two. As for `least_ms`, who shares the GPU may have this wait."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = dict.fromkeys(ways, float("inf"))
    stream.synchronize()
    for _ in range(2):
        for name, way in ways.items():
            start.record(stream)
            way()
            end.record(stream)
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end))
    return best


def least_ms(graphs: Mapping[str, torch.cuda.CUDAGraph], stream: torch.cuda.Stream, rounds: int) -> dict[str, float]:
    """Device time of each graph's quietest replay. Who shares the GPU with others may have this wait for a turn.

    Rounds go over all graphs in turn, so that a clock that is still rising favours none; but for those clearly behind.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = dict.fromkeys(graphs, float("inf"))
    for _ in range(rounds):
        least = min(best.values())
        for name, graph in graphs.items():
            if best[name] > _REPLAYED * least:
                continue
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end))
    return best


def _captured(way: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with gc_paused():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(repeats):
                way()
        finally:  # the stream serves later warm-ups too
            graph.capture_end()
    return graph


@lru_cache
def _tuning_stream(device: int) -> torch.cuda.Stream:
    return own_stream(torch.device("cuda", device))
