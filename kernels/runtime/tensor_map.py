"""Descriptors by which the tensor memory accelerator (sm_90 on) copies tiles of a matrix into shared memory."""

import ctypes

import torch

from kernels.runtime.launch import driver

WORDS = 16
_TYPES = {torch.bfloat16: 9, torch.float32: 7, torch.float8_e4m3fn: 0}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128, _PROMOTE_256 = 3, 3


def tensor_map(matrix: torch.Tensor, rows: int) -> ctypes.Array[ctypes.c_uint64]:
    """128 bytes that describe tiles of `rows` rows x 128 bytes of a matrix; beyond its edges tiles read as zero.

    Args:
        matrix: bfloat16, float32 or float8_e4m3fn (copied as bytes) [r, c] on a GPU, consecutive columns, rows 16-byte aligned.

    Raises:
        RuntimeError: CUDA refuses it, say for its alignment.
    """
    room = (ctypes.c_uint64 * (WORDS + 8))()
    aligned = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    size = matrix.element_size()
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), _TYPES[matrix.dtype], 2, ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(matrix.shape[1], matrix.shape[0]), (ctypes.c_uint64 * 1)(matrix.stride(0) * size),
        (ctypes.c_uint32 * 2)(128 // size, rows), (ctypes.c_uint32 * 2)(1, 1), 0, _SWIZZLE_128, _PROMOTE_256, 0,
    )  # fmt: skip
    if code != 0:
        raise RuntimeError(f"tensor map of {tuple(matrix.shape)}, strides {matrix.stride()}: got CUDA error {code}")
    return (ctypes.c_uint64 * WORDS).from_buffer_copy(ctypes.string_at(aligned, WORDS * 8))
