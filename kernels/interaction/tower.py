"""An MLP of few narrow layers in one launch, and DLRM's dots of its output behind it (tower.cu). See `reference.linear` and
`reference.dot`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch
import torch.nn.functional as f

from kernels.dense.activation import KINDS, SHAPED
from kernels.dense.linear import DENSE_DTYPE
from kernels.interaction.pairs import Pairs
from kernels.runtime.launch import check_dense, launch, shared_limit, type_name
from kernels.runtime.source import KernelSource, loaded

_WARPS, _ROWS, _DEPTH = 16, 16, 8  # of tower.cu; of the ring as many blocks as fit, and at least two
_BLOCKS_BYTES = _WARPS * 1024  # a block of weights of each warp
_MOST_WEIGHTS = 1 << 18  # more of them take longer from the L2, for each 16 rows, than waves take


@dataclass(frozen=True, slots=True, eq=False)
class TowerLayer:
    """activation(x W^T + b): weight[out, in], bias[out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str


def takes(widths: Sequence[int], activations: Sequence[str], pairs: Pairs, precision: str, shared_bytes: int) -> bool:
    """Whether there is such a kernel, and a reason to take it. widths: columns of x, then of each layer. shared_bytes: that a
    block may have.
    """
    if precision not in ("tf32", "bf16") or not 1 <= len(activations) <= 4 or any(a in SHAPED for a in activations):
        return False
    dtype = DENSE_DTYPE[precision]
    size = dtype.itemsize
    if sum(map(prod, pairwise(widths))) > _MOST_WEIGHTS or -(-widths[0] * size // 16) > 32:
        return False
    if shared_bytes < _fixed_bytes(widths, pairs, dtype) + 2 * _BLOCKS_BYTES:
        return False
    return pairs.fits(precision) and widths[-1] == pairs.dim


class Tower:
    """The layers of one, packed, on one device.

    Args:
        precision: "tf32" or "bf16".

    Raises:
        ValueError: there is no such kernel (`takes`).
    """

    def __init__(self, layers: Sequence[TowerLayer], pairs: Pairs, precision: str, device: torch.device) -> None:
        self._widths = [layers[0].weight.shape[1], *(len(layer.weight) for layer in layers)]
        room = shared_limit(device)
        if not takes(self._widths, [layer.activation for layer in layers], pairs, precision, room):
            raise ValueError(f"tower: got widths {self._widths}, {pairs} at {precision}, expected what `takes` lets pass")
        self._pairs, self._device, self._dtype = pairs, device, DENSE_DTYPE[precision]
        shapes = _shapes(self._widths, self._dtype)
        streams = [s.blocks(layer.weight) for s, layer in zip(shapes, layers, strict=True)]
        self._weights = torch.cat(streams, 1).contiguous().to(device)
        bias = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
        self._bias = torch.cat([f.pad(b.float().cpu(), (0, -len(b) % 16)) for b in bias]).to(device)
        fixed = _fixed_bytes(self._widths, pairs, self._dtype)
        depth = min(_DEPTH, (room - fixed) // _BLOCKS_BYTES)
        self._shared_bytes = depth * _BLOCKS_BYTES + fixed
        constants = {
            "X": type_name(self._dtype), "IN": str(self._widths[0]), "LAYERS": str(len(layers)),
            "WIDTHS": ",".join(map(str, self._widths[1:])), "KINDS": ",".join(str(KINDS[layer.activation]) for layer in layers),
            "DEPTH": str(depth), "FIELDS": str(pairs.fields), "DIM": str(pairs.dim), "KEEP": str(pairs.keep),
            "DIAGONAL": str(int(pairs.diagonal)),
        }  # fmt: skip
        self.source = KernelSource.of("interaction/tower", "tower", constants, device.index)

    def __call__(self, state: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """out[rows, columns] of x[rows, in] and vectors[rows, (fields - 1) * dim], for the first state[TRUE_ROWS] rows. All in
        the dense dtype, rows 16-byte aligned; pads of out, to 16 bytes, are written as zeros.

        Raises:
            ValueError: an operand does not fit.
        """
        pairs = self._pairs
        check_dense("tower x", x, rows, self._widths[0], self._dtype)
        check_dense("tower vectors", vectors, rows, (pairs.fields - 1) * pairs.dim, self._dtype)
        check_dense("tower out", out, rows, pairs.columns, self._dtype)
        i32 = np.int32
        args = (
            state.data_ptr(), x.data_ptr(), i32(x.stride(0)), vectors.data_ptr(), i32(vectors.stride(0)),
            self._weights.data_ptr(), self._bias.data_ptr(), out.data_ptr(), i32(out.stride(0)), i32(rows),
        )  # fmt: skip
        most = torch.cuda.get_device_properties(self._device).multi_processor_count
        function, blocks = loaded(self.source, self._shared_bytes), min(-(-rows // _ROWS), most)
        launch(function, blocks, 32 * _WARPS, args, shared_bytes=self._shared_bytes)


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a layer goes over the warps: the numbers of tower.cu, by the same rules. group: 16 words of K."""

    tiles: int
    parts: int
    per_part: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, columns: int, width: int, dtype: torch.dtype) -> "_Shape":
        tiles, groups, parts = -(-width // 16), -(-columns * dtype.itemsize // 64), 1
        while tiles * parts * 2 <= _WARPS and parts * 2 <= groups:
            parts *= 2
        return cls(tiles, parts, -(-groups // parts), width, dtype)

    @property
    def pitch(self) -> int:
        return _pitch(self.parts * self.per_part * 16)

    @property
    def sum_words(self) -> int:
        return self.parts * _ROWS * (-(-self.width // 32) * 32 + 4) if self.parts > 1 else 0

    def blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """int32[warps, blocks, 2, 32, 4]: of each warp the blocks that it multiplies, in turn: the two steps of a group, a
        lane's four registers of mma's left factor. Of a group's 16 words lane (g, t) has words 4t to 4t + 3, two in each step.
        """
        weight = weight.float().cpu()
        if self.dtype == torch.float32:  # the tensor cores would cut, not round
            rounded = ((weight.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
            weight = torch.where(weight.isfinite(), rounded, weight)
        words = weight.to(self.dtype)
        words = f.pad(words, (0, -words.shape[1] % (4 // self.dtype.itemsize))).contiguous().view(torch.int32)
        groups = self.parts * self.per_part
        words = f.pad(words, (0, groups * 16 - words.shape[1], 0, self.tiles * 16 - len(words)))
        units = words.view(self.tiles, 2, 8, groups, 4, 2, 2).permute(
            0, 3, 5, 2, 4, 6, 1
        )  # tile, group, step, g, t, slot, half
        units = units.reshape(self.tiles, self.parts, self.per_part, 2, 32, 4).transpose(0, 1).flatten(0, 1)  # part, then tile
        units = f.pad(units, (0, 0, 0, 0, 0, 0, 0, 0, 0, -len(units) % _WARPS))
        return units.view(-1, _WARPS, *units.shape[1:]).transpose(0, 1).flatten(1, 2)


def _shapes(widths: Sequence[int], dtype: torch.dtype) -> list[_Shape]:
    return [_Shape.of(columns, width, dtype) for columns, width in pairwise(widths)]


def _fixed_bytes(widths: Sequence[int], pairs: Pairs, dtype: torch.dtype) -> int:
    """Of shared memory, beside the ring: values between layers, sums of parts, biases, and lines of out."""
    shapes, size = _shapes(widths, dtype), dtype.itemsize
    values = sum(s.pitch for s in shapes) + _pitch(-(-widths[-1] * size // 64) * 16)
    line = _WARPS * -(-pairs.columns * size // 16) * 16
    return 4 * (_ROWS * values + max(s.sum_words for s in shapes) + sum(s.tiles * 16 for s in shapes)) + line


def _pitch(words: int) -> int:
    return words if words % 32 else words + 16
