"""Attention over a row's fields on a GPU (field_attention.cu). See `reference.field_attention`."""

from collections.abc import Sequence
from math import log2

import numpy as np
import torch

from kernels.dense.activation import KINDS
from kernels.runtime.launch import check_rows, launch, type_name
from kernels.runtime.source import kernel

MOST_FIELDS, MOST_DIM, MOST_SIZE = 64, 64, 32  # what a warp keeps in registers
_WARPS, _BLOCKS = 4, 4  # of a block, and blocks of a multiprocessor that are worth having

Projection = tuple[torch.Tensor, torch.Tensor | None]  # weight[heads * size, dim], bias[heads * size]


class FieldAttention:
    """One layer with its weights on one device.

    Args:
        projections: Q, K, V, and R if there is a residual.
        scale: of the logits. precision: "fp32" keeps float32's digits.

    Raises:
        ValueError: more fields or columns than a warp takes.
    """

    def __init__(
        self,
        fields: int,
        heads: int,
        projections: Sequence[Projection],
        scale: float,
        activation: str,
        dtype: torch.dtype,
        precision: str,
        device: torch.device,
    ) -> None:
        width, dim = projections[0][0].shape
        size = width // heads
        if fields > MOST_FIELDS or dim > MOST_DIM or size > MOST_SIZE:
            raise ValueError(
                f"field attention: got {fields} fields of dim {dim} and heads of {size}, expected at most {MOST_FIELDS}, "
                f"{MOST_DIM} and {MOST_SIZE}"
            )
        self._width, self._out_width, self._heads = fields * dim, fields * width, heads
        self._weights = torch.stack([packed_weight(w, heads, dtype) for w, _ in projections], 1).contiguous().to(device)
        self._bias = torch.stack([_padded_bias(w, b, heads) for w, b in projections], 1).contiguous().to(device)
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        constants = {
            "X": type_name(dtype), "FIELDS": str(fields), "DIM": str(dim), "HEADS": str(heads), "SIZE": str(size),
            "RESIDUAL": str(len(projections) - 3), "ACTIVATION": str(KINDS[activation]),
            "PASSES": "3" if precision == "fp32" else "1", "SCALE": f"{scale * log2(np.e):.9e}f",
        }  # fmt: skip
        self._function = kernel("attention/field_attention", "field_attention", constants, device.index or 0)

    def __call__(self, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor) -> None:
        """out[rows, fields * heads * size] from x[rows, fields * dim], both of the dtype given, for the first state[TRUE_ROWS]
        rows. x's rows lie 8 bytes aligned.
        """
        check_rows("field attention x", x, rows, self._width)
        check_rows("field attention out", out, rows, self._out_width)
        most = -(-self._processors * _BLOCKS // self._heads) * self._heads
        blocks = min(-(-rows // _WARPS) * self._heads, most)  # a multiple of the heads: a warp keeps to one
        i32 = np.int32
        args = (
            state.data_ptr(), x.data_ptr(), i32(x.stride(0)), self._weights.data_ptr(), self._bias.data_ptr(), out.data_ptr(),
            i32(out.stride(0)),
        )  # fmt: skip
        launch(self._function, blocks, 32 * _WARPS, args)


def packed_weight(weight: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[heads, steps, parts, 8 rows, 4 lanes, numbers of 8 bytes] in the dtype, zeros beyond: what each lane multiplies.

    A step has 32 bytes of a row, of which a lane's 8 lie side by side; a part has 8 rows of a head.
    """
    numbers = 8 // dtype.itemsize
    size, dim = len(weight) // heads, weight.shape[1]
    steps, parts = -(-dim // (4 * numbers)), -(-size // 16) * 2
    wide = torch.zeros(heads, parts * 8, steps * 4 * numbers)
    wide[:, :size, :dim] = weight.float().cpu().reshape(heads, size, dim)
    split = wide.to(dtype).view(heads, parts, 8, steps, 4, numbers)
    return split.permute(0, 3, 1, 2, 4, 5).contiguous()


def _padded_bias(weight: torch.Tensor, bias: torch.Tensor | None, heads: int) -> torch.Tensor:
    """float32[heads, 8 * parts]."""
    size = len(weight) // heads
    wide = torch.zeros(heads, -(-size // 16) * 16)
    if bias is not None:
        wide[:, :size] = bias.float().cpu().reshape(heads, size)
    return wide
