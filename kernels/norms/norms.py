"""Softmax, layer norm and choices of rows that lie one after the other, by norms.c."""

import ctypes
from collections.abc import Sequence
from functools import partial

import torch

from kernels.cpu.openmp_pool import pool_arguments
from kernels.runtime.c_build import cpu_library


class RowNorm:
    """A layer norm, or without `eps` a softmax, of rows float32[.., width] that stay where they are.

    Args:
        weight, bias: of a layer norm, float32[width] each, or None.

    Raises:
        ValueError: tensors that are not so, or `cpu_library` is None.
    """

    def __init__(
        self, x: torch.Tensor, out: torch.Tensor, width: int, eps: float | None = None,
        weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        library, given = cpu_library(), [t for t in (x, out, weight, bias) if t is not None]
        fits = all(t.is_contiguous() and t.dtype == torch.float32 for t in given) and x.numel() == out.numel()
        if library is None or not fits or x.numel() % width or any(t.numel() != width for t in given[2:]):
            got = [(tuple(t.shape), t.dtype) for t in given]
            raise ValueError(f"row norm: got {got}, expected contiguous float32 in rows of {width}, and a C compiler")
        self._held, rows = given, x.numel() // width
        if eps is None:
            self._run = partial(library.dpi_softmax, x.data_ptr(), rows, width, out.data_ptr())
        else:
            w, b = (None if t is None else t.data_ptr() for t in (weight, bias))
            self._run = partial(library.dpi_layer_norm, x.data_ptr(), rows, width, w, b, eps, out.data_ptr())

    def __call__(self) -> None:
        """Writes `out`, which may be `x`."""
        self._run(*pool_arguments())


class RowChoice:
    """`yes` where `condition` is not 0, else `no`; tensors that stay where they are.

    Args:
        of: condition, yes and no, float32 of the shape of `out`, with strides of 0 or 1 along the last dimension.
        out: contiguous float32[n, L, dim].

    Raises:
        ValueError: tensors that are not so, or `cpu_library` is None.
    """

    def __init__(self, of: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        library = cpu_library()
        fits = out.dim() == 3 and out.is_contiguous() and all(t.shape == out.shape and t.stride(2) in (0, 1) for t in of)
        if library is None or not fits or any(t.dtype != torch.float32 for t in (*of, out)):
            got = [(tuple(t.shape), t.stride(), t.dtype) for t in (*of, out)]
            raise ValueError(f"row choice: got {got}, expected float32 of one shape, three dimensions, and a C compiler")
        strides = (ctypes.c_int64 * 12)(*(n for t in of for n in (t.data_ptr(), *t.stride())))
        self._held = *of, out, strides
        self._run = partial(library.dpi_choice, ctypes.addressof(strides), *out.shape, out.data_ptr())

    def __call__(self) -> None:
        """Writes `out`."""
        self._run(*pool_arguments())
