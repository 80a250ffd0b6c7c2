"""Feature interactions on a GPU (interaction.cu): factorization machine, DCN cross networks. Each has its twin in `reference`.

Every function writes `out` for the first state[0] rows of a grid of `rows`; `state` is the int32[4] on the device that the
lookup leaves.
"""

import numpy as np
import torch

from kernels.runtime.launch import WARP_ROWS, check_rows, launch, type_name
from kernels.runtime.source import kernel


def fm(state: torch.Tensor, x: torch.Tensor, rows: int, offset: int, fields: int, dim: int, out: torch.Tensor) -> None:
    """out float32[rows, 1] = `reference.fm`; sums in float32 whatever x's dtype."""
    check_rows("fm x", x, rows, offset + fields * dim)
    check_rows("fm out", out, rows, 1)
    function = kernel("interaction/interaction", "fm", {"X": type_name(x.dtype)}, x.device.index)
    args = (state.data_ptr(), x.data_ptr(), *_int32(x.stride(0), offset, fields, dim), out.data_ptr())
    launch(function, -(-rows // WARP_ROWS), 32 * WARP_ROWS, args)


def folded_cross(
    weights: torch.Tensor, biases: torch.Tensor, head: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weights[dots, width], k[dots], c_L[width]) of a cross network, float64, as row_interactions.cuh explains; the vectors
    of `head` [tasks, width] come behind the layers'.
    """
    w, b = weights.double().cpu(), biases.double().cpu()
    c = torch.cat([torch.zeros(1, w.shape[1], dtype=torch.float64), b.cumsum(0)])  # c_0 .. c_L
    k = (c[:-1] * w).sum(1)
    if head is None:
        return w, k, c[-1]
    v = head.double().cpu()
    return torch.cat([w, v]), torch.cat([k, v @ c[-1]]), c[-1]


class CrossV1:
    """DCN's cross network folded into one pass over x0 (interaction.cu says how). Owns the folded weights on the device.

    Args:
        weights, biases: [layers, width], any float dtype.
        head: [tasks, width] if only `head`'s share of the scores is wanted, else None.
    """

    def __init__(
        self, weights: torch.Tensor, biases: torch.Tensor, head: torch.Tensor | None, x_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.width = weights.shape
        w, k, c = folded_cross(weights, biases, head)
        self._weights, self._k, self._c = (t.float().contiguous().to(device) for t in (w, k, c))
        constants = {"X": type_name(x_dtype), "LAYERS": str(self.layers), "DOTS": str(len(w))}
        self._head = head is not None
        self._function = kernel(
            "interaction/interaction", "cross_v1_head" if self._head else "cross_v1", constants, device.index or 0
        )

    def __call__(self, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """out = x_L (x's dtype, [rows, width]), or float32[rows, tasks] = x_L head^T."""
        check_rows("cross_v1 x", x, rows, self.width)
        args = (state.data_ptr(), x.data_ptr(), *_int32(x.stride(0), self.width), self._weights.data_ptr(), self._k.data_ptr())
        if not self._head:
            args = (*args, self._c.data_ptr())
        args = (*args, out.data_ptr()) if self._head else (*args, out.data_ptr(), *_int32(out.stride(0)))
        launch(self._function, -(-rows // WARP_ROWS), 32 * WARP_ROWS, args)


def mixture(
    state: torch.Tensor, x: torch.Tensor, gates: torch.Tensor, rows: int, experts: int, dim: int, out: torch.Tensor
) -> None:
    """out[rows, experts * dim] = `reference.mixture`."""
    check_rows("mixture x", x, rows, experts * dim)
    check_rows("mixture gates", gates, rows, experts)
    check_rows("mixture out", out, rows, experts * dim)
    function = kernel("interaction/interaction", "mixture", {"X": type_name(x.dtype)}, x.device.index)
    args = (state.data_ptr(), x.data_ptr(), *_int32(x.stride(0)), gates.data_ptr(), *_int32(gates.stride(0), experts, dim))
    launch(function, -(-rows // WARP_ROWS), 32 * WARP_ROWS, (*args, out.data_ptr(), *_int32(out.stride(0))))


def cross_v2_epilogue(
    state: torch.Tensor, x0: torch.Tensor, xl: torch.Tensor, bias: torch.Tensor, rows: int, width: int, out: torch.Tensor
) -> None:
    """out[:rows, :width] = x0 * (out + bias) + xl, in place on the product W xl. Widths and strides are multiples of 4."""
    for name, t in (("x0", x0), ("xl", xl), ("out", out)):
        check_rows(f"cross_v2 {name}", t, rows, width)
    function = kernel("interaction/interaction", "cross_v2_epilogue", {"X": type_name(x0.dtype)}, x0.device.index)
    args = (state.data_ptr(), x0.data_ptr(), xl.data_ptr(), bias.data_ptr(), out.data_ptr())
    threads = min(256, -(-width // 4 // 32) * 32 or 32)
    launch(
        function,
        (rows, -(-width // (4 * threads))),
        threads,
        (*args, *_int32(x0.stride(0), xl.stride(0), out.stride(0), width)),
    )


def _int32(*values: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(v) for v in values)
