"""A lookup on a CPU together with all that reads its embeddings, where that is dense layers and FM: what the rows of a request
share is multiplied once, and a numeric field, which is a number times one vector, is one column and not `dim`. Knows no graph.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kernels.cpu.dense import Layers, Linear
from kernels.cpu.float_lookup import WIDEST_X, FloatLookup, FloatTables
from kernels.cpu.lookup import PackedLookup
from kernels.lookup.id_record import RowAddresses, address
from kernels.lookup.plan import Kind, Slot

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of a weight and a bias
# From so many rows a context and products spared on, what rows share is multiplied apart. That costs 10 us of its own.
_ROWS_OF_A_CONTEXT, _PRODUCTS = 4, 1 << 18


class FirstLayers:
    """Algebra, not approximation: scores differ from those of the layers one by one by float32's rounding.

    Args:
        lookup: one with `float_tables` that reads rows.
        layers: weight[out, x_width], bias[out] or None, and what makes a layer of such.
        series: of each layer, what `Layers` takes for it and those behind it; none if they cannot be computed so.
        fm: whether FM's term of all of x is wanted.

    Attributes:
        few: rows up to which series are computed.
    """

    def __init__(
        self,
        lookup: PackedLookup,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor | None, MakeLinear]],
        fm: bool,
        series: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor | None, bool]]] = (),
    ) -> None:
        tables = lookup.float_tables
        assert tables is not None
        self._count, self._fm = lookup.count, fm
        slots = tables.plan.x_slots
        shared = [s for s in slots if _of_context(tables, s)]
        own = [s for s in slots if s not in shared] if shared else []
        self._whole = _reader(tables, slots)
        self._of_whole = [make(_weight(tables, slots, w), b) for w, b, make in layers]
        self._series = [Layers([(_weight(tables, slots, w), b, relu), *more]) for (w, b, relu), *more in series]
        self.few = min((one.few if own else one.most for one in self._series), default=0)
        self._fits = len(self._series) == 1 and self.few > 0 and self._series[0].shape[0] <= WIDEST_X
        self._products = 0  # of what is shared, for a row
        if own:
            self._own, self._shared = _reader(tables, own), _reader(tables, shared)
            self._of_own = [make(_weight(tables, own, w), None) for w, _, make in layers]
            self._of_shared = [
                (_weight(tables, shared, w).t().contiguous(), torch.zeros(len(w)) if b is None else b) for w, b, _ in layers
            ]
            self._products = sum(weight.numel() for weight, _ in self._of_shared)

    def __call__(self, rows: RowAddresses) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """The outputs [rows, out] of the layers, or (`few`) of the series; the sum of first-order terms and FM's, [rows, 1].
        None for what there is not.
        """
        few = rows.rows <= self.few
        contexts = rows.contexts
        saved = (rows.rows - contexts) * self._products
        apart = not few and saved >= _PRODUCTS and rows.rows >= contexts * _ROWS_OF_A_CONTEXT
        along = self._series[0] if few and self._fits else None
        x, total, fm, outside = (self._own if apart else self._whole)(rows, self._fm, layers=along)
        assert x is not None
        self._count(outside)
        if not apart:
            outputs = [x] if along is not None else [layer(x) for layer in (self._series if few else self._of_whole)]
            return outputs, total, fm
        each = np.arange(contexts, dtype=np.int32)
        of_contexts, *_ = self._shared(rows._replace(rows=contexts, request=None if contexts == 1 else address(each)))
        assert of_contexts is not None
        shares = [torch.addmm(bias, of_contexts, weight) for weight, bias in self._of_shared]
        return [layer.with_shares(x, s, rows.request) for layer, s in zip(self._of_own, shares, strict=True)], total, fm


def _of_context(tables: FloatTables, slot: Slot) -> bool:
    return (slot.number if slot.kind != Kind.GATHER else tables.plan.columns[slot.first].source) < 0


def _reader(tables: FloatTables, slots: Sequence[Slot]) -> FloatLookup:
    """Reads the slots side by side, the numeric ones as their number, last."""
    vectors, numbers = _parted(slots)
    starts = np.cumsum([0, *(s.dim for s in vectors)]).tolist()
    at = dict(zip(vectors, starts, strict=False))
    to = [at.get(s, -1) for s in tables.plan.x_slots if s.columns]
    return FloatLookup(tables, to, [(s.number, starts[-1] + i) for i, s in enumerate(numbers)], starts[-1] + len(numbers))


def _weight(tables: FloatTables, slots: Sequence[Slot], weight: torch.Tensor) -> torch.Tensor:
    """A layer's weight for what `_reader` reads."""
    assert tables.table is not None
    vectors, numbers = _parted(slots)
    parts = [weight[:, s.out : s.out + s.dim] for s in vectors]
    first_row = dict(zip((s for s in tables.plan.x_slots if s.columns), tables.rows.first_rows, strict=False))
    for s in numbers:
        own = weight[:, s.out : s.out + s.dim].double()
        vector = tables.table[first_row[s]].double() if s.kind == Kind.SCALE else torch.ones(1, dtype=torch.float64)
        parts.append((own @ vector).float()[:, None])
    return torch.cat(parts, 1)


def _parted(slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
    return [s for s in slots if s.kind == Kind.GATHER], [s for s in slots if s.kind != Kind.GATHER]
