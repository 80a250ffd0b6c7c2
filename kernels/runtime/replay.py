"""Replays of captured CUDA graphs, from host memory to host memory."""

import ctypes
import logging
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.runtime import c_build
from kernels.runtime.cores import usable_cores
from kernels.runtime.launch import driver

log = logging.getLogger(__name__)


def stages() -> bool:
    """Whether `replay_batches` is there: C that could be built, and CUDA's runtime apart from torch."""
    return c_build.request_extension() is not None and _runtime() is not None


def copy_threads() -> int:
    """How many threads may help to copy a large batch: a fourth of the process's cores, none of few."""
    return min(usable_cores(), 32) // 4


def replay(
    exec_: int, stream: int, done: npt.NDArray[np.int32] | None, cuda: ctypes.CDLL | None = None
) -> Callable[[int], None]:
    """A function that launches a graph and returns when its scores lie in host memory; the GIL is free meanwhile.

    It takes the number of words of `done` to look at, must be called with the stream's device as the current one, and raises
    RuntimeError if CUDA refuses the launch or the device failed.

    Args:
        exec_: a cudaGraphExec_t. stream: a cudaStream_t.
        done: int32[words] in pinned memory that outlives the function. A replay writes a number into as many words as it has
            rows for, the first always among them, one more than the last replay's; None: the graph writes no such words. They
            are looked at for 2 ms, unless others want the core; then the driver waits.
        cuda: CUDA's runtime; by default torch's, whose calls its profiler sees.
    """
    functions, cuda = c_build.request_extension(), cuda or _runtime()
    if functions is None or cuda is None:
        return lambda words: _plain(exec_, stream)
    given = _given(exec_, stream, done, cuda)
    return lambda words: _check(cuda, functions.replay(given, words))


def replay_batches(
    graphs: Sequence[c_build.CapturedGraph],
    stream: int,
    done: npt.NDArray[np.int32] | None,
    stage: tuple[npt.NDArray[np.uint8], tuple[int, ...], tuple[tuple[int, int], ...]],
    carried: tuple[npt.NDArray[np.uint8] | None, int],
    layout: object,
    scores: npt.NDArray[np.float32],
    result: type[tuple[Any, ...]],
    *,
    threads: int = 0,
    cuda: ctypes.CDLL | None = None,
    libcuda: Any = None,
) -> Callable[[Sequence[object], bool], Any] | None:
    """A function of blocks, and of whether their rows are to be copied to the device first, that stages them for the smallest
    graph that holds them, replays it as `replay` does, and gives `result(a copy of scores[:rows], milliseconds, the graph's
    rows)`. Rows behind the blocks', up to the graph's, become padding. None where `stages` is false.

    What cannot be such a batch raises ValueError, TypeError or AttributeError, and then nothing was launched: a block of
    another layout or with a row of no context of its own, no rows, and more rows or contexts than the largest graph has.

    Args:
        graphs: rows, a cudaGraphExec_t, whether its lookup waits for its rows (wait_for_rows.cuh), which are copied while it
            starts, the same graph with its rows copied first, or 0, and `RowReader.given` of the first or (); by rows. With a
            reader a batch of one block whose rows lie in page-locked memory is read there, from some 16 KB of rows on.
        stage: RowBlock's buffer and places, where the graphs read, and its layout's sections.
        carried: Batch's, and how many bytes of a context's ids it has; None: there is none.
        layout: of all blocks. scores: float32[rows, tasks], where the graphs write. result: a type of named tuples.
        threads: that may help the caller to copy a large batch.
    """
    functions, cuda = c_build.request_extension(), cuda or _runtime()
    if functions is None or cuda is None:
        return None
    return functions.replay_batches(
        _given(0, stream, done, cuda), _address(cuda.cudaGetErrorString), tuple(graphs), threads, *stage, *carried, layout,
        scores, result, _given_driver(libcuda, graphs),
    )  # fmt: skip


def _given(exec_: int, stream: int, done: npt.NDArray[np.int32] | None, cuda: ctypes.CDLL) -> bytes:
    """Replay of module.h."""
    calls = map(_address, (cuda.cudaGraphLaunch, cuda.cudaStreamSynchronize))
    watched = (0, 0) if done is None else (done.ctypes.data, done.size)
    return struct.pack("5Pq", *calls, exec_, stream, *watched)


def _given_driver(libcuda: Any, graphs: Sequence[c_build.CapturedGraph]) -> bytes:
    """Driver of in_place.h, if some graph has a reader."""
    if not any(reader for *_, reader in graphs):
        return bytes(struct.calcsize("4P"))
    libcuda, context = libcuda or driver(), ctypes.c_void_p()
    if code := libcuda.cuCtxGetCurrent(ctypes.byref(context)):
        raise RuntimeError(f"context: got CUDA error {code}, expected that of this thread")
    calls = libcuda.cuGraphExecKernelNodeSetParams_v2, libcuda.cuPointerGetAttributes, libcuda.cuCtxSetCurrent
    return struct.pack("4P", *map(_address, calls), context.value or 0)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _check(cuda: ctypes.CDLL, code: int) -> None:
    if code:
        cuda.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"graph replay: got CUDA error {code}: {cuda.cudaGetErrorString(code).decode()}")


def _plain(exec_: int, stream: int) -> None:
    """The same without C; slower, as the driver's wait is."""
    from cupy.cuda import runtime

    try:
        runtime.graphLaunch(exec_, stream)
    finally:  # also of an interrupt: nobody may go on with a graph in flight
        runtime.streamSynchronize(stream)


@cache
def _runtime() -> ctypes.CDLL | None:
    """The one that torch has loaded; None where it has it within itself."""
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        log.info("%s: the driver waits for graphs, 2 to 3 us longer (%s)", name, error)
        return None
