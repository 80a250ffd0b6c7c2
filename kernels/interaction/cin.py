"""xDeepFM's compressed interaction network on a GPU (cin.cu), a launch a layer. See `reference.cin`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.dense.activation import KINDS
from kernels.runtime.launch import check_rows, launch, type_name
from kernels.runtime.source import kernel

_WARPS = 8
_MOST_DIM = 32 * _WARPS  # a row's columns lie in one block
_MOST_FIELDS = 80  # of x0, which a thread keeps a quarter of in registers


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    weights: torch.Tensor  # packed
    bias: torch.Tensor | None
    maps: int  # before
    units: int
    columns: int  # of a block, in tiles of 8
    next_maps: int  # that go into the layer after
    direct: int  # the first map that is summed
    pooled: int  # the column of its sum


class Cin:
    """All layers, weights packed for the tensor cores, on one device.

    Args:
        layers: (weight [units, maps before * fields], bias [units] or None) of each, as `reference.cin`.
        precision: "fp32" keeps float32's digits; else products of tf32.

    Raises:
        ValueError: more columns or fields than a block takes.
    """

    def __init__(
        self,
        fields: int,
        dim: int,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        activation: str,
        slope: float,
        halves: bool,
        dtype: torch.dtype,
        precision: str,
        device: torch.device,
    ) -> None:
        if dim > _MOST_DIM or fields > _MOST_FIELDS:
            raise ValueError(f"cin: got {fields} fields of dim {dim}, expected at most {_MOST_FIELDS} and {_MOST_DIM}")
        self._fields, self._dim, self._device = fields, dim, device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._slope = torch.tensor([slope], device=device)
        self._constants = {
            "X": type_name(dtype), "M": str(fields), "DIM": str(dim), "ACTIVATION": str(KINDS[activation]),
            "PASSES": "3" if precision == "fp32" else "1",
        }  # fmt: skip
        self._layers: list[_Layer] = []
        maps = fields
        for k, (weight, bias) in enumerate(layers):
            units, last = len(weight), k == len(layers) - 1
            going_on = units // 2 if halves else units
            columns = min(8, -(-units // 16) * 2)
            packed = packed_weight(weight, maps, fields, columns).to(device)
            kept = None if bias is None else bias.float().contiguous().to(device)
            direct = going_on if halves and not last else 0
            pooled = self._layers[-1].pooled + self._layers[-1].units - self._layers[-1].direct if self._layers else 0
            self._layers.append(_Layer(packed, kept, maps, units, columns, 0 if last else going_on, direct, pooled))
            maps = going_on

    @property
    def scratch_columns(self) -> int:
        """float32 columns a row of each of the two buffers that hold the maps between layers."""
        return max(1, *(layer.next_maps for layer in self._layers)) * self._dim

    def __call__(
        self, state: torch.Tensor, x: torch.Tensor, rows: int, maps: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """out[rows, summed maps of all layers] from x[rows, fields * dim] for the first state[TRUE_ROWS] rows.

        maps: float32[>= rows, scratch_columns] twice, for the maps between layers.
        """
        check_rows("cin x", x, rows, self._fields * self._dim)
        check_rows("cin out", out, rows, self._layers[-1].pooled + self._layers[-1].units)
        for t in maps:
            check_rows("cin maps", t, rows, self.scratch_columns)
        before = x
        for k, layer in enumerate(self._layers):
            warps = self._row_warps(rows, -(-layer.units // (8 * layer.columns)))
            following = maps[k % 2]
            i32 = np.int32
            args = (
                state.data_ptr(), x.data_ptr(), i32(x.stride(0)), before.data_ptr(), i32(before.stride(0)), i32(layer.maps),
                layer.weights.data_ptr(), 0 if layer.bias is None else layer.bias.data_ptr(), i32(layer.units),
                following.data_ptr(), i32(following.stride(0)), i32(layer.next_maps),
                out.data_ptr() + layer.pooled * out.element_size(), i32(out.stride(0)), i32(layer.direct),
                self._slope.data_ptr(),
            )  # fmt: skip
            blocks = -(-rows // (32 * warps // self._dim)), -(-layer.units // (8 * layer.columns))
            shared_bytes = 4 * 32 * _WARPS * (8 * layer.columns + 1)
            launch(
                self._kernel(k == 0, layer.columns, warps, shared_bytes), blocks, 32 * _WARPS, args, shared_bytes=shared_bytes
            )
            before = following

    def _row_warps(self, rows: int, column_blocks: int) -> int:
        """Warps of a block side by side over rows, as many as leave a block for every processor; the rest split the sum."""
        fitting = [w for w in (8, 4, 2, 1) if 32 * w >= self._dim]
        filling = [w for w in fitting if -(-rows // (32 * w // self._dim)) * column_blocks >= self._processors]
        return filling[0] if filling else fitting[-1]

    def _kernel(self, first: bool, columns: int, warps: int, shared_bytes: int) -> Any:
        own = {"FIRST": str(int(first)), "NF": str(columns), "WM": str(warps), "WK": str(_WARPS // warps)}
        function = kernel("interaction/cin", "cin_layer", self._constants | own, self._device.index or 0)
        if function.max_dynamic_shared_size_bytes < shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function


def packed_weight(weight: torch.Tensor, maps: int, fields: int, columns: int) -> torch.Tensor:
    """float32[column blocks, maps, steps, columns / 2, 32 lanes, 4]: what each lane multiplies with, zero beyond the weights.

    A lane's b0, b1 of a tile of 8 maps n and 8 fields j are (j = lane % 4, n = lane / 4) and (j + 4, n); tiles lie in pairs.
    """
    steps, blocks = -(-fields // 8), -(-len(weight) // (8 * columns))
    wide = torch.zeros(blocks * columns * 8, maps, steps * 8)
    wide[: len(weight), :, :fields] = weight.float().cpu().reshape(len(weight), maps, fields)
    # block, pair of tiles, tile, n, map, step, half, j -> block, map, step, pair, n, j, tile, half
    split = wide.view(blocks, columns // 2, 2, 8, maps, steps, 2, 4)
    return split.permute(0, 4, 5, 1, 3, 7, 2, 6).contiguous()
