"""Times calls: several of them in interleaved rounds, and work captured in a CUDA graph by device time. Knows no systems."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch

from kernels.runtime.gc_pause import gc_paused

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Host time of one call in microseconds, and how many calls were timed."""

    p50_us: float
    p99_us: float
    calls: int


def times_of(seconds: list[float]) -> Times:
    """Median and 99th percentile of single calls."""
    ordered = sorted(seconds)
    return Times(median(ordered) * 1e6, ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e6, len(ordered))


def interleaved(
    calls: Mapping[str, Callable[[int], object]],
    seconds: float,
    *,
    warmups: int = 10,
    least: int = 4,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Times]:
    """Times each call(i), i = 0, 1, .., for about `seconds`; one that returns a float has timed itself, in seconds.

    Rounds go over all of them, every other one backwards, so that a clock that is still rising (or a neighbour's noise) favours
    none. around: entered for each round.
    """
    spent: dict[str, list[float]] = {name: [] for name in calls}
    count = {}
    for name, call in calls.items():
        took = []
        for i in range(warmups):
            begin = time.perf_counter()
            call(i)
            took.append(time.perf_counter() - begin)
            if i >= 2 and sum(took) > seconds:
                break
        once = median(took)
        count[name] = max(least, min(2000, int(seconds / _ROUNDS / max(once, 1e-7))))
    with gc_paused():
        for turn in range(_ROUNDS):
            with around():
                for name in list(calls)[:: -1 if turn % 2 else 1]:
                    call, own = calls[name], spent[name]
                    for i in range(turn * count[name], (turn + 1) * count[name]):
                        start = time.perf_counter()
                        itself = call(i)
                        own.append(itself if isinstance(itself, float) else time.perf_counter() - start)
    return {name: times_of(own) for name, own in spent.items()}


class Captured:
    """Work captured by hand in one CUDA graph. Launched by its raw handle: torch's own replay costs 15 us more a call.

    Owns graph and stream. `work` must issue on the current stream, and what it reads and writes must outlive this (`holds`).
    """

    def __init__(self, work: Callable[[], object], holds: tuple[object, ...] = ()) -> None:
        from cupy.cuda import runtime

        self.holds = (work, *holds)
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(3):  # compiles, tunes and loads whatever a capture forbids
                work()
            self.stream.synchronize()
            # Not torch.cuda.graph, which collects garbage and empties the allocator's cache for each capture.
            with gc_paused():
                self._graph.capture_begin(capture_error_mode="thread_local")
                self.holds = (*self.holds, work())
                self._graph.capture_end()
        self.handle = handle = self._graph.raw_cuda_graph_exec()
        raw = self.stream.cuda_stream
        self.launch: Callable[[], None] = lambda: runtime.graphLaunch(handle, raw)
        self._wait: Callable[[], None] = lambda: runtime.streamSynchronize(raw)
        self()

    def __call__(self) -> None:
        """Launches the graph and waits for it."""
        self.launch()
        self._wait()

    def device_us(self, rounds: int = 5) -> float:
        """Device time of one replay, launched back to back for some 5 ms: the median of the rounds."""
        repeats = max(2, min(50, int(5000 / self.replays_us(2))))
        return median(self.replays_us(repeats) for _ in range(rounds))

    def replays_us(self, repeats: int) -> float:
        """Device time of one of so many replays."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        for _ in range(repeats):
            self.launch()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / repeats

    def close(self) -> None:
        """Releases the graph and its memory."""
        self._wait()
        self._graph.reset()
        self.holds = ()
