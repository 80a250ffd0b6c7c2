"""Whose turn it is on a GPU that several processes prepare their work for: what is timed runs while nobody else launches."""

import fcntl
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.timing import Captured
from dpiframe_core.engine import cuda_lane
from kernels.runtime import fastest
from kernels.runtime.gc_pause import gc_paused

_LAUNCHES, _ROUNDS = 10, 5  # of a choice that Inductor asks the time of
_NOTHING_MS = 0.0005  # no kernel ends sooner: such a choice issues on a stream of its own


class GpuTurn:
    """A lock among processes, by a file. To be entered by one thread; entering again inside costs nothing.

    Waits for its process's own launches before it hands the GPU on.

    Attributes:
        held_s, waited_s: for how long, in all.
    """

    def __init__(self, path: Path, wait: Callable[[], None]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._wait, self._depth, self._since = wait, 0, 0.0
        self.held_s = self.waited_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            start = time.perf_counter()
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.perf_counter()
            self.waited_s += self._since - start
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            try:
                self._wait()
            finally:
                self.held_s += time.perf_counter() - self._since
                fcntl.flock(self._file, fcntl.LOCK_UN)


def takes_turns(turn: GpuTurn) -> None:
    """From now on this process times on the GPU in turns: Inductor's choices, those of our warm-up, and captured work."""
    timed = (fastest, "launched_ms"), (fastest, "least_ms"), (cuda_lane, "calibrated"), (Captured, "device_us")
    for where, name in timed:
        setattr(where, name, _in_turn(getattr(where, name), turn))
    from torch._inductor.runtime import benchmarking

    kind: Any = type(benchmarking.benchmarker)
    kind.benchmark_gpu = ReplayedChoices(turn, kind.benchmark_gpu).timing()


def _in_turn(timed: Callable[..., Any], turn: GpuTurn) -> Callable[..., Any]:
    @wraps(timed)
    def call(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return timed(*args, **kwargs)

    return call


class ReplayedChoices:
    """How long a choice of Inductor's takes, by a few replays in a turn.

    Inductor's own timing takes 10 ms and more, nearly all of it launches by Python. So a choice is captured beside other
    processes' work, as the peer will be. What cannot be captured is timed by `timed`, Inductor's own, in a longer turn.
    """

    def __init__(self, turn: GpuTurn, timed: Callable[..., Any]) -> None:
        self._turn, self._timed = turn, timed
        self._first: torch.cuda.CUDAGraph | None = None  # stays, and with it the memory that all captures share

    def timing(self) -> Callable[..., Any]:
        """In the place of `timed`, a method of Inductor's."""

        @wraps(self._timed)
        def benchmark_gpu(benchmarker: Any, choice: Callable[[], Any], **kwargs: Any) -> Any:
            stream = torch.cuda.current_stream()
            graph = None
            if kwargs.get("return_mode", "min") == "min" and stream != torch.cuda.default_stream():
                graph = self._captured(choice, stream)
            with self._turn:
                ms = fastest.least_ms({"": graph}, stream, _ROUNDS)[""] / _LAUNCHES if graph else 0.0
                if graph and graph is not self._first:
                    graph.reset()
                return ms if ms > _NOTHING_MS else self._timed(benchmarker, choice, **kwargs)

        return benchmark_gpu

    def _captured(self, choice: Callable[[], Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        """Some launches of a choice, which issues on `stream`; None if it does not allow that."""
        graph, pool = torch.cuda.CUDAGraph(), self._first.pool() if self._first else None
        try:
            choice()  # loads its module
            stream.synchronize()
            with gc_paused():
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    for _ in range(_LAUNCHES):
                        choice()
                finally:
                    graph.capture_end()
            graph.replay()
            stream.synchronize()
        except Exception:  # Inductor's own timing meets it again, and knows what to make of it
            return None
        self._first = self._first or graph
        return graph
