"""DIN's target attention on a GPU: a block a row (attention.cu), or in tf32 and bf16 on the tensor cores (attention_mma.py),
whichever is fastest for a number of rows. See `reference.attention`.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kernels.attention.attention_columns import AttentionColumns, listed
from kernels.attention.attention_mma import MmaAttention
from kernels.attention.attention_weights import Layer
from kernels.dense.activation import KINDS, unit_params
from kernels.dense.linear import DENSE_DTYPE
from kernels.reference import split_attention
from kernels.runtime.fastest import fastest
from kernels.runtime.launch import check_rows, launch, overlapping, shared_limit, type_name
from kernels.runtime.source import KernelSource, loaded

_THREADS, _WARPS, _POSITIONS = 128, 4, 4
_STATIC_BYTES = 1024  # that the kernel has beside, rounded up
BLOCK_A_ROW = "block-a-row"  # the way of attention.cu; others are tiles of attention_mma.py


class Attention:
    """A target attention with its weights on one device.

    Args:
        layers, out, activation, slope, output, softmax: as `reference.attention`.
        precision: "fp32" and "bf16" values are summed in float32; "tf32" and "bf16" allow products of these on tensor cores.

    Raises:
        ValueError: a row does not fit into shared memory.
    """

    def __init__(
        self,
        columns: AttentionColumns,
        layers: Sequence[Layer],
        out: tuple[torch.Tensor, torch.Tensor],
        activation: str,
        slope: float,
        output: str,
        softmax: bool,
        precision: str,
        device: torch.device,
    ) -> None:
        self._columns, self._device, self._dtype, dim = columns, device, DENSE_DTYPE[precision], columns.dim
        units = [len(bias) for _, bias, _ in layers]
        self._weights = _packed(layers, out, activation, slope, dim).to(device)
        aligned, widest = -(-dim // 4) * 4, -(-max(units) // 4) * 4
        buffers = max(_WARPS * _POSITIONS * (aligned + 2 * widest), _THREADS + dim)
        fixed = 4 * (-(-columns.length // 4) * 4 + aligned + -(-units[0] // 4) * 4 + buffers)
        limit = shared_limit(device) - _STATIC_BYTES
        formed = fixed + 4 * aligned * (units[0] + 1) <= limit
        self._shared_bytes = fixed + (4 * aligned * (units[0] + 1) if formed else 0)
        if self._shared_bytes > limit:
            raise ValueError(f"attention: got {fixed} bytes of scores and buffers a row, expected <= {limit}")
        constants = columns.constants | {
            "X": type_name(self._dtype), "UNITS": listed(units), "LAYERS": str(len(units)), "SOFTMAX": str(int(softmax)),
            "ACTIVATION": str(KINDS[activation]), "OUTPUT": str(KINDS[output]), "FORMED": str(int(formed)),
        }  # fmt: skip
        self._source = KernelSource.of("attention/attention", "attention", constants, device.index)
        self._mma: MmaAttention | None = None
        if precision in ("tf32", "bf16"):
            how = activation, slope, output, softmax, self._dtype, device
            self._mma = MmaAttention(columns, layers, out, *how)
        self._choice: dict[int, str] = {}
        self.recalled: dict[int, str] = {}  # names of choices made before, by rows; `tune` takes those that exist

    @property
    def ways(self) -> list[str]:
        """Names of the ways to compute it, the one that is taken unless measured first."""
        return [*(self._mma.tiles if self._mma else ()), BLOCK_A_ROW]

    @property
    def choices(self) -> dict[int, str]:
        """By rows, the name of the way chosen."""
        return dict(self._choice)

    def sources(self, rows: int) -> list[KernelSource]:
        """What a bucket of so many rows may need."""
        known = self.recalled.get(rows)
        ways = [known] if known in self.ways else self.ways
        return [self._mma.source(way) if self._mma and way != BLOCK_A_ROW else self._source for way in ways]

    def tune(
        self, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor, context_rows: torch.Tensor | None = None
    ) -> str:
        """Times the ways on these operands and keeps the fastest for this number of rows. Returns its name."""
        if rows not in self._choice:
            known = self.recalled.get(rows, "")

            def way(name: str) -> None:
                with overlapping():
                    self.run(name, state, x, rows, out, context_rows)

            one = known if known in self.ways else self.ways[0] if len(self.ways) == 1 else ""
            self._choice[rows] = one or fastest({name: partial(way, name) for name in self.ways})
        return self._choice[rows]

    def __call__(
        self, state: torch.Tensor, x: torch.Tensor, rows: int, out: torch.Tensor, context_rows: torch.Tensor | None = None
    ) -> None:
        """out[rows, kept and pooled columns] from x for the first state[TRUE_ROWS] rows; both of the precision's dtype.

        context_rows: int32[>= rows]: for each row the one of x whose keys and mask are its own; by default the row itself.
        """
        known = self.recalled.get(rows, "")
        self.run(self._choice.get(rows, known if known in self.ways else self.ways[0]), state, x, rows, out, context_rows)

    def run(
        self,
        way: str,
        state: torch.Tensor,
        x: torch.Tensor,
        rows: int,
        out: torch.Tensor,
        context_rows: torch.Tensor | None = None,
    ) -> None:
        """The same in a given way."""
        check_rows("attention x", x, rows, self._columns.width)
        check_rows("attention out", out, rows, self._columns.out_width)
        if x.dtype != self._dtype or out.dtype != self._dtype:
            raise ValueError(f"attention: got {x.dtype} and {out.dtype}, expected {self._dtype}")
        if context_rows is not None and (context_rows.dtype != torch.int32 or len(context_rows) < rows):
            got = f"{context_rows.dtype} {tuple(context_rows.shape)}"
            raise ValueError(f"attention context rows: got {got}, expected int32[>= {rows}]")
        history = 0 if context_rows is None else context_rows.data_ptr()
        if way != BLOCK_A_ROW:
            assert self._mma is not None
            self._mma.run(self._mma.tiles[way], state, x, rows, out, history)
            return
        i32 = np.int32
        given = state.data_ptr(), x.data_ptr(), i32(x.stride(0)), history
        args = (*given, self._weights.data_ptr(), out.data_ptr(), i32(out.stride(0)))
        launch(loaded(self._source, self._shared_bytes), rows, _THREADS, args, shared_bytes=self._shared_bytes)


def _packed(
    layers: Sequence[Layer], out: tuple[torch.Tensor, torch.Tensor], activation: str, slope: float, dim: int
) -> torch.Tensor:
    """float32 [*] on the host, in the order that attention.cu says; every weight column by column."""
    parts: list[torch.Tensor] = []
    for i, (weight, bias, params) in enumerate(layers):
        weight, bias, units = weight.float().cpu(), bias.float().cpu(), len(bias)
        if i == 0:
            of_query, of_key, of_product = split_attention(weight)
            padding = torch.zeros(units, -dim % 4)
            columns = [of_query, torch.cat([of_key, padding], 1), torch.cat([of_product, padding], 1)]
        else:
            columns = [weight]
        parts += [c.t().reshape(-1) for c in columns]
        shapes = unit_params(activation, [p.float().cpu() for p in params], slope, units, units, torch.device("cpu"))
        parts += [bias, shapes.reshape(-1)]
    return torch.cat([*parts, *(t.float().cpu().reshape(-1) for t in out)])
