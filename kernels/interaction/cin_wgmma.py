"""A layer of the compressed interaction network by warpgroup instructions (cin_wgmma.cu): its tiles, its weights as the kernel
takes them, its launch. Knows one layer; `cin` knows them all.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.dense.activation import KINDS
from kernels.runtime.launch import launch, type_name
from kernels.runtime.source import kernel

MOST_FIELDS = 60  # beyond, a lane's quarter of them and its sums are more than its registers
_LEAST_FIELDS = 5
_RING_BYTES, _MOST_STAGES, _BARRIER_BYTES = 200 * 1024, 8, 256


@dataclass(frozen=True, slots=True)
class CinTile:
    """Warpgroups of a block, 64 places (b, d) each; blocks that share a sum, a cluster."""

    warpgroups: int
    shares: int

    @property
    def name(self) -> str:
        return f"wgmma-{64 * self.warpgroups}-s{self.shares}"

    def blocks(self, rows: int, dim: int, column_blocks: int) -> int:
        return -(-rows // (64 * self.warpgroups // dim)) * column_blocks * self.shares


TILES = tuple(CinTile(warpgroups, shares) for warpgroups in (2, 1) for shares in (1, 2, 4, 8))


def takes(fields: int, dim: int) -> bool:
    """Whether there is a tile for such rows."""
    return _LEAST_FIELDS <= fields <= MOST_FIELDS and dim <= 64 * max(t.warpgroups for t in TILES)


def tiles_for(rows: int, dim: int, column_blocks: int, processors: int) -> list[CinTile]:
    """Those worth trying for a number of rows: of each height the one that shares most among the processors that there are."""
    fitting = [t for t in TILES if 64 * t.warpgroups >= dim]
    sharing = [t for t in fitting if t.shares == 1 or t.blocks(rows, dim, column_blocks) <= processors]
    return [max((t for t in sharing if t.warpgroups == n), key=lambda t: t.shares) for n in {t.warpgroups: 0 for t in sharing}]


@dataclass(frozen=True, slots=True, eq=False)
class LayerOperands:
    """Of one layer.

    Attributes:
        x: [rows, fields * dim] of the dense dtype. before: maps of the layer before, or x; following: where maps go on, which
            float32 matrices hold: [rows, dim, `pitch`] of the dense dtype. pooled: the sums' first column.
    """

    x: torch.Tensor
    before: torch.Tensor
    following: torch.Tensor
    pooled: torch.Tensor


class WgmmaLayer:
    """One layer's weights, packed, and how it is launched.

    Args:
        weight: float[units, maps before * fields]. next_maps: of its maps, how many go on. direct: the first that is summed.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, slope: torch.Tensor, *, first: bool, fields: int, dim: int,
        next_maps: int, direct: int, activation: str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._units, self._bias, self._slope, self._dim = len(weight), bias, slope, dim
        self._next_maps, self._direct, self._first = next_maps, direct, first
        maps, device = weight.shape[1] // fields, slope.device
        self.column_blocks = -(-self._units // 128)
        self._columns = -(-self._units // (16 * self.column_blocks)) * 16
        weights = symmetric_steps(weight, fields) if first else steps(weight, maps, fields)
        self._groups, count = weights.shape[1:3]
        self._before_pitch = pitch(maps)
        self._weights = packed(weights, self._columns, dtype).to(device)
        products = dtype.itemsize // 2
        # Registers that are left for factors, of two chunks of steps.
        room = 150 - self._columns // 2 - 2 * (-(-fields // 4)) - 8 * products
        chunks = 2 * -(-count // (2 * max(2, min(5, room // (8 * products)))))
        stage_bytes = -(-count // chunks) * products * self._columns * 32
        stages = min(_MOST_STAGES, _RING_BYTES // stage_bytes)
        self._ring_bytes = stages * stage_bytes
        self._constants = {
            "X": type_name(dtype), "FIRST": str(int(first)), "M": str(fields), "DIM": str(dim), "COLUMNS": str(self._columns),
            "CHUNKS": str(chunks), "STAGES": str(stages), "ACTIVATION": str(KINDS[activation]),
        }  # fmt: skip

    def __call__(self, state: torch.Tensor, at: LayerOperands, rows: int, tile: CinTile) -> None:
        words = 4 // at.x.element_size()  # of the dense dtype in a float32
        i32 = np.int32
        args = (
            state.data_ptr(), at.x.data_ptr(), i32(at.x.stride(0)), at.before.data_ptr(), i32(at.before.stride(0) * words),
            i32(self._before_pitch), i32(self._groups), self._weights.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(), i32(self._units), at.following.data_ptr(),
            i32(at.following.stride(0) * words), i32(pitch(self._next_maps)), i32(self._next_maps), at.pooled.data_ptr(),
            i32(at.pooled.stride(0)), i32(self._direct), self._slope.data_ptr(),
        )  # fmt: skip
        blocks, shared_bytes = tile.blocks(rows, self._dim, self.column_blocks), self._shared_bytes(tile)
        launch(self.function(tile), blocks, 128 * tile.warpgroups + 32, args, shared_bytes=shared_bytes, cluster=tile.shares)

    def function(self, tile: CinTile) -> Any:
        """The kernel, compiled and loaded."""
        own = {"WARPGROUPS": str(tile.warpgroups), "SHARES": str(tile.shares)}
        function = kernel("interaction/cin_wgmma", "cin_wgmma", self._constants | own, self._slope.device.index or 0)
        if function.max_dynamic_shared_size_bytes < self._shared_bytes(tile):
            function.max_dynamic_shared_size_bytes = self._shared_bytes(tile)
        return function

    def _shared_bytes(self, tile: CinTile) -> int:
        """The barriers and the ring, in whose place all sums of a block lie in the end."""
        return _BARRIER_BYTES + max(self._ring_bytes, 4 * 64 * tile.warpgroups * (self._columns + 8))


def pitch(maps: int) -> int:
    """Columns that the maps of a place take between layers: groups of four."""
    return -(-maps // 4) * 4


def steps(weight: torch.Tensor, maps: int, fields: int) -> torch.Tensor:
    """float32[units, groups of maps, steps, 4, 4]: of a group's four maps times the four fields of each step; zeros beyond."""
    wide = torch.zeros(len(weight), pitch(maps), pitch(fields))
    wide[:, :maps, :fields] = weight.float().cpu().reshape(len(weight), maps, fields)
    return wide.view(len(weight), pitch(maps) // 4, 4, pitch(fields) // 4, 4).transpose(2, 3)


def symmetric_steps(weight: torch.Tensor, fields: int) -> torch.Tensor:
    """Such of the first layer, whose maps are the fields: each pair of fields once, with both of its weights. Step t of group g
    multiplies with the fields of group g + t, modulo all.
    """
    once = steps(weight, fields, fields)  # [units, group, other group, 4, 4]
    groups = once.shape[1]
    both = once + once.permute(0, 2, 1, 4, 3)
    order = torch.arange(groups)
    out = torch.stack([both[:, order, (order + t) % groups] for t in range(groups // 2 + 1)], dim=2)
    within = once[:, order, order]
    out[:, :, 0] = (within + within.transpose(2, 3)).triu(1) + within * torch.eye(4)
    if groups % 2 == 0:
        out[:, groups // 2 :, groups // 2] = 0  # these pairs of groups were met from the other side
    return out


def packed(weights: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[column blocks, groups, steps, products, columns / 8, 2, 8, 16 bytes] of [units, groups, steps, 4 maps, 4 fields].

    Of K a lane `member` has in its two words of 16 bytes apart, of bf16: maps (0, 1) and (2, 3), of float32, whose steps are
    two products: maps 0 and 1, then 2 and 3; all with the field `member`.
    """
    units, groups, count = weights.shape[:3]
    wide = torch.zeros(-(-units // columns) * columns, *weights.shape[1:])
    wide[:units] = weights
    if dtype == torch.bfloat16:  # block, tile, n, group, step, half of K, map, field -> .., tile, half, n, field, map
        parts = wide.view(-1, columns // 8, 8, groups, count, 2, 2, 4)
        return parts.permute(0, 3, 4, 1, 5, 2, 7, 6).contiguous().to(dtype)
    rounded = ((wide.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)  # to tf32; the tensor cores would cut
    parts = torch.where(wide.isfinite(), rounded, wide).view(-1, columns // 8, 8, groups, count, 2, 2, 4)
    return parts.permute(0, 3, 4, 5, 1, 6, 2, 7).contiguous()  # block, group, step, product, tile, half, n, field
