"""Attention over a row's fields on a CPU: field_attention.c, or `reference.field_attention` where that could not be built."""

import ctypes
from collections.abc import Sequence

import torch

from kernels import reference
from kernels.cpu.openmp_pool import pool_arguments
from kernels.runtime.c_build import cpu_library

_MOST_FIELDS, _MOST_DIM, _MOST_SIZE, _LANES = 64, 64, 32, 16  # of field_attention.c

Projection = tuple[torch.Tensor, torch.Tensor | None]  # weight[heads * size, dim], bias[heads * size]


class CpuFieldAttention:
    """One layer with its weights. Safe to use from several threads.

    Args:
        projections: Q, K, V, and R if there is a residual.
        scale: of the logits.
    """

    def __init__(self, fields: int, heads: int, projections: Sequence[Projection], scale: float, activation: str) -> None:
        width, dim = projections[0][0].shape
        size = width // heads
        self._plain = fields, heads, projections, scale, activation
        fits = fields <= _MOST_FIELDS and dim <= _MOST_DIM and size <= _MOST_SIZE
        self._library = cpu_library() if fits else None
        self._width, self._out_width, self._activation = fields * dim, fields * width, activation
        biases = any(bias is not None for _, bias in projections)
        query, *others = (_by_head(weight, bias if biases else None, heads, biases) for weight, bias in projections)
        self._queries = (query.double() * scale).float().contiguous()
        self._others = torch.cat(others, 1).transpose(1, 2).contiguous()
        padded, inputs = query.shape[1:]
        self._numbers = fields, dim, inputs, heads, size, padded, len(others), activation == "relu"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, fields * heads * size] from x[rows, fields * dim].

        Raises:
            ValueError: x is not so wide.
        """
        x, library = x.float(), self._library
        if x.shape[1] != self._width:
            raise ValueError(f"field attention: got x {tuple(x.shape)}, expected {self._width} columns")
        if library is None or x.stride(1) != 1:
            return reference.field_attention(x, *self._plain)
        out = torch.empty(len(x), self._out_width)
        pointers = x.data_ptr(), self._queries.data_ptr(), self._others.data_ptr(), out.data_ptr()
        numbers = *pointers, x.stride(0), *self._numbers
        library.dpi_field_attention((ctypes.c_int64 * len(numbers))(*numbers), len(x), *pool_arguments())
        return out if self._activation in ("identity", "relu") else reference.activate_(out, self._activation)


def _by_head(weight: torch.Tensor, bias: torch.Tensor | None, heads: int, biases: bool) -> torch.Tensor:
    """[heads, size in whole vectors, dim (and 1: the bias)] with zeros beyond."""
    size, dim = len(weight) // heads, weight.shape[1]
    wide = torch.zeros(heads, -(-size // _LANES) * _LANES, dim + biases)
    wide[:, :size, :dim] = weight.float().reshape(heads, size, dim)
    if bias is not None:
        wide[:, :size, dim] = bias.float().reshape(heads, size)
    return wide
