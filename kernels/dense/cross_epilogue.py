"""Behind the product of a DCN-V2 layer on a GPU (cross_epilogue.cu): x_0 * (W x_l + b) + x_l (Wang et al. 2021, eq. 1)."""

import numpy as np
import torch

from kernels.runtime.launch import check_rows, four_columns_a_thread, launch, type_name
from kernels.runtime.source import kernel


def cross_epilogue(
    state: torch.Tensor,
    x0: torch.Tensor,
    xl: torch.Tensor,
    bias: torch.Tensor,
    rows: int,
    width: int,
    out: torch.Tensor,
    *,
    outer_bias: bool = False,
) -> None:
    """out[:rows, :width] = x0 * (out + bias) + xl, with `outer_bias` x0 * out + bias + xl, for the first state[TRUE_ROWS] rows,
    in place on the product W xl. Widths and strides are multiples of 4.
    """
    for name, t in (("x0", x0), ("xl", xl), ("out", out)):
        check_rows(f"cross_v2 {name}", t, rows, width)
    function = kernel("dense/cross_epilogue", "cross_v2_epilogue", {"X": type_name(x0.dtype)}, x0.device.index)
    i32 = np.int32
    args = (
        state.data_ptr(), x0.data_ptr(), xl.data_ptr(), bias.data_ptr(), out.data_ptr(),
        i32(x0.stride(0)), i32(xl.stride(0)), i32(out.stride(0)), i32(width), i32(outer_bias),
    )  # fmt: skip
    launch(function, *four_columns_a_thread(rows, width), args)
