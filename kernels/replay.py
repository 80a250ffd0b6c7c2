"""Replays of captured CUDA graphs, from host memory to host memory."""

import ctypes
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from kernels import native

_CALLS = ("cudaGraphLaunch", "cudaStreamSynchronize", "cudaGetDevice", "cudaSetDevice")


def replay(
    exec_: int, stream: int, device: int, done: npt.NDArray[np.int32] | None, cuda: ctypes.CDLL | None = None
) -> Callable[[int], None]:
    """A function that launches a graph and returns when its scores lie in host memory; the GIL is free meanwhile.

    It takes the number of words of `done` to look at, and raises RuntimeError if CUDA refuses the launch or the device failed.

    Args:
        exec_: a cudaGraphExec_t. stream: a cudaStream_t of the device of this index.
        done: int32[words] in pinned memory that outlives the function. A replay writes a number into as many words as it has
            rows for, the first always among them, one more than the last replay's; None: the graph writes no such words. They
            are looked at for 2 ms, unless others want the core; then the driver waits.
        cuda: CUDA's runtime; by default torch's, whose calls its profiler sees.
    """
    functions, cuda = native.blocks(), cuda or _runtime()
    if functions is None or cuda is None:
        return lambda words: _plain(exec_, stream, device)
    calls = [ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in _CALLS]
    given = struct.pack("7Pq", *calls, exec_, stream, 0 if done is None else done.ctypes.data, device)

    def run(words: int) -> None:
        if code := functions.replay(given, words):
            raise RuntimeError(f"graph replay: got CUDA error {code}")

    return run


def _plain(exec_: int, stream: int, device: int) -> None:
    """The same without C; slower, as the driver's wait is."""
    import cupy

    with cupy.cuda.Device(device):  # the current device is each thread's own
        try:
            cupy.cuda.runtime.graphLaunch(exec_, stream)
        finally:  # also of an interrupt: nobody may go on with a graph in flight
            cupy.cuda.runtime.streamSynchronize(stream)


@cache
def _runtime() -> ctypes.CDLL | None:
    """The one that torch has loaded; None where it has it within itself."""
    with suppress(OSError):
        return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    return None
