"""A plain gather of random rows (gather.cu): what the hardware gives for rows of that size, and so the lookup's yardstick."""

from pathlib import Path

import numpy as np
import torch

UNROLLS = (1, 2, 4, 8)  # rows a thread: the fastest is the yardstick
_SOURCE = Path(__file__).with_name("gather.cu")


class Gather:
    """out[i] = table[ids[i]] for rows that are a multiple of 16 bytes, at most 4096.

    Raises:
        ValueError: rows of another size.
    """

    def __init__(self, row_bytes: int, unroll: int) -> None:
        import cupy

        if row_bytes % 16 or 256 % (row_bytes // 16):
            raise ValueError(f"gather: got rows of {row_bytes} bytes, expected 16 bytes times a power of two up to 256")
        self.vectors, self.unroll = row_bytes // 16, unroll
        options = ("-std=c++17", f"-DVECTORS={self.vectors}", f"-DUNROLL={unroll}")
        self._kernel = cupy.RawModule(code=_SOURCE.read_text(), options=options, backend="nvrtc").get_function("gather")

    def __call__(self, table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        """table[R, d], ids int32[n], out[n, d] of the table's dtype, all contiguous, on torch's current stream."""
        if ids.dtype != torch.int32 or out.dtype != table.dtype or out.shape != (len(ids), table.shape[1]):
            raise ValueError(f"gather: got {ids.dtype}, {out.dtype}{tuple(out.shape)}, expected int32 and one row an id")
        self.at(table.data_ptr(), ids, out)

    def at(self, address: int, ids: torch.Tensor, out: torch.Tensor) -> None:
        """The same of rows that lie wherever the device reads them."""
        import cupy

        blocks = -(-len(ids) * self.vectors // (256 * self.unroll))
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            self._kernel((blocks,), (256,), (address, ids.data_ptr(), out.data_ptr(), np.int64(len(ids))))
