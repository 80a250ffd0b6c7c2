"""DLRM's dots of the pairs of a row's vectors on a CPU, by dot.c. See `reference.dot`."""

import torch

from kernels import reference
from kernels.cpu.openmp_pool import pool_arguments
from kernels.runtime.c_build import cpu_library

_LANES, _NUMBERS = 16, 1 << 14  # of dot.c


class CpuDot:
    """The interaction of `fields` vectors of `dim` columns, the first `keep` columns in front; `diagonal`: each with itself.

    torch's batched product takes all pairs twice, and picks from them: 2.1 to 2.8 times the time (27 x 64, 64 to 4,096 rows).
    """

    def __init__(self, fields: int, dim: int, keep: int, diagonal: bool) -> None:
        self._fields, self._dim, self._keep, self._diagonal = fields, dim, keep, diagonal
        self._out_width = keep + fields * (fields + (1 if diagonal else -1)) // 2
        library = cpu_library() if -(-fields // _LANES) * _LANES * dim <= _NUMBERS else None
        self._run = None if library is None else library.dpi_dot

    def __call__(self, *parts: torch.Tensor) -> torch.Tensor:
        """float32[rows, keep + pairs] of one or two values, which lie side by side.

        Raises:
            ValueError: they are of another width.
        """
        parts = tuple(part.float() for part in parts)
        if len(parts) > 2 or parts[0].shape[1] % self._dim or any(part.stride(1) != 1 for part in parts):
            parts = (torch.cat(parts, 1),)
        (first, *_), second, rows = parts, parts[-1], len(parts[0])
        widths = [part.shape[1] for part in parts]
        if sum(widths) != self._fields * self._dim or len(second) != rows:
            raise ValueError(f"dot: got parts of widths {widths}, expected {self._fields * self._dim} columns together")
        if self._run is None:
            return reference.dot(torch.cat(parts, 1), self._fields, self._dim, self._keep, self._diagonal)
        out = torch.empty(rows, self._out_width)
        self._run(
            first.data_ptr(), widths[0], first.stride(0), second.data_ptr(), second.stride(0), rows, self._fields, self._dim,
            self._keep, self._diagonal, out.data_ptr(), *pool_arguments(),
        )  # fmt: skip
        return out
