"""DLRM's pairwise dots on a GPU (dot.cu). See `reference.dot`."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.runtime.launch import check_rows, launch, shared_limit, type_name
from kernels.runtime.source import kernel

_THREADS, _MOST_ROWS = 128, 8
_STATIC_LIMIT = 48 * 1024  # of shared memory that a kernel gets without asking


class Dot:
    """The interaction of `fields` vectors of `dim` columns, the first `keep` columns in front.

    Raises:
        ValueError: a row's vectors do not fit into shared memory.
    """

    def __init__(self, fields: int, dim: int, keep: int, diagonal: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._width = fields * dim
        self._out_width = keep + fields * (fields + (1 if diagonal else -1)) // 2
        side = (fields + 1) // 2
        row_bytes = 2 * side * (-(-dim // 4) * 4 + 4) * 4
        if row_bytes > shared_limit(device):
            raise ValueError(f"dot: got {row_bytes} bytes of vectors a row, expected <= {shared_limit(device)}")
        tiles = side * (side + 1) // 2
        self._rows = max(1, min(_MOST_ROWS, _THREADS // tiles, _STATIC_LIMIT // row_bytes))
        self._shared_bytes = self._rows * row_bytes
        constants = {
            "X": type_name(dtype), "FIELDS": str(fields), "DIM": str(dim), "KEEP": str(keep), "DIAGONAL": str(int(diagonal)),
            "ROWS": str(self._rows),
        }  # fmt: skip
        self._function = kernel("interaction/dot", "dot", constants, device.index or 0, self._shared_bytes)

    def __call__(self, state: torch.Tensor, parts: Sequence[tuple[torch.Tensor, int]], rows: int, out: torch.Tensor) -> None:
        """out[rows, keep + pairs] from one or two values and their widths, side by side, for the first state[TRUE_ROWS] rows.

        Raises:
            ValueError: the parts are of another width or dtype.
        """
        widths = [width for _, width in parts]
        if len(parts) not in (1, 2) or sum(widths) != self._width:
            raise ValueError(f"dot: got parts of widths {widths}, expected one or two of {self._width} columns together")
        for tensor, width in parts:
            check_rows("dot part", tensor, rows, width)
        check_rows("dot out", out, rows, self._out_width)
        (first, width), (second, _) = parts[0], parts[-1]
        i32 = np.int32
        args = (
            state.data_ptr(), first.data_ptr(), i32(width), i32(first.stride(0)), second.data_ptr(), i32(second.stride(0)),
            out.data_ptr(), i32(out.stride(0)),
        )  # fmt: skip
        launch(self._function, -(-rows // self._rows), _THREADS, args, shared_bytes=self._shared_bytes)
