"""GRU and LSTM on a CPU: all steps in one call of C (recurrence.c); plainly without it. At bf16 the inputs'
products of all steps come first, as one.
"""

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu.dense import Linear
from kernels.cpu.openmp_pool import pool_arguments
from kernels.recurrent.cells import Cell, gru, lstm
from kernels.runtime.c_build import cpu_library

_LANES = 16  # the most of recurrence.c
_NUMBERS = 1 << 19  # of such products that lie in memory at a time, a thread: 2 MB of float32, which the L2 holds
_KINDS = {"none": 0, "scaled": 1, "replaced": 2}
_LSTM = 3


class CpuRecurrence:
    """One layer with its weights. Safe to use from several threads.

    Args:
        op: "gru" or "lstm". cells: of each direction. gate: of a GRU: "none", "scaled", "replaced".
        cell: whether an LSTM's last cell states are given behind the hidden states.
        dtype: of the factors of the inputs' products; all else is float32.
    """

    def __init__(
        self, op: str, steps: int, cells: Sequence[Cell], gate: str, cell: bool, dtype: torch.dtype = torch.float32
    ) -> None:
        self._op, self._steps, self._cells, self._gate, self._cell = op, steps, cells, gate, cell
        self._inputs, self._hidden = cells[0][0].shape[1], cells[0][1].shape[1]
        self._directions = [_Direction(c, dtype) for c in cells]

    def __call__(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """float32[rows, (steps + cell) * directions * hidden] from x[rows, steps * inputs] and scale[rows, steps]."""
        x, a = x.float(), None if scale is None else scale.float().contiguous()
        library, rows, states = cpu_library(), len(x), self._steps * len(self._cells) * self._hidden
        sequence = (x if x.stride(1) == 1 else x.contiguous()).view(rows, self._steps, self._inputs)
        if library is None:
            return self._plain(sequence, a)
        out = torch.empty(rows, states + self._cell * len(self._cells) * self._hidden)
        kind = _LSTM if self._op == "lstm" else _KINDS[self._gate]
        for d, own in enumerate(self._directions):
            most = rows if own.linear is None else max(1, _NUMBERS * torch.get_num_threads() // (self._steps * own.width))
            for first in range(0, rows, most):
                part = sequence[first : first + most]
                if own.linear is not None:
                    part = own.linear(part.reshape(-1, self._inputs)).float().view(len(part), self._steps, -1)
                to = out.data_ptr() + 4 * (first * out.stride(0) + d * self._hidden)
                at = 0 if a is None else a.data_ptr() + 4 * first * self._steps
                last = to + 4 * states if self._cell else 0
                of_x = 0 if own.of_x is None else own.of_x.data_ptr()
                numbers = (
                    part.data_ptr(), of_x, own.x_bias.data_ptr(), own.of_h.data_ptr(), own.h_bias.data_ptr(), at, to, last,
                    part.stride(0), self._inputs, self._steps, own.padded, own.gates, own.of_h.shape[1], kind, d, self._steps,
                    out.stride(0), len(self._cells) * self._hidden, self._hidden,
                )  # fmt: skip
                library.dpi_recurrence((ctypes.c_int64 * len(numbers))(*numbers), len(part), *pool_arguments())
        return out

    def _plain(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        states, last = list[torch.Tensor](), list[torch.Tensor]()
        for d, own in enumerate(self._cells):
            if self._op == "lstm":
                h, c = lstm(x, own, bool(d))
                last.append(c)
            else:
                h = gru(x, scale, own, self._gate == "replaced", bool(d))
            states.append(h)
        return torch.cat([torch.cat(states, 2).flatten(1), *(last if self._cell else [])], 1)


class _Direction:
    """The weights as C reads them: each gate padded with zeros to a multiple of the lanes.

    linear: what gives W x + b where C does not; of_x is None then.
    """

    def __init__(self, cell: Cell, dtype: torch.dtype) -> None:
        w, u, b, c = cell
        hidden = u.shape[1]
        self.gates, self.padded = len(u) // hidden, -(-hidden // _LANES) * _LANES
        self.width = self.gates * self.padded
        self.of_h, self.h_bias, self.x_bias = self._turned(u), self._bias(c), self._bias(b)
        self.linear = None if dtype == torch.float32 else Linear(self._rows(w), self.x_bias[: self.width], "identity", dtype)
        self.of_x = self._turned(w) if self.linear is None else None
        if self.of_x is not None and self.gates == 4:  # an LSTM's: one sum
            self.h_bias = self.h_bias + self.x_bias

    def _rows(self, matrix: torch.Tensor) -> torch.Tensor:
        """[gates * padded, columns] of [gates * hidden, columns]."""
        wide = torch.zeros(self.gates, self.padded, matrix.shape[1])
        wide[:, : len(matrix) // self.gates] = matrix.float().view(self.gates, -1, matrix.shape[1])
        return wide.flatten(0, 1)

    def _turned(self, matrix: torch.Tensor) -> torch.Tensor:
        """[columns, width], the width a multiple of the lanes twice."""
        out = torch.zeros(matrix.shape[1], -(-self.width // (2 * _LANES)) * 2 * _LANES)
        out[:, : self.width] = self._rows(matrix).t()
        return out

    def _bias(self, vector: torch.Tensor | None) -> torch.Tensor:
        return self._turned(torch.zeros(self.gates, 1) if vector is None else vector[:, None])[0]
