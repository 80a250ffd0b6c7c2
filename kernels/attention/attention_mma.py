"""DIN's target attention on the tensor cores (attention_mma.cu), for tf32 and bf16. See `reference.attention`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention.attention_columns import AttentionColumns, listed
from kernels.attention.attention_weights import Layer, mma_sizes, packed_weights
from kernels.dense.activation import KINDS
from kernels.runtime.launch import check_dense, launch, shared_limit, type_name
from kernels.runtime.source import KernelSource, loaded

_MOST_ROWS = 16  # of a pass: of one product with the weights of the query
_OTHER_REGISTERS = 52  # beside factors and sums: addresses, and loads on their way


@dataclass(frozen=True, slots=True)
class KeyTile:
    """How a block is cut: tiles of 16 keys that a warp takes at a time, warps, and blocks of a multiprocessor."""

    key_tiles: int
    warps: int
    blocks: int = 1

    @property
    def name(self) -> str:
        return f"mma-{16 * self.key_tiles}-w{self.warps}-b{self.blocks}"

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, 65536 // (32 * self.warps * self.blocks) // 8 * 8)


KEY_TILES = (
    KeyTile(2, 8), KeyTile(1, 16), KeyTile(1, 8), KeyTile(2, 4, 2), KeyTile(4, 4, 2), KeyTile(1, 8, 2), KeyTile(2, 12),
    KeyTile(2, 8, 2),
)  # fmt: skip


class MmaAttention:
    """A target attention with its weights on one device. `tiles`: those whose registers and shared memory suffice, if any."""

    def __init__(
        self,
        columns: AttentionColumns,
        layers: Sequence[Layer],
        out: tuple[torch.Tensor, torch.Tensor],
        activation: str,
        slope: float,
        output: str,
        softmax: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        units = [len(bias) for _, bias, _ in layers]
        self._columns, self._units, self._sizes = columns, units, mma_sizes(columns, units, dtype)
        self._dtype, self._device, self._limit = dtype, device, shared_limit(device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._weights = packed_weights(layers, out, activation, slope, columns.dims, self._sizes).to(device)
        self._constants = columns.constants | {
            "X": type_name(dtype), "ALIGNED": listed([int(a) for a in self._sizes.aligned]), "UNITS": listed(units),
            "LAYERS": str(len(units)), "ACTIVATION": str(KINDS[activation]), "OUTPUT": str(KINDS[output]),
            "SOFTMAX": str(int(softmax)),
        }  # fmt: skip
        self.tiles = {t.name: t for t in KEY_TILES if self._registers(t) <= t.registers and self._rows(t)}

    def source(self, way: str) -> KernelSource:
        """What a launch in the tile of that name needs."""
        tile = self.tiles[way]
        sizes = {"KEY_TILES": tile.key_tiles, "WARPS": tile.warps, "BLOCKS": tile.blocks, "ROWS": self._rows(tile)}
        constants = self._constants | {name: str(size) for name, size in sizes.items()}
        return KernelSource.of("attention/attention_mma", "attention_mma", constants, self._device.index)

    def run(self, tile: KeyTile, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor, context_rows: int) -> None:
        """As Attention's call, in a given tile; rows of x are aligned to 16 bytes. context_rows: where they lie, or 0."""
        check_dense("attention x", x, rows, self._columns.width, self._dtype)
        i32 = np.int32
        given = state.data_ptr(), x.data_ptr(), i32(x.stride(0)), context_rows
        args = (*given, self._weights.data_ptr(), out.data_ptr(), i32(out.stride(0)))
        blocks = min(rows, self._processors * tile.blocks)
        shared_bytes = self._shared_bytes(tile, self._rows(tile))
        launch(loaded(self.source(tile.name), shared_bytes), blocks, 32 * tile.warps, args, shared_bytes=shared_bytes)

    def _rows(self, tile: KeyTile) -> int:
        """Of a pass: as many as shared memory holds, 0 if none."""
        limit = self._limit // tile.blocks - 1024  # of which the system takes 1 KiB a block
        return next((n for n in (_MOST_ROWS, 8, 4, 2, 1) if self._shared_bytes(tile, n) <= limit), 0)

    def _shared_bytes(self, tile: KeyTile, rows: int) -> int:
        groups = -(-self._columns.length // (16 * tile.key_tiles))
        constants = 16 * (8 * self._sizes.tiles[0] + 8)
        queries, sums = rows * 8 * self._sizes.steps, rows * groups * (self._sizes.columns + 2)
        present = rows * -(-groups * tile.key_tiles // 2)
        return 4 * (self._weights.numel() + constants + queries + sums + present)

    def _registers(self, tile: KeyTile) -> int:
        """That a thread needs, about: keys and query, sums of 16 units, those of every second layer, and these as factors."""
        s, tiles = self._sizes, self._sizes.tiles
        kept = max([4 * n for n in tiles[1::2]], default=0)
        factors = max([4 * n // s.each for n in tiles[1:-1:2]], default=0)
        return tile.key_tiles * (4 * s.steps + 8 + 8 // s.each + kept + factors) + 2 * s.steps + _OTHER_REGISTERS
