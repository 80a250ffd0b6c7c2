"""DIN's target attention on a GPU (attention.cu). See `reference.attention`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.dense.activation import KINDS, unit_params
from kernels.reference import split_attention
from kernels.runtime.launch import check_rows, launch, shared_limit, type_name
from kernels.runtime.source import kernel

_THREADS, _WARPS, _POSITIONS = 128, 4, 4
_STATIC_BYTES = 1024  # that the kernel has beside, rounded up


@dataclass(frozen=True, slots=True)
class AttentionColumns:
    """Where a row's parts lie. Each of `dims` is a part of the query and of the keys, whose sum is the keys' dim.

    length: of the sequence. queries, keys, pooled: the first column of each part's dims[i] in x, of its length * dims[i] in x,
    and of its interest in out. mask: the first of `length` columns of x, -1: none. kept: (x column, out column, count).
    """

    length: int
    dims: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    pooled: tuple[int, ...]
    mask: int
    kept: tuple[tuple[int, int, int], ...]

    @property
    def width(self) -> int:
        """Columns of x that are read."""
        own = [k + self.length * d for k, d in zip(self.keys, self.dims, strict=True)]
        own += [q + d for q, d in zip(self.queries, self.dims, strict=True)] + [at + n for at, _, n in self.kept]
        return max(*own, self.mask + self.length if self.mask >= 0 else 0)

    @property
    def out_width(self) -> int:
        return max(*(p + d for p, d in zip(self.pooled, self.dims, strict=True)), *(to + n for _, to, n in self.kept), 0)


class Attention:
    """A target attention with its weights on one device, float32 whatever x's dtype.

    Args:
        layers, out, activation, slope, output, softmax: as `reference.attention`.

    Raises:
        ValueError: a row does not fit into shared memory.
    """

    def __init__(
        self,
        columns: AttentionColumns,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]],
        out: tuple[torch.Tensor, torch.Tensor],
        activation: str,
        slope: float,
        output: str,
        softmax: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._columns, dim = columns, sum(columns.dims)
        units = [len(bias) for _, bias, _ in layers]
        self._weights = _packed(layers, out, activation, slope, dim).to(device)
        aligned, widest = -(-dim // 4) * 4, -(-max(units) // 4) * 4
        buffers = max(_WARPS * _POSITIONS * (aligned + 2 * widest), _THREADS + dim)
        fixed = 4 * (-(-columns.length // 4) * 4 + aligned + -(-units[0] // 4) * 4 + buffers)
        limit = shared_limit(device) - _STATIC_BYTES
        formed = fixed + 4 * aligned * (units[0] + 1) <= limit
        self._shared_bytes = fixed + (4 * aligned * (units[0] + 1) if formed else 0)
        if self._shared_bytes > limit:
            raise ValueError(f"attention: got {fixed} bytes of scores and buffers a row, expected <= {limit}")
        constants = {
            "X": type_name(dtype), "LENGTH": str(columns.length), "DIMS": _listed(columns.dims), "DIM": str(dim),
            "QUERIES": _listed(columns.queries), "KEYS": _listed(columns.keys), "POOLED": _listed(columns.pooled),
            "PARTS": str(len(columns.dims)), "MASK": str(columns.mask),
            "KEPT": ",".join(f"{{{_listed(k)}}}" for k in columns.kept) or "{0,0,0}",
            "UNITS": _listed(units), "LAYERS": str(len(units)), "ACTIVATION": str(KINDS[activation]),
            "OUTPUT": str(KINDS[output]), "SOFTMAX": str(int(softmax)), "FORMED": str(int(formed)),
        }  # fmt: skip
        self._function = kernel("interaction/attention", "attention", constants, device.index or 0)
        if self._function.max_dynamic_shared_size_bytes < self._shared_bytes:
            self._function.max_dynamic_shared_size_bytes = self._shared_bytes

    def __call__(self, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """out[rows, kept and pooled columns] from x for the first state[TRUE_ROWS] rows; both of the dtype given."""
        check_rows("attention x", x, rows, self._columns.width)
        check_rows("attention out", out, rows, self._columns.out_width)
        i32 = np.int32
        args = (state.data_ptr(), x.data_ptr(), i32(x.stride(0)), self._weights.data_ptr(), out.data_ptr(), i32(out.stride(0)))
        launch(self._function, rows, _THREADS, args, shared_bytes=self._shared_bytes)


def _packed(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]],
    out: tuple[torch.Tensor, torch.Tensor],
    activation: str,
    slope: float,
    dim: int,
) -> torch.Tensor:
    """float32 [*] on the host, in the order that attention.cu says; every weight column by column."""
    parts: list[torch.Tensor] = []
    for i, (weight, bias, params) in enumerate(layers):
        weight, bias, units = weight.float().cpu(), bias.float().cpu(), len(bias)
        if i == 0:
            of_query, of_key, of_product = split_attention(weight)
            padding = torch.zeros(units, -dim % 4)
            columns = [of_query, torch.cat([of_key, padding], 1), torch.cat([of_product, padding], 1)]
        else:
            columns = [weight]
        parts += [c.t().reshape(-1) for c in columns]
        shapes = unit_params(activation, [p.float().cpu() for p in params], slope, units, units, torch.device("cpu"))
        parts += [bias, shapes.reshape(-1)]
    return torch.cat([*parts, *(t.float().cpu().reshape(-1) for t in out)])


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
