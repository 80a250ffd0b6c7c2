"""Launches a compiled kernel on torch's current stream, maps of its matrices, and the checks that every launcher shares."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
MAP_WORDS = 16
_MAP_TYPES = {torch.bfloat16: 9, torch.float32: 7, torch.float8_e4m3fn: 0}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128, _PROMOTE_256 = 3, 3
WARP_ROWS = 8  # rows of a block of 256 threads, where a warp has a row

_STREAMS: dict[int, list[torch.cuda.Stream]] = {}  # by device: those that were given back


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A CUDA stream that nobody else has until it is given back (`give_back`).

    torch.cuda.Stream() hands out 32 in turn, and torch keeps one cuBLAS workspace a stream: two lanes that replay graphs
    captured on one stream would write into one workspace at the same time. These are never destroyed: doing so crashed the
    process later, as torch's allocator and its workspaces go on naming a stream that once was used.
    """
    import cupy

    index = device.index or 0
    free = _STREAMS.setdefault(index, [])
    if free:
        return free.pop()
    with cupy.cuda.Device(index):
        pointer = cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking)
    return torch.cuda.ExternalStream(pointer, device=torch.device("cuda", index))  # type: ignore[no-untyped-call]


def give_back(streams: list[torch.cuda.Stream], device: torch.device) -> None:
    """For idle streams whose captured graphs are gone."""
    _STREAMS.setdefault(device.index or 0, []).extend(streams)


def copy_to_device(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Puts a copy of pinned memory on a stream, which may be captured: torch's own asks whose memory it is, and records it."""
    from cupy.cuda import runtime

    if source.nbytes:
        runtime.memcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, runtime.memcpyHostToDevice, stream.cuda_stream)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a union of 64 bytes behind its name."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


def _attribute(key: int, *value: int) -> _Attribute:
    return _Attribute(key, 0, (ctypes.c_uint * 16)(*value))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_SHARED_OPTIN = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_OVERLAP = ContextVar("overlap", default=False)


@contextmanager
def overlapping() -> Iterator[None]:
    """Lets each kernel launched here start before the one ahead of it on the stream is done (programmatic dependent launch).

    Our kernels wait themselves, before they touch what others write. Only for work on one stream, and GPUs from sm_90 on.

    Ambient, as torch's current stream is, and set beside it by who owns the stream: it says how work follows other work there.
    As an argument it would go through every operator and launcher, of which none could decide it.
    """
    token = _OVERLAP.set(torch.cuda.get_device_capability()[0] >= 9)
    try:
        yield
    finally:
        _OVERLAP.reset(token)


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block may have if it asks: 227 KiB on an H200, 99 KiB on sm_86, sm_89 and sm_120."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(_SHARED_OPTIN, device.index or 0))


@lru_cache(maxsize=1)
def driver() -> Any:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")  # what CuPy loaded already


def launch(
    kernel: Any,
    blocks: int | tuple[int, int],
    threads: int,
    args: tuple[object, ...],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> None:
    """Puts a kernel on torch's current stream (also while that stream is being captured).

    Args:
        args: int (a pointer), np.int32, or a ctypes structure that the kernel takes by value.
        cluster: neighbouring blocks that run at the same time and may read each other's shared memory (sm_90 on): at most 8.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    values = [a if isinstance(a, ctypes.Structure) else _scalar(a) for a in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    attributes = (_Attribute * 2)(_attribute(_SERIALIZATION, int(_OVERLAP.get())), _attribute(_CLUSTER, cluster, 1, 1))
    x, y = (blocks, 1) if isinstance(blocks, int) else blocks
    stream = torch.cuda.current_stream().cuda_stream
    count = 2 if cluster > 1 else 1  # of attributes: GPUs before sm_90 know no clusters
    config = _Config((x, y, 1), (threads, 1, 1), shared_bytes, stream, ctypes.addressof(attributes), count)
    code = driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(kernel.kernel.ptr), pointers, None)
    if code != 0:
        raise RuntimeError(f"launch of {kernel.name}: got CUDA error {code} for {blocks} blocks of {threads} threads")


def _scalar(value: object) -> ctypes.c_int32 | ctypes.c_uint64:
    if isinstance(value, np.int32):
        return ctypes.c_int32(int(value))
    if isinstance(value, int):
        return ctypes.c_uint64(value)
    raise TypeError(f"kernel argument: got {type(value).__name__}, expected a pointer (int), np.int32 or a ctypes structure")


def tensor_map(matrix: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """128 bytes by which the tensor memory accelerator (sm_90 on) copies tiles of `rows` rows x 128 bytes of a matrix into
    shared memory; beyond its edges tiles read as zero.

    Args:
        matrix: bfloat16, float32 or float8_e4m3fn (copied as bytes) [r, c] on a GPU, consecutive columns, rows 16-byte aligned.

    Raises:
        RuntimeError: CUDA refuses it, say for its alignment.
    """
    room = (ctypes.c_uint64 * (MAP_WORDS + 8))()
    aligned = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    size = matrix.element_size()
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), _MAP_TYPES[matrix.dtype], 2, ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(matrix.shape[1], matrix.shape[0]), (ctypes.c_uint64 * 1)(matrix.stride(0) * size),
        (ctypes.c_uint32 * 2)(128 // size, rows), (ctypes.c_uint32 * 2)(1, 1), 0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    if code != 0:
        raise RuntimeError(f"tensor map of {tuple(matrix.shape)}, strides {matrix.stride()}: got CUDA error {code}")
    return (ctypes.c_uint64 * MAP_WORDS).from_buffer_copy(ctypes.string_at(aligned, MAP_WORDS * 8))


def four_columns_a_thread(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """The blocks and threads of a kernel whose threads each take 4 columns of one row."""
    threads = min(256, -(-width // 4 // 32) * 32 or 32)
    return (rows, -(-width // (4 * threads))), threads


def type_name(dtype: torch.dtype) -> str:
    """The C type of a float tensor.

    Raises:
        TypeError: neither float32 nor bfloat16 nor float8_e4m3fn.
    """
    if dtype not in _TYPES:
        raise TypeError(f"kernel operand: got {dtype}, expected torch.float32, torch.bfloat16 or torch.float8_e4m3fn")
    return _TYPES[dtype]


def check_rows(name: str, tensor: torch.Tensor, rows: int, width: int) -> None:
    """A CUDA (or pinned) matrix with consecutive columns and at least `rows` rows and `width` columns.

    Raises:
        ValueError: it is not.
    """
    if tensor.dim() != 2 or tensor.shape[0] < rows or tensor.shape[1] < width or tensor.stride(1) != 1:
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, expected [>= {rows}, >= {width}] with "
            f"consecutive columns"
        )


def check_dense(name: str, tensor: torch.Tensor, rows: int, width: int, dtype: torch.dtype) -> None:
    """Such a matrix as products read it: of this dtype, its rows aligned to 16 bytes.

    Raises:
        ValueError: it is not.
    """
    if tensor.dtype != dtype or (tensor.stride(0) * tensor.element_size()) % 16:
        got = f"{tensor.dtype}, strides {tensor.stride()}"
        raise ValueError(f"{name}: got {got}, expected 16-byte aligned rows of {dtype}")
    check_rows(name, tensor, rows, width)
