"""Order statistics along a dimension of a row, which are elements of it in order."""

from math import floor

from dpiframe_core.compiler.operations.arguments import Arguments, number
from dpiframe_core.compiler.operations.emit import Emitter
from dpiframe_core.compiler.operations.positions import ranked
from dpiframe_core.compiler.operations.reductions import reduced
from dpiframe_core.compiler.operations.strided import Refused, Strided, selected, unsqueezed


def kth(e: Emitter, a: Arguments, k: int) -> list[Strided]:
    """The k-th smallest element, from 0 on, and where it stands. NaN is the largest."""
    x, dim = a["self"], a["dim"] % a["self"].rank
    found = [selected(each, dim, k) for each in ranked(e, x, dim, "sort", [False])]
    return [unsqueezed(each, dim) for each in found] if a["keepdim"] else found


def median(e: Emitter, a: Arguments) -> list[Strided]:
    """The lower of two. NaN if there is one."""
    values, positions = kth(e, a, (a["self"].size(a["dim"]) - 1) // 2)
    return [_or_nan(e, values, a), positions]


def quantile(e: Emitter, a: Arguments) -> Strided:
    """Between the two elements next to it, in proportion."""
    if a["interpolation"] != "linear":
        raise Refused(f"got a quantile, {a['interpolation']}, expected a linear one")
    rank = number(a["q"]) * (a["self"].size(a["dim"]) - 1)
    below, (low, _) = floor(rank), kth(e, a, floor(rank))
    if rank > below:
        high, _ = kth(e, a, below + 1)
        apart = e.elementwise("aten.mul.Scalar", [e.elementwise("aten.sub", [high, low])], [rank - below])
        low = e.elementwise("aten.add", [low, apart])
    return _or_nan(e, low, a)


def _or_nan(e: Emitter, found: Strided, a: Arguments) -> Strided:
    most = reduced(e, "aten.amax", a["self"], [a["dim"]], keep=a["keepdim"])  # NaN if there is one
    return e.elementwise("aten.where", [e.elementwise("aten.eq", [most, most]), found, most])
