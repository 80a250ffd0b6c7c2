"""The generic operator of a graph: an ATen function of a closed table, on windows of values' rows, with plain-data arguments.

`aten_rules` says what it means for shapes, in plain Python; `aten_functions` has what it computes. Rows of a batch cannot meet:
a value's row is all that a window can show, the batch is dimension 0 of every operand, and no rule lets an argument name that
dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from pydantic import ConfigDict, with_config

from dpiframe_core.graph.aten_rules import RULES, Plain, Shape, Sizes

MAX_RANK = 8
_STRICT = with_config(ConfigDict(extra="forbid"))  # for `bundle.graph_file`, which reads these from JSON


@_STRICT
@dataclass(frozen=True, slots=True)
class Window:
    """A strided view of each row of a node's input `value` (its position): float[B, *sizes], strides counted in elements."""

    value: int
    sizes: Shape
    strides: Shape
    offset: int = 0


@_STRICT
@dataclass(frozen=True, slots=True)
class Constant:
    """A node's parameter `param` (its position) as it is: the same for all rows, broadcast over the batch."""

    param: int


@_STRICT
@dataclass(frozen=True, slots=True)
class AtenCall:
    """What an `aten` node computes: `op` of the operands, then the plain arguments. `sizes`: its result is float[B, *sizes].

    Dimensions among the arguments count the batch as 0. "inf" and "-inf" stand for numbers that JSON does not have.
    """

    op: str
    operands: tuple[Window | Constant, ...]
    args: tuple[Plain, ...] = ()
    sizes: Shape = ()


def check_call(call: AtenCall, widths: Sequence[int], params: Sequence[Shape]) -> None:
    """Holds a call against its node's inputs (their widths) and parameters (their shapes).

    Raises:
        ValueError: an operator that is not in the table, a window that leaves its row, operands that do not fit, other sizes.
    """
    rule = RULES.get(call.op)
    if rule is None:
        raise ValueError(f"got op {call.op!r}, expected one of the table in dpiframe_core/graph/aten_rules.py")
    operands: list[Sizes] = []
    for operand in call.operands:
        if isinstance(operand, Constant):
            if not 0 <= operand.param < len(params):
                raise ValueError(f"got parameter {operand.param}, expected one of {len(params)}")
            operands.append((False, params[operand.param]))
        else:
            _check_window(operand, widths)
            operands.append((True, operand.sizes))
    if not any(batched for batched, _ in operands):
        raise ValueError(f"{call.op}: got constants alone, expected a value among the operands")
    sizes = rule(operands, call.args)
    if sizes != call.sizes:
        raise ValueError(f"{call.op}: got sizes {call.sizes}, expected {sizes}")


def _check_window(w: Window, widths: Sequence[int]) -> None:
    if not 0 <= w.value < len(widths):
        raise ValueError(f"got input {w.value}, expected one of {len(widths)}")
    if (
        len(w.sizes) != len(w.strides)
        or len(w.sizes) > MAX_RANK
        or any(s < 1 for s in w.sizes)
        or any(s < 0 for s in w.strides)
    ):
        raise ValueError(
            f"got a window of sizes {w.sizes} and strides {w.strides}, expected up to {MAX_RANK} of each, from 1 and 0"
        )
    last = w.offset + sum((size - 1) * stride for size, stride in zip(w.sizes, w.strides, strict=True))
    if w.offset < 0 or last >= widths[w.value]:
        raise ValueError(f"got a window of columns {w.offset} to {last}, expected them within {widths[w.value]}")


def contiguous(sizes: Shape) -> Shape:
    """Strides of a row-major tensor."""
    return tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
