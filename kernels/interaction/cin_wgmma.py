"""A layer of the compressed interaction network by warpgroup instructions (cin_wgmma.cu): its tiles, its weights as the kernel
takes them, its launch. Knows one layer; `cin` knows them all.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.dense.activation import KINDS
from kernels.runtime.launch import launch, type_name
from kernels.runtime.source import KernelSource, loaded

_LEAST_FIELDS, _MOST_FIELDS = 5, 48  # of more, a lane's quarter and its sums and factors are more than 168 registers
_MOST_STAGES, _BARRIER_BYTES = 16, 256  # a stage has two barriers


@dataclass(frozen=True, slots=True)
class CinTile:
    """Warpgroups of a block, 64 places (b, d) each; maps of a block, at most; blocks that share a sum, a cluster."""

    warpgroups: int
    columns: int
    shares: int

    @property
    def name(self) -> str:
        return f"wgmma-{64 * self.warpgroups}x{self.columns}-s{self.shares}"

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has room for: where it is two, the next layer's is filled beside this one's."""
        return 2 // self.warpgroups

    def column_blocks(self, units: int) -> int:
        return -(-units // self.columns)

    def blocks(self, rows: int, dim: int, units: int) -> int:
        return -(-rows // (64 * self.warpgroups // dim)) * self.column_blocks(units) * self.shares

    def block_columns(self, units: int) -> int:
        """Of a layer: as few as its column blocks need, in multiples of 16."""
        return -(-units // (16 * self.column_blocks(units))) * 16


TILES = tuple(
    CinTile(warpgroups, columns, shares)
    for warpgroups, columns in ((2, 128), (1, 128), (1, 64), (1, 32))
    for shares in (1, 2, 4, 8)
)


def takes(fields: int, dim: int) -> bool:
    """Whether there are tiles for such rows."""
    return _LEAST_FIELDS <= fields <= _MOST_FIELDS and dim <= 128


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
        self._next_maps, self._direct = next_maps, direct
        maps, device = weight.shape[1] // fields, slope.device
        weights = symmetric_steps(weight, fields) if first else steps(weight, maps, fields)
        self._groups, self._steps = weights.shape[1:3]
        self._before_pitch = pitch(maps)
        width = max(t.block_columns(self._units) * t.column_blocks(self._units) for t in TILES)
        self._weights = packed(weights, width, dtype).to(device)
        self._products = dtype.itemsize // 2
        # Of a group's steps; even, as factors are formed in two places in turn. A lane's registers bear those of ten products.
        self._chunks = 2 * -(-self._steps // (2 * (5 // self._products)))
        self._constants = {
            "X": type_name(dtype), "FIRST": str(int(first)), "M": str(fields), "DIM": str(dim), "WIDTH": str(width),
            "ACTIVATION": str(KINDS[activation]),
        }  # fmt: skip

    def __call__(self, state: torch.Tensor, at: LayerOperands, rows: int, tile: CinTile) -> None:
        words = 4 // at.x.element_size()  # of the dense dtype in a float32
        i32 = np.int32
        args = (
            state.data_ptr(), i32(rows), at.x.data_ptr(), i32(at.x.stride(0)), at.before.data_ptr(),
            i32(at.before.stride(0) * words), i32(self._before_pitch), i32(self._groups), self._weights.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(), i32(self._units), at.following.data_ptr(),
            i32(at.following.stride(0) * words), i32(pitch(self._next_maps)), i32(self._next_maps), at.pooled.data_ptr(),
            i32(at.pooled.stride(0)), i32(self._direct), self._slope.data_ptr(),
        )  # fmt: skip
        blocks, threads = tile.blocks(rows, self._dim, self._units), 128 * tile.warpgroups + 32
        shared_bytes = self.shared_bytes(tile)
        launch(loaded(self.source(tile), shared_bytes), blocks, threads, args, shared_bytes=shared_bytes, cluster=tile.shares)

    def source(self, tile: CinTile) -> KernelSource:
        """What a launch in a tile needs."""
        own = {
            "WARPGROUPS": str(tile.warpgroups), "SHARES": str(tile.shares),
            "CHUNKS": str(self._chunks), "COLUMNS": str(tile.block_columns(self._units)), "STAGES": str(self._stages(tile)),
        }  # fmt: skip
        return KernelSource.of("interaction/cin_wgmma", "cin_wgmma", self._constants | own, self._slope.device.index)

    def _stage_bytes(self, tile: CinTile) -> int:
        return -(-self._steps // self._chunks) * self._products * tile.block_columns(self._units) * 32

    def _stages(self, tile: CinTile) -> int:
        return min(_MOST_STAGES, 200 * 1024 // tile.resident // self._stage_bytes(tile))

    def shared_bytes(self, tile: CinTile) -> int:
        """The barriers and the ring, in whose place all sums of a block lie in the end."""
        ring = self._stages(tile) * self._stage_bytes(tile)
        return _BARRIER_BYTES + max(ring, 4 * 64 * tile.warpgroups * (tile.block_columns(self._units) + 8))


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


def packed(weights: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[groups, steps, products, width / 8, 2, 8, 16 bytes] of [units, groups, steps, 4 maps, 4 fields].

    Of K a lane `member` has in its two words of 16 bytes apart, of bf16: maps (0, 1) and (2, 3), of float32, whose steps are
    two products: maps 0 and 1, then 2 and 3; all with the field `member`.
    """
    units, groups, count = weights.shape[:3]
    wide = torch.zeros(width, *weights.shape[1:])
    wide[:units] = weights
    if dtype == torch.bfloat16:  # tile, n, group, step, half of K, map, field -> .., tile, half, n, field, map
        return wide.view(-1, 8, groups, count, 2, 2, 4).permute(2, 3, 0, 4, 1, 6, 5).contiguous().to(dtype)
    rounded = ((wide.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)  # to tf32; the tensor cores would cut
    parts = torch.where(wide.isfinite(), rounded, wide).view(-1, 8, groups, count, 2, 2, 4)
    return parts.permute(2, 3, 4, 0, 5, 1, 6).contiguous()  # group, step, product, tile, half, n, field
