"""Arithmetic on two operands, of which one may be a number or a constant on either side; and rounding to decimals."""

import torch

from dpiframe_core.compiler.operations.arguments import Arguments, is_number, number
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.strided import Refused, Strided
from dpiframe_core.graph.aten_rules import RULES

_TURNED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}


def binary(e: Emitter, name: str, a: Arguments) -> Strided:
    if a.get("rounding_mode") is not None:
        name = f"{a['rounding_mode']}_divide"
    left, right = a["self"], a["other"] if "other" in a else a["exponent"]
    alpha = a.get("alpha", 1)
    if alpha != 1 and isinstance(right, Strided):
        right = e.elementwise("aten.mul.Scalar", [right], [number(alpha)])
    elif alpha != 1:
        right = Const(right.tensor * alpha) if isinstance(right, Const) else right * alpha
    op = f"aten.{name}"
    if name == "div" and isinstance(left, Const):  # torch multiplies a number alone by the reciprocal
        return e.elementwise(op, [Const(left.tensor.float()), right])
    if name in _TURNED:
        left = as_compared(_TURNED[name], left) if isinstance(left, Const) else left
        right = as_compared(name, right) if isinstance(right, Const) else right
    if isinstance(right, Strided | Const) and isinstance(left, Strided | Const) and not (is_number(left) or is_number(right)):
        return e.elementwise(op, [left, right])
    if isinstance(left, Strided):
        if name in ("maximum", "minimum"):
            limits = [number(right), None] if name == "maximum" else [None, number(right)]
            return e.elementwise("aten.clamp", [left], limits)
        if f"{op}.Scalar" not in RULES:
            return e.elementwise(op, [left, Const(torch.tensor(float(number(right))))])
        return e.elementwise(f"{op}.Scalar", [left], [number(right)])
    flipped = _TURNED | {"add": "add", "mul": "mul", "sub": "rsub", "pow": "rpow", "maximum": "maximum", "minimum": "minimum"}
    if name not in flipped and name != "div":
        return e.elementwise(op, [Const(torch.tensor(number(left), dtype=torch.float32)), right])
    if name == "div":
        return e.elementwise("aten.mul.Scalar", [e.elementwise("aten.reciprocal", [right])], [number(left)])
    if name in ("maximum", "minimum"):
        return binary(e, name, {"self": right, "other": left})
    return e.elementwise(f"aten.{flipped[name]}.Scalar", [right], [number(left)])


def as_compared(name: str, c: Const) -> Const:
    """What each float32 x compares with as with a float64 constant: x > c where x > the largest float32 not above it."""
    near = c.tensor.float()
    if c.tensor.dtype != torch.float64 or c.tensor.ndim == 0 or torch.equal(near.double(), c.tensor):
        return c
    if name in ("eq", "ne"):
        raise Refused(f"got {name} of values and float64 constants, expected float32 ones")
    down = name in ("gt", "le")
    off = near.double() > c.tensor if down else near.double() < c.tensor
    return Const(
        torch.where(off, near.nextafter(torch.full_like(near, -torch.inf if down else torch.inf)), near), None, c.batch_dim
    )


def rounded(e: Emitter, x: Strided, scale: float) -> Strided:
    """To decimals: as torch, to whole multiples of a power of ten, be it above 1 or below."""
    up, down = ("mul", "div") if scale >= 1 else ("div", "mul")
    factor = scale if scale >= 1 else round(1 / scale)
    whole = e.elementwise("aten.round", [e.elementwise(f"aten.{up}.Scalar", [x], [factor])])
    return e.elementwise(f"aten.{down}.Scalar", [whole], [factor])
