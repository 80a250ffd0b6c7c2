"""Linear layers on a GPU through cuBLAS or Triton, operands padded so that the tensor cores' fast paths apply to any width,
and the way of computing chosen by measurement for each number of rows. See `reference.linear`.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import RLock

import numpy as np
import torch
from torch import Tensor

from kernels.dense.activation import Activation
from kernels.dense.cross_epilogue import cross_epilogue
from kernels.reference import activate_
from kernels.runtime.fastest import Found, ranked
from kernels.runtime.launch import check_rows, launch, type_name
from kernels.runtime.source import kernel

log = logging.getLogger(__name__)
Ways = dict[str, Callable[[], None]]

# By precision: of values and weights. "tf32" is a way to multiply float32.
DENSE_DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


TRITON = "triton-"  # begins the names of its ways


def column_alignment(dtype: torch.dtype) -> int:
    """What the columns of values are a multiple of: 16 bytes of fp8 and bf16, 32 of float32."""
    return 16 if dtype.itemsize == 1 else 8


def padded(width: int, dtype: torch.dtype = torch.float32) -> int:
    """Columns that a value of `width` columns takes on the device. Pad columns are finite and meet zero weights."""
    align = column_alignment(dtype)
    return -(-width // align) * align


@cache
def triton_builds() -> bool:
    """Whether there is a C compiler, with which Triton builds each kernel's launcher. Without one, cuBLAS's ways are left."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not found:
        log.warning("no C compiler (gcc or clang): linear layers do without Triton's ways")
    return bool(found)


