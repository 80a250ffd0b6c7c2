"""Bias and activation on a GPU (activation.cu), for those that no product's epilogue has. See `reference.activate_`."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.runtime.launch import check_rows, four_columns_a_thread, launch, type_name
from kernels.runtime.source import kernel

KINDS = {"identity": 0, "relu": 1, "sigmoid": 2, "tanh": 3, "gelu": 4, "gelu_tanh": 5, "prelu": 6, "dice": 7, "leaky_relu": 6}

SHAPED = ("leaky_relu", "prelu", "dice")  # whose units have parameters


def unit_params(
    activation: str, params: Sequence[torch.Tensor], slope: float, units: int, width: int, device: torch.device
) -> torch.Tensor:
    """float32[3, width] on the device: alpha, scale and shift of `units` units, 0 beyond; a leaky ReLU is a PReLU."""
    out = torch.zeros(3, width, device=device)
    if activation == "leaky_relu":
        out[0, :units] = slope
    for row, values in zip(out, params, strict=False):
        row[:units] = values.to(device)
    return out


class Activation:
    """activation(x + bias) for `units` columns. Owns the parameters, padded to `width` columns, on the device.

    Args:
        params: as `reference.activate_` takes them. slope: of leaky_relu.
    """

    def __init__(
        self,
        activation: str,
        params: Sequence[torch.Tensor],
        slope: float,
        units: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._width = width
        self._params = unit_params(activation, params, slope, units, width, device)
        constants = {"X": type_name(dtype), "ACTIVATION": str(KINDS[activation])}
        self._function = kernel("dense/activation", "bias_activation", constants, device.index or 0)

    def __call__(self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, rows: int, out: torch.Tensor) -> None:
        """out[:n, :width] = activation(x + bias) for the first n = state[TRUE_ROWS] of `rows` rows; out may be x."""
        for name, t in (("x", x), ("out", out)):
            check_rows(f"activation {name}", t, rows, self._width)
        i32 = np.int32
        args = (
            state.data_ptr(), x.data_ptr(), i32(x.stride(0)), 0 if bias is None else bias.data_ptr(), self._params.data_ptr(),
            out.data_ptr(), i32(out.stride(0)), i32(self._width),
        )  # fmt: skip
        launch(self._function, *four_columns_a_thread(rows, self._width), args)
