"""Operations along dimensions of a row, and over them: reductions, softmax, norms."""

from collections.abc import Sequence

from dpiframe_core.compiler.operations.arguments import Arguments, constant
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.strided import BATCH, Frame, Refused, Size, Strided, frame_of, squeezed


def along(e: Emitter, op: str, x: Strided, dim: int) -> Strided:
    """softmax and the like: along one dimension of a row."""
    frame = frame_of([x], x.rank)
    return e.call(op, [x], [frame.position(dim % x.rank)], frame)


def reduced(e: Emitter, op: str, x: Strided, dims: Sequence[int], *more: float, keep: bool) -> Strided:
    """A reduction over some dimensions of a row; the sum over all of a whole value is an operator of its own."""
    dims = [d % x.rank for d in dims]
    frame = frame_of([x], x.rank)
    rows = tuple(sorted(frame.position(d) for d in dims))
    kept = [x.dims[d] for d in range(x.rank) if d not in dims and d != frame.at]
    if op == "aten.sum" and e.whole(x) and frame == Frame(x.rank, 0) and not any(kept):
        made = frame.back(e.node("sum", [x.base], 1), (1,) * (x.rank - 1))
    else:
        made = e.call(op, [x], [rows, True, *more], frame)
    return made if keep else squeezed(made, dims)


def layer_norm(e: Emitter, a: Arguments) -> Strided:
    x, count = a["input"], len(a["normalized_shape"])
    frame = frame_of([x], x.rank)
    if frame.at >= x.rank - count:
        raise Refused("got a normalisation over the batch, expected each row to be computed from itself")
    affine = [constant(a[k]) for k in ("weight", "bias") if a[k] is not None]
    return e.call("aten.layer_norm", [x, *affine], [count, float(a["eps"])], frame)


def group_norm(e: Emitter, a: Arguments, groups: int) -> Strided:
    """x[n, channels, ..]: a layer norm of each group of channels, then a weight and a bias for each channel."""
    x = a["input"]
    if x.rank < 2 or BATCH not in x.dims[0]:
        raise Refused("got a normalisation over the batch, expected each row to be computed from itself")
    grouped = e.view(x, [x.sizes[0], Size(groups), Size(x.count // x.size(0) // groups)])
    made = e.call("aten.layer_norm", [grouped], [1, float(a["eps"])], frame_of([grouped], 3))
    made = e.view(made, x.sizes)
    for op, name in (("aten.mul", "weight"), ("aten.add", "bias")):
        if a[name] is not None:
            each = Const(constant(a[name]).tensor.reshape(-1, *[1] * (x.rank - 2)))
            made = e.elementwise(op, [made, each])
    return made
