"""Replays of captured CUDA graphs, from host memory to host memory."""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels import native
from kernels.launch import driver

_CALLS = ("cuGraphLaunch", "cuStreamSynchronize", "cuCtxGetCurrent", "cuCtxSetCurrent")


def replay(exec_: int, stream: int, done: npt.NDArray[np.int32] | None, cuda: Any = None) -> Callable[[int], None]:
    """A function that launches a graph and returns when its scores lie in host memory; the GIL is free meanwhile.

    It takes the number of words of `done` to look at, and raises RuntimeError if CUDA refuses the launch or the device failed.

    Args:
        exec_: a CUgraphExec. stream: a CUstream of the context that is current now.
        done: int32[words] in pinned memory that outlives the function. A replay writes a number into as many words as it has
            rows for, the first always among them, one more than the last replay's; None: the graph writes no such words. They
            are looked at for 2 ms, unless others want the core; then the driver waits.
        cuda: the driver's library.
    """
    cuda = cuda or driver()
    functions, context = native.blocks(), ctypes.c_void_p()
    _checked(cuda.cuCtxGetCurrent(ctypes.byref(context)))
    if functions is None:
        return lambda words: _plain(cuda, exec_, stream, context)
    calls = [ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in _CALLS]
    given = struct.pack("8P", *calls, context.value or 0, exec_, stream, 0 if done is None else done.ctypes.data)

    def run(words: int) -> None:
        _checked(functions.replay(given, words))

    return run


def _plain(cuda: Any, exec_: int, stream: int, context: ctypes.c_void_p) -> None:
    """The same without C; slower, as the driver's wait is."""
    theirs = ctypes.c_void_p()
    _checked(cuda.cuCtxGetCurrent(ctypes.byref(theirs)))
    try:
        _checked(cuda.cuCtxSetCurrent(context))
        _checked(cuda.cuGraphLaunch(ctypes.c_void_p(exec_), ctypes.c_void_p(stream)))
    finally:  # also of an interrupt: nobody may go on with a graph in flight
        code = cuda.cuStreamSynchronize(ctypes.c_void_p(stream))
        cuda.cuCtxSetCurrent(theirs)
    _checked(code)


def _checked(code: int) -> None:
    if code:
        raise RuntimeError(f"graph replay: got CUDA error {code}")
