"""Cross networks on a GPU (cross.cu): DCN's, folded into one pass, and the mixture of experts of DCN-V2's. Each has its twin in
`reference`. All write `out` for the first state[TRUE_ROWS] rows of a grid of `rows`.
"""

import numpy as np
import torch

from kernels.reference import folded_cross
from kernels.runtime.launch import WARP_ROWS, check_rows, launch, type_name
from kernels.runtime.source import kernel


class CrossV1:
    """DCN's cross network folded into one pass over x0 (row_interactions.cuh says how). Owns the folded weights on the device.

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
            "interaction/cross", "cross_v1_head" if self._head else "cross_v1", constants, device.index or 0
        )

    def __call__(self, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """out = x_L (x's dtype, [rows, width]), or float32[rows, tasks] = x_L head^T."""
        check_rows("cross_v1 x", x, rows, self.width)
        i32, weights, k, c = np.int32, self._weights.data_ptr(), self._k.data_ptr(), self._c.data_ptr()
        results = (out.data_ptr(),) if self._head else (c, out.data_ptr(), i32(out.stride(0)))
        args = state.data_ptr(), x.data_ptr(), i32(x.stride(0)), i32(self.width), weights, k, *results
        launch(self._function, -(-rows // WARP_ROWS), 32 * WARP_ROWS, args)


def mixture(
    state: torch.Tensor, x: torch.Tensor, gates: torch.Tensor, rows: int, experts: int, dim: int, out: torch.Tensor
) -> None:
    """out[rows, experts * dim] = `reference.mixture`."""
    check_rows("mixture x", x, rows, experts * dim)
    check_rows("mixture gates", gates, rows, experts)
    check_rows("mixture out", out, rows, experts * dim)
    in_fours = dim % 4 == 0 and all(t.stride(0) % 4 == 0 and t.data_ptr() % 16 == 0 for t in (x, out))
    vector = 4 if in_fours else 1  # columns of a thread
    function = kernel("interaction/cross", "mixture", {"X": type_name(x.dtype), "VEC": str(vector)}, x.device.index)
    i32 = np.int32
    args = (
        state.data_ptr(), x.data_ptr(), i32(x.stride(0)), gates.data_ptr(), i32(gates.stride(0)), i32(experts), i32(dim),
        out.data_ptr(), i32(out.stride(0)),
    )  # fmt: skip
    launch(function, -(-rows * experts * dim // (vector * 256)), 256, args)
