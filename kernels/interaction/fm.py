"""The factorization machine on a GPU (fm.cu). See `reference.fm`."""

import numpy as np
import torch

from kernels.runtime.launch import WARP_ROWS, check_rows, launch, type_name
from kernels.runtime.source import kernel


def fm(state: torch.Tensor, x: torch.Tensor, rows: int, offset: int, fields: int, dim: int, out: torch.Tensor) -> None:
    """out float32[rows, 1] = `reference.fm` for the first state[TRUE_ROWS] rows; sums in float32 whatever x's dtype."""
    check_rows("fm x", x, rows, offset + fields * dim)
    check_rows("fm out", out, rows, 1)
    function = kernel("interaction/fm", "fm", {"X": type_name(x.dtype)}, x.device.index)
    i32 = np.int32
    args = state.data_ptr(), x.data_ptr(), i32(x.stride(0)), i32(offset), i32(fields), i32(dim), out.data_ptr()
    launch(function, -(-rows // WARP_ROWS), 32 * WARP_ROWS, args)
