"""Target attention on a CPU: attention.c, or `reference.attention` where that could not be built or is not made for."""

import ctypes
from collections.abc import Sequence

import torch

from kernels import reference
from kernels.attention.attention_columns import AttentionColumns
from kernels.cpu.openmp_pool import pool_arguments
from kernels.runtime.c_build import cpu_library

_MOST_DIM, _MOST_UNITS, _MOST_LENGTH, _LANES = 128, 128, 1024, 16  # of attention.c
_ACTIVATIONS = ("identity", "relu", "sigmoid", "tanh", "leaky_relu", "prelu", "dice")
_OUTPUTS = _ACTIVATIONS[:4]

AttentionLayer = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]


class CpuAttention:
    """One layer with its weights. Safe to use from several threads.

    Args:
        layers, last, activation, slope, output, softmax: as `reference.attention`.
    """

    def __init__(
        self,
        columns: AttentionColumns,
        layers: Sequence[AttentionLayer],
        last: tuple[torch.Tensor, torch.Tensor],
        activation: str,
        slope: float,
        output: str,
        softmax: bool,
    ) -> None:
        self._columns, self._plain = columns, (layers, last, activation, slope, output, softmax)
        units = [len(bias) for _, bias, _ in layers]
        fits = columns.dim <= _MOST_DIM and max(units) <= _MOST_UNITS and columns.length <= _MOST_LENGTH
        known = activation in _ACTIVATIONS and output in _OUTPUTS
        self._library = cpu_library() if fits and known else None
        if self._library is None:
            return
        (first, _, _), *_ = layers
        of_query, of_key, of_product = (_turned(part, part.shape[1]) for part in reference.split_attention(first))
        inputs = [columns.dim, *(_padded(n) for n in units)]
        weights = [of_key, *(_turned(w, n) for (w, _, _), n in zip(layers[1:], inputs[1:], strict=False))]
        vectors = [[_turned(v[None].t(), 1) for v in (bias, *params)] for _, bias, params in layers]
        ends = _turned(last[0].t(), 1), torch.tensor([float(last[1]), slope])
        self._kept_alive = of_query, of_product, weights, vectors, ends
        of_layers = [
            (w.data_ptr(), *[v.data_ptr() for v in own], *[0] * (4 - len(own)), n, _padded(u))
            for w, own, n, u in zip(weights, vectors, inputs, units, strict=False)
        ]
        parts = list(zip(columns.dims, columns.queries, columns.keys, columns.pooled, strict=True))
        self._tables = [_numbers(rows) for rows in (parts, columns.kept, of_layers)]
        self._pointers = *map(ctypes.addressof, self._tables), *(t.data_ptr() for t in (of_query, of_product, *ends))
        kinds = _ACTIVATIONS.index(activation), _ACTIVATIONS.index(output), softmax
        self._counts = len(parts), len(columns.kept), len(layers), columns.length, columns.mask, columns.dim, *kinds

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, out_width] of x[rows, at least the columns' width]: what is kept of it, and the interest.

        Raises:
            ValueError: x is narrower.
        """
        x, columns = x.float(), self._columns
        if x.shape[1] < columns.width:
            raise ValueError(f"attention: got x {tuple(x.shape)}, expected at least {columns.width} columns")
        if self._library is None or x.stride(1) != 1:
            return self._plainly(x)
        out = torch.empty(len(x), columns.out_width)
        numbers = x.data_ptr(), out.data_ptr(), x.stride(0), columns.out_width, *self._pointers, *self._counts
        self._library.dpi_attention((ctypes.c_int64 * len(numbers))(*numbers), len(x), *pool_arguments())
        return out

    def _plainly(self, x: torch.Tensor) -> torch.Tensor:
        at, rows = self._columns, len(x)
        query = torch.cat([x[:, q : q + d] for q, d in zip(at.queries, at.dims, strict=True)], 1)
        spans = zip(at.keys, at.dims, strict=True)
        keys = torch.cat([x[:, k : k + at.length * d].reshape(rows, at.length, d) for k, d in spans], 2)
        mask = x[:, at.mask : at.mask + at.length] if at.mask >= 0 else None
        pooled = reference.attention(query, keys, mask, *self._plain)
        out = torch.empty(rows, at.out_width)
        for start, to, count in at.kept:
            out[:, to : to + count] = x[:, start : start + count]
        for part, to in zip(torch.split(pooled, list(at.dims), 1), at.pooled, strict=True):
            out[:, to : to + part.shape[1]] = part
        return out


def _padded(units: int) -> int:
    return -(-units // _LANES) * _LANES


def _turned(weight: torch.Tensor, inputs: int) -> torch.Tensor:
    """[inputs, units in whole vectors] of [units, at most so many], zeros beyond."""
    units, width = weight.shape
    wide = torch.zeros(inputs, _padded(units))
    wide[:width, :units] = weight.float().t()
    return wide


def _numbers(rows: Sequence[Sequence[int]]) -> ctypes.Array[ctypes.c_int64]:
    flat = [n for row in rows for n in row]
    return (ctypes.c_int64 * max(len(flat), 1))(*flat)
