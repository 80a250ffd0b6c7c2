"""GRU and LSTM on a GPU, a layer a launch (recurrence.cu). See `cells.gru` and `cells.lstm`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.recurrent.cells import Cell
from kernels.runtime.launch import check_rows, launch, type_name
from kernels.runtime.source import kernel

GATE_KINDS = ("none", "scaled", "replaced")
MOST_HIDDEN, MOST_INPUTS = 256, 1024  # what the warps of a block keep of the sums, and take of a step's inputs
_ROWS = 16  # of a block
# Words of weights that a lane may keep in registers beside all else: a thread has 255 registers in blocks of up to 8 warps, and
# in larger ones half of that.
_KEPT_WORDS, _KEPT_WORDS_OF_MANY_WARPS = 128, 48


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block shares out the hidden columns, 8 at a time: warps, and how often each takes 8."""

    warps: int
    tiles: int

    @staticmethod
    def of(inputs: int, hidden: int) -> "Tile":
        """At most 8 warps, 16 where a warp would take more than two times 8 columns, or the inputs want more to load them."""
        eights = -(-hidden // 8)
        warps = min(eights, 8 if eights <= 16 else 16)
        return Tile(max(warps, 2, min(16, -(-inputs // 32))), -(-eights // warps))


class Recurrence:
    """One layer with its weights on one device.

    Args:
        op: "gru" or "lstm". cells: of each direction. gate: of a GRU, one of `GATE_KINDS`.
        cell: whether an LSTM's last cell states are written behind the hidden states.
        precision: "fp32" keeps float32's digits in the products, "tf32" rounds their factors; states are float32 in all.

    Raises:
        ValueError: more columns than a block takes.
    """

    def __init__(
        self,
        op: str,
        steps: int,
        cells: Sequence[Cell],
        gate: str,
        cell: bool,
        dtype: torch.dtype,
        precision: str,
        device: torch.device,
    ) -> None:
        w, u = cells[0][:2]
        inputs, hidden = w.shape[1], u.shape[1]
        if hidden > MOST_HIDDEN or inputs > MOST_INPUTS:
            got = f"{inputs} columns and {hidden} hidden ones"
            raise ValueError(f"recurrence: got {got}, expected at most {MOST_INPUTS} and {MOST_HIDDEN}")
        tile, passes = Tile.of(inputs, hidden), 3 if precision == "fp32" else 1
        self._steps, self._inputs, self._directions, self._scaled = steps, inputs, len(cells), gate != "none"
        self._width, self._threads = (steps + cell) * len(cells) * hidden, 32 * tile.warps
        columns = 8 * tile.warps * tile.tiles
        self._of_x, self._of_h = (
            torch.stack([packed(matrix, hidden, columns, dtype, passes) for matrix in side]).to(device)
            for side in ([c[0] for c in cells], [c[1] for c in cells])
        )
        self._biases = torch.stack([_biases(c, columns, op == "lstm") for c in cells]).to(device)
        of_x, of_h = (t[0].numel() // (32 * tile.warps) for t in (self._of_x, self._of_h))  # words of a lane
        room = _KEPT_WORDS if tile.warps <= 8 else _KEPT_WORDS_OF_MANY_WARPS
        constants = {
            "X": type_name(dtype), "LSTM": str(int(op == "lstm")), "GATE": str(GATE_KINDS.index(gate)), "INPUTS": str(inputs),
            "HIDDEN": str(hidden), "DIRECTIONS": str(len(cells)), "PASSES": str(passes), "WARPS": str(tile.warps),
            "TILES": str(tile.tiles), "KEPT": str((of_h <= room) + (of_h + of_x <= room)), "LAST_CELL": str(int(cell)),
        }  # fmt: skip
        numbers = 32 // dtype.itemsize  # of a step of a product
        self._shared_bytes = 2 * _ROWS * 32 * ((-(-inputs // numbers) + -(-hidden // numbers)) | 1)
        self._function = kernel("recurrent/recurrence", "recurrence", constants, device.index or 0, self._shared_bytes)

    def __call__(self, state: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, rows: int, out: torch.Tensor) -> None:
        """out[rows, (steps + cell) * directions * hidden] from x[rows, steps * inputs] and, where there is a gate's,
        scale[rows, steps], all of the dtype given, for the first state[TRUE_ROWS] rows.
        """
        check_rows("recurrence x", x, rows, self._steps * self._inputs)
        check_rows("recurrence out", out, rows, self._width)
        if (scale is not None) != self._scaled:
            raise ValueError(f"recurrence scale: got {scale is not None}, expected {self._scaled}, as the gate has it")
        if scale is not None:
            check_rows("recurrence scale", scale, rows, self._steps)
        i32 = np.int32
        args = (
            state.data_ptr(), x.data_ptr(), i32(x.stride(0)), 0 if scale is None else scale.data_ptr(),
            i32(0 if scale is None else scale.stride(0)), self._of_x.data_ptr(), self._of_h.data_ptr(), self._biases.data_ptr(),
            i32(self._steps), out.data_ptr(), i32(out.stride(0)),
        )  # fmt: skip
        launch(self._function, -(-rows // _ROWS) * self._directions, self._threads, args, shared_bytes=self._shared_bytes)


def packed(matrix: torch.Tensor, hidden: int, columns: int, dtype: torch.dtype, passes: int) -> torch.Tensor:
    """int32[columns / 8, steps of K, gates, 32 lanes, words] of W or U: what each lane multiplies, zeros beyond.

    A step of K has 32 bytes of a row, of which a lane's 8 lie side by side: two words, rounded to tf32 where that is what is
    multiplied, and with 3 passes what the rounding loses behind them.
    """
    numbers, width = 32 // dtype.itemsize, matrix.shape[1]
    gates = len(matrix) // hidden
    k = torch.zeros(gates, columns, -(-width // numbers) * numbers)
    k[:, :hidden, :width] = matrix.float().cpu().view(gates, hidden, width)
    words = k.to(dtype).contiguous().view(torch.int32) if dtype != torch.float32 else rounded_tf32(k).view(torch.int32)
    halves = [words] if passes == 1 else [words, rounded_tf32(k - words.view(torch.float32)).view(torch.int32)]
    lanes = [w.view(gates, columns // 8, 8, -1, 4, 2).permute(1, 3, 0, 2, 4, 5) for w in halves]
    return torch.cat(lanes, 5).contiguous()


def rounded_tf32(t: torch.Tensor) -> torch.Tensor:
    """float32 numbers to the 11 binary digits of tf32, halves away from zero, as `split` of mma.cuh."""
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _biases(cell: Cell, columns: int, lstm: bool) -> torch.Tensor:
    """float32[gates + 1, columns]: what x's sums begin with, and at last h's for the last gate, which a GRU adds up apart."""
    u, b, c = cell[1:]
    hidden = u.shape[1]
    gates = len(u) // hidden
    of_x, of_h = (torch.zeros(gates, hidden) if t is None else t.float().cpu().view(gates, hidden) for t in (b, c))
    apart = torch.zeros(1, hidden) if lstm else of_h[-1:]
    sums = torch.cat([of_x + of_h, apart])
    if not lstm:
        sums[gates - 1] = of_x[-1]
    return torch.nn.functional.pad(sums, (0, columns - hidden))
