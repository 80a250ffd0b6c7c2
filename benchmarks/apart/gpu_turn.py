"""Whose turn it is on a GPU that several processes prepare their work for: what is timed runs while nobody else launches."""

import fcntl
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any


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

    def at_once(self) -> bool:
        """Enters if nobody is in. The caller leaves by `__exit__`, as after `with`."""
        try:
            if not self._depth:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._since = time.perf_counter()
        except BlockingIOError:
            return False
        self._depth += 1
        return True


def inductor_takes_turns(turn: GpuTurn) -> None:
    """From now on Inductor times each of its choices in a turn of its own; it compiles them meanwhile as before."""
    from torch._inductor.runtime import benchmarking

    for kind in type(benchmarking.benchmarker).__mro__:
        for name in ("benchmark_gpu", "benchmark_many_gpu"):
            if name in vars(kind):
                setattr(kind, name, _in_turn(vars(kind)[name], turn))


def _in_turn(timed: Callable[..., Any], turn: GpuTurn) -> Callable[..., Any]:
    @wraps(timed)
    def call(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return timed(*args, **kwargs)

    return call