class Linear:
    """activation(x W^T + b), or a DCN-V2 layer x0 * (x W^T + b) + xl (xl is x unless given), with `outer_bias`
    x0 * (x W^T) + b + xl, with weights on one device.

    Owns weight[out, in] and bias[out] in the dense dtype, `padded` with zeros, in both storage orders. No one
    way is fast throughout (tf32, 64 x 624 x 624 on an H200: 18.9 us by cuBLAS with its bias epilogue, 6.4 us without, 4.8 us by
    Triton; at 4096 rows cuBLAS's epilogue wins), so `tune` times the ways for a bucket and `__call__` takes the fastest.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        *,
        cross: bool = False,
        outer_bias: bool = False,
        tf32: bool = False,
        params: Sequence[Tensor] = (),
        slope: float = 0.0,
    ) -> None:
        out, width = weight.shape
        self.activation, self.cross, self._outer_bias = activation, cross, outer_bias
        # Triton multiplies float32 in tf32 only: strict float32 stays with cuBLAS.
        self._triton = (dtype == torch.bfloat16 or tf32) and activation in ("relu", "identity") and triton_builds()
        self._weight = torch.zeros(padded(out), padded(width), dtype=dtype, device=device)
        self._weight[:out, :width] = weight.to(device)
        self._transposed = self._weight.t().contiguous()
        self._bias = torch.zeros(padded(out), dtype=dtype, device=device)
        if bias is not None:
            self._bias[:out] = bias.to(device)
        self._apart = None  # an activation with a kernel of its own
        if activation not in ("identity", "relu", "sigmoid", "tanh"):
            self._apart = Activation(activation, params, slope, out, padded(out), dtype, device)
        self._epilogue = kernel("dense/linear", "bias_relu", {"X": type_name(dtype)}, device.index or 0)
        self._choice: dict[int, str] = {}
        self.recalled: dict[int, str] = {}  # choices made before, by rows; `tune` takes those that exist
        self.rough: set[int] = set()

    def ways(self, x: Tensor, out: Tensor, x0: Tensor | None, state: Tensor, xl: Tensor | None = None) -> Ways:
        """Every way to compute the layer for these operands, by name."""
        stored = {"": self._weight.t(), "-transposed": self._transposed}
        ways: Ways = {}
        for suffix, weight in stored.items():
            ways[f"product{suffix}"] = lambda w=weight: self._product(x, w, out, x0, state, xl)  # type: ignore[misc]
            if not self.cross and not self._apart:
                ways[f"epilogue{suffix}"] = lambda w=weight: self._fused(x, w, out)  # type: ignore[misc]
        if self._triton:
            from kernels.dense.linear_triton import MOST_ROWS, TILES, linear

            relu = self.activation == "relu"
            for tile in TILES:
                if tile.rows <= max(16, 2 * x.shape[0]) and x.shape[0] <= MOST_ROWS:
                    crossed = x0, x if xl is None else xl, self._outer_bias
                    ways[tile.name] = partial(linear, x, self._weight, self._bias, out, *crossed, relu, tile)
        return ways

    def tune(
        self,
        found: Found,
        x: Tensor,
        out: Tensor,
        x0: Tensor | None,
        state: Tensor,
        xl: Tensor | None = None,
        *,
        brief: bool = False,
    ) -> str:
        """Times the ways on these operands and keeps the fastest for this number of rows. Returns its name.

        found: of layers that were timed in this warm-up. One of the same shapes and strides is alike.
        brief: without Triton's ways, which take some seconds to compile. `rough` has the rows of such choices.
        """
        rows = x.shape[0]
        if rows not in self._choice or (rows in self.rough and not brief):
            ways = self.ways(x, out, x0, state, xl)
            known, lies = self.recalled.get(rows, ""), [None if t is None else t.stride(0) for t in (x, out, x0, xl)]
            timed = {name: way for name, way in ways.items() if not (brief and name.startswith(TRITON))}
            like = "linear", rows, *self._weight.shape, self.activation, self._outer_bias, *lies, *timed
            if known not in ways and like not in found:
                if compiled := [way for name, way in timed.items() if name.startswith(TRITON) and isinstance(way, partial)]:
                    from kernels.dense.linear_triton import compile_side_by_side

                    compile_side_by_side(compiled)
                found[like] = ranked(timed)
            self._choice[rows] = known if known in ways else found[like][0]
            self.rough.discard(rows)
            if known not in ways and len(timed) < len(ways):
                self.rough.add(rows)
        return self._choice[rows]

    @property
    def choices(self) -> dict[int, str]:
        """By rows, the name of the way chosen."""
        return dict(self._choice)

    def __call__(self, x: Tensor, out: Tensor, x0: Tensor | None, state: Tensor, xl: Tensor | None = None) -> None:
        """Writes out[B, padded(out)] from x[B, padded(in)] (and for a cross layer x0 and xl, of the same shape as out).

        Args:
            state: int32[STATE_WORDS] on the device, see state.py; rows past TRUE_ROWS may be left as the product.

        float32 products follow `matmul_precision`.
        """
        default = "product" if self.cross or self._apart else "epilogue"
        self.ways(x, out, x0, state, xl)[self._choice.get(x.shape[0], default)]()

    def _fused(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self.activation == "relu":
            torch._addmm_activation(self._bias, x, weight, out=out)
        else:
            activate_(torch.addmm(self._bias, x, weight, out=out), self.activation)

    def _product(self, x: Tensor, weight: Tensor, out: Tensor, x0: Tensor | None, state: Tensor, xl: Tensor | None) -> None:
        torch.mm(x, weight, out=out)
        rows, width = out.shape
        if x0 is not None:
            cross_epilogue(state, x0, x if xl is None else xl, self._bias, rows, width, out, outer_bias=self._outer_bias)
            return
        if self._apart:
            self._apart(state, out, self._bias, rows, out)
            return
        check_rows("linear out", out, rows, width)
        relu = self.activation == "relu"
        args = (self._bias.data_ptr(), out.data_ptr(), np.int32(out.stride(0)), np.int32(width), np.int32(relu))
        launch(self._epilogue, (rows, -(-width // 1024)), 256, args)
        if not relu:
            activate_(out, self.activation)


_ISSUING = RLock()


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Lets float32 products use tf32 ("tf32") or forbids it (else) while operators are issued or captured; then as before.

    torch keeps this in process-wide flags, so only one thread issues or captures at a time. Split bf16 products are summed in
    float32.
    """
    flags = torch.backends.cuda.matmul
    with _ISSUING:
        before = flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction
        flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction = precision == "tf32", False
        try:
            yield
        finally:
            flags.allow_tf32, flags.allow_bf16_reduced_precision_reduction = before
