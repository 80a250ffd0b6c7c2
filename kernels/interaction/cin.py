"""xDeepFM's compressed interaction network on a GPU, a launch a layer: by cin.cu, or in bf16 and tf32 on sm_90 by a tile of
cin_wgmma.cu, whichever is faster for a number of rows. See `reference.cin`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch

from kernels.dense.activation import KINDS
from kernels.interaction.cin_wgmma import TILES, CinTile, LayerOperands, WgmmaLayer, pitch, takes
from kernels.runtime.fastest import fastest
from kernels.runtime.launch import check_rows, launch, overlapping, type_name
from kernels.runtime.source import KernelSource, loaded

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
    wide: WgmmaLayer | None  # the same for warpgroups, where they take it

    @property
    def column_blocks(self) -> int:
        return -(-self.units // (8 * self.columns))


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
        self._wide = precision != "fp32" and torch.cuda.get_device_capability(device)[0] == 9 and takes(fields, dim)
        self._choice: dict[int, CinTile | None] = {}  # None: cin.cu
        self.recalled: dict[int, str] = {}  # names of choices made before, by rows; `tune` takes those that exist
        maps = fields
        for k, (weight, bias) in enumerate(layers):
            units, last = len(weight), k == len(layers) - 1
            going_on = units // 2 if halves else units
            columns = min(8, -(-units // 16) * 2)
            packed = packed_weight(weight, maps, fields, columns).to(device)
            kept = None if bias is None else bias.float().contiguous().to(device)
            direct = going_on if halves and not last else 0
            pooled = self._layers[-1].pooled + self._layers[-1].units - self._layers[-1].direct if self._layers else 0
            next_maps, wide = 0 if last else going_on, None
            if self._wide:
                wide = WgmmaLayer(
                    weight, kept, self._slope, first=k == 0, fields=fields, dim=dim, next_maps=next_maps, direct=direct,
                    activation=activation, dtype=dtype,
                )  # fmt: skip
            self._layers.append(_Layer(packed, kept, maps, units, columns, next_maps, direct, pooled, wide))
            maps = going_on

    @property
    def scratch_columns(self) -> int:
        """float32 columns a row of each of the two buffers that hold the maps between layers."""
        return pitch(max(1, *(layer.next_maps for layer in self._layers))) * self._dim

    @property
    def tiles(self) -> list[CinTile]:
        """Those of cin_wgmma.cu that hold a row's columns."""
        return [t for t in TILES if self._wide and self._dim <= 64 * t.warpgroups]

    def tiles_for(self, rows: int) -> dict[str, CinTile | None]:
        """What is worth trying for a number of rows, by name; None is cin.cu.

        Of each shape the tile that shares a sum among most blocks, if all run at once; and a narrower one where the wider one
        leaves half of the processors idle. Larger clusters do not fill a GPU (256 rows, bf16: of 4 on 128 of 132 processors 37
        us, of 2 on 64 of them 29).
        """
        units = max(layer.units for layer in self._layers)
        chosen: list[CinTile] = []
        idle = True
        for (_, columns), shapes in groupby(self.tiles, key=lambda t: (t.warpgroups, t.columns)):
            if columns == 128 or idle:
                for t in shapes:  # in the order of their shares
                    room = self._processors * t.resident * (3 if t.shares > 2 else 4) // 4
                    if t.shares == 1:
                        chosen.append(t)
                    elif t.blocks(rows, self._dim, units) <= room:
                        chosen[-1] = t
                idle = 2 * chosen[-1].blocks(rows, self._dim, units) <= self._processors
        return {t.name: t for t in chosen} | {"mma": None}

    @property
    def choices(self) -> dict[int, str]:
        """By rows, the name of the way chosen."""
        return {rows: tile.name if tile else "mma" for rows, tile in self._choice.items()}

    def sources(self, rows: int) -> list[KernelSource]:
        """What a bucket of so many rows may need."""
        tiles = [tile for name, tile in self.tiles_for(rows).items() if self.recalled.get(rows) in (None, name)]
        return [
            layer.wide.source(tile) if tile and layer.wide else self._source(k == 0, layer, rows)
            for tile in tiles
            for k, layer in enumerate(self._layers)
        ]

    def tune(
        self, state: torch.Tensor, x: torch.Tensor, rows: int, maps: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> str:
        """Times what there is on these operands and keeps the fastest for this number of rows. Returns its name."""
        if rows not in self._choice:
            tiles = self.tiles_for(rows)

            def way(tile: CinTile | None) -> None:
                with overlapping():
                    self.run(state, x, rows, maps, out, tile)

            name = self.recalled.get(rows, "")
            if name not in tiles:
                name = "mma" if len(tiles) == 1 else fastest({n: partial(way, tile) for n, tile in tiles.items()})
            self._choice[rows] = tiles[name]
        return self.choices[rows]

    def __call__(
        self, state: torch.Tensor, x: torch.Tensor, rows: int, maps: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        """out[rows, summed maps of all layers] from x[rows, fields * dim] for the first state[TRUE_ROWS] rows.

        maps: float32[>= rows, scratch_columns] twice, for the maps between layers.
        """
        tiles = self.tiles_for(rows)
        known = tiles.get(self.recalled.get(rows, ""), next(iter(tiles.values())))
        self.run(state, x, rows, maps, out, self._choice.get(rows, known))

    def run(
        self, state: torch.Tensor, x: torch.Tensor, rows: int, maps: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
        tile: CinTile | None,
    ) -> None:  # fmt: skip
        """The same by a given tile, or by cin.cu."""
        check_rows("cin x", x, rows, self._fields * self._dim)
        check_rows("cin out", out, rows, self._layers[-1].pooled + self._layers[-1].units)
        for t in maps:
            check_rows("cin maps", t, rows, self.scratch_columns)
        before = x
        for k, layer in enumerate(self._layers):
            operands = LayerOperands(x, before, maps[k % 2], out[:, layer.pooled :])
            if tile and layer.wide:
                layer.wide(state, operands, rows, tile)
            else:
                self._launch(state, operands, rows, layer, k == 0)
            before = maps[k % 2]

    def _launch(self, state: torch.Tensor, at: LayerOperands, rows: int, layer: _Layer, first: bool) -> None:
        warps = self._row_warps(rows, layer.column_blocks)
        i32 = np.int32
        args = (
            state.data_ptr(), at.x.data_ptr(), i32(at.x.stride(0)), at.before.data_ptr(), i32(at.before.stride(0)),
            i32(layer.maps), layer.weights.data_ptr(), 0 if layer.bias is None else layer.bias.data_ptr(), i32(layer.units),
            at.following.data_ptr(), i32(at.following.stride(0)), i32(layer.next_maps), at.pooled.data_ptr(),
            i32(at.pooled.stride(0)), i32(layer.direct), self._slope.data_ptr(),
        )  # fmt: skip
        blocks = -(-rows // (32 * warps // self._dim)), layer.column_blocks
        function = loaded(self._source(first, layer, rows), _shared_bytes(layer.columns))
        launch(function, blocks, 32 * _WARPS, args, shared_bytes=_shared_bytes(layer.columns))

    def _row_warps(self, rows: int, column_blocks: int) -> int:
        """Warps of a block side by side over rows, as many as leave a block for every processor; the rest split the sum."""
        fitting = [w for w in (8, 4, 2, 1) if 32 * w >= self._dim]
        filling = [w for w in fitting if -(-rows // (32 * w // self._dim)) * column_blocks >= self._processors]
        return filling[0] if filling else fitting[-1]

    def _source(self, first: bool, layer: _Layer, rows: int) -> KernelSource:
        warps = self._row_warps(rows, layer.column_blocks)
        own = {"FIRST": str(int(first)), "NF": str(layer.columns), "WM": str(warps), "WK": str(_WARPS // warps)}
        return KernelSource.of("interaction/cin", "cin_layer", self._constants | own, self._device.index)


def _shared_bytes(columns: int) -> int:
    """All warps' sums of a block."""
    return 4 * 32 * _WARPS * (8 * columns + 1)


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
