"""Calls whose operands no input reaches: worked out while compiling, for a batch of one row where a batch is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dpiframe_core.compiler.operations.arguments import flat
from dpiframe_core.compiler.operations.emit import Const
from dpiframe_core.compiler.operations.positions import RowStarts
from dpiframe_core.compiler.operations.strided import Refused, Size
from dpiframe_core.compiler.views import SAME

# Their result has the sizes they are told and one value throughout, so a batch of them may be one row.
FILLED = {
    f"aten.{n}" for n in (
        "zeros.default", "ones.default", "full.default", "new_zeros.default", "new_ones.default", "new_full.default",
        "zeros_like.default", "ones_like.default", "full_like.default", "scalar_tensor.default",
    )
}  # fmt: skip
_SIZED = {"aten.expand.default", "aten.repeat.default", "aten.view.default", "aten.reshape.default"}


def filled(target: str, a: Mapping[str, Any], sizes: Sequence[Size], dtype: torch.dtype) -> Const:
    value = a.get("fill_value", a.get("s"))
    value = value if value is not None else float("ones" in target)
    return Const(torch.full([s.count for s in sizes], value, dtype=dtype), None, batch_of(sizes))


def worked_out(node: fx.Node, target: str, a: Mapping[str, Any], sizes: Sequence[Size]) -> Any:
    sized = any(isinstance(v, Size | RowStarts) for v in flat(a))
    if target.startswith("aten.arange.") and isinstance(a["end"], Size) and a.get("start", 0) == 0:
        return RowStarts(a.get("step", 1), tuple(sizes))
    if sized and target not in _SIZED:
        raise Refused(f"got {target} with the rows of the batch, expected each row to be computed from itself")
    made, batch = _called(node, a, 1), batch_of(sizes)
    if isinstance(made, list | tuple):
        return [Const(m) for m in made]
    if not sized and any(isinstance(v, Const) and v.batch_dim is not None for v in flat(a)):
        two, wanted = _called(node, a, 2), made if batch is None else made.repeat_interleave(2, batch)
        if two.shape != wanted.shape or not torch.allclose(two.float(), wanted.float(), equal_nan=True):
            raise Refused(f"got {target} over the rows of a constant, expected each row to be computed from itself")
    return Const(made, next((v.name for v in a.values() if isinstance(v, Const)), None) if target in SAME else None, batch)


def batch_of(sizes: Sequence[Size]) -> int | None:
    """The dimension that has the batch."""
    return next((i for i, s in enumerate(sizes) if s.batch), None)


def _called(node: fx.Node, a: Mapping[str, Any], rows: int) -> Any:
    """The call's result where a batch has so many rows."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    positional = [_real(a[s.name], rows) for s in arguments if not s.kwarg_only]
    named = {s.name: _real(a[s.name], rows) for s in arguments if s.kwarg_only}
    with torch.no_grad():
        return node.target(*positional, **named)  # type: ignore[operator]


def _real(value: Any, rows: int) -> Any:
    if isinstance(value, list | tuple):
        return [_real(v, rows) for v in value]
    if isinstance(value, Size):
        return value.count
    if not isinstance(value, Const):
        return value
    return value.tensor if value.batch_dim is None else value.tensor.repeat_interleave(rows, value.batch_dim)
