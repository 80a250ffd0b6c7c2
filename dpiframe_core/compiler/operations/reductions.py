"""Operations along dimensions of a row, and over them."""

from collections.abc import Sequence

from dpiframe_core.compiler.operations.emit import Emitter
from dpiframe_core.compiler.operations.strided import Frame, Strided, frame_of, squeezed


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
