"""Linear layers and DCN-V2 layers as one Triton kernel each, epilogue included: further ways that `linear.Linear` has.

Imported only where there is a GPU: Triton comes with torch's CUDA builds.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.runtime.cores import usable_cores


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, columns and depth of a block's tile, its warps, and how many loads of tiles are in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return f"triton-{self.rows}x{self.columns}x{self.depth}-w{self.warps}-s{self.stages}"


MOST_ROWS = 2048
# Each is the fastest somewhere between 1 and MOST_ROWS rows of 256 to 1024 columns on an H200; above that cuBLAS is.
TILES = (
    Tile(16, 16, 128, 2, 4),
    Tile(16, 32, 128, 4, 4),
    Tile(32, 32, 64, 4, 5),
    Tile(64, 32, 128, 4, 3),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 32, 4, 5),
)


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]  # else it is compiled anew for numbers of rows
def _linear(  # type: ignore[no-untyped-def]
    x, w, bias, x0, xl, out, M, N, K, x_ld, w_ld, x0_ld, xl_ld, out_ld,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, RELU: tl.constexpr, CROSS: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """out[M, N] = epilogue(x[M, K] w[N, K]^T + bias); one block a tile of out, column tiles first."""
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    row_ok, column_ok = rows[:, None] < M, columns[None, :] < N
    x_tile = x + rows[:, None] * x_ld + depth[None, :]
    w_tile = w + columns[None, :] * w_ld + depth[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        depth_left = K - k
        a = tl.load(x_tile, mask=row_ok & (depth[None, :] < depth_left), other=0.0)
        b = tl.load(w_tile, mask=column_ok & (depth[:, None] < depth_left), other=0.0)
        sums = tl.dot(a, b, sums, input_precision="tf32")
        x_tile += BK
        w_tile += BK
    if not OUTER:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    ok = row_ok & column_ok
    if CROSS:
        first = tl.load(x0 + rows[:, None] * x0_ld + columns[None, :], mask=ok, other=0.0).to(tl.float32)
        last = tl.load(xl + rows[:, None] * xl_ld + columns[None, :], mask=ok, other=0.0).to(tl.float32)
        sums = first * sums + last
    if OUTER:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        sums = tl.where(sums < 0.0, 0.0, sums)
    tl.store(out + rows[:, None] * out_ld + columns[None, :], sums.to(out.dtype.element_ty), mask=ok)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    x0: torch.Tensor | None,
    xl: torch.Tensor,
    outer_bias: bool,
    relu: bool,
    tile: Tile,
) -> None:
    """out[B, N] = relu?(x[B, K] weight[N, K]^T + bias), or with x0 a DCN-V2 layer x0 * (x weight^T + bias) + xl, with
    `outer_bias` x0 * (x weight^T) + bias + xl.

    float32 operands are multiplied in tf32. K and N are multiples of 8, rows 16-byte aligned.
    """
    grid, operands, constants = _call(x, weight, bias, out, x0, xl, outer_bias, relu, tile)
    _linear[grid](*operands, **constants)


def compile_side_by_side(calls: Iterable[partial[None]]) -> None:
    """Has the kernels of these calls of `linear` compiled in threads; each takes a third of a second."""
    with ThreadPoolExecutor(usable_cores()) as threads, triton.AsyncCompileMode(threads):
        for call in calls:
            grid, operands, constants = _call(*call.args)
            _linear.warmup(*operands, grid=grid, **constants)


def _call(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, x0: torch.Tensor | None, xl: torch.Tensor,
    outer_bias: bool, relu: bool, tile: Tile,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Grid, arguments and constants of a launch."""
    (rows, width), columns = x.shape, weight.shape[0]
    grid = triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)
    operands = (
        x, weight, bias, x if x0 is None else x0, xl, out, rows, columns, width,
        x.stride(0), weight.stride(0), 0 if x0 is None else x0.stride(0), xl.stride(0), out.stride(0),
    )  # fmt: skip
    constants = {
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "RELU": relu, "CROSS": x0 is not None, "OUTER": outer_bias,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    return grid, operands, constants
