"""ATen calls that only look at a tensor differently, for values, raw inputs and lists of results: no node comes of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dpiframe_core.compiler.lookups import Raw
from dpiframe_core.compiler.operations.arguments import Arguments, endless
from dpiframe_core.compiler.operations.emit import Emitter
from dpiframe_core.compiler.operations.strided import (
    Atom,
    Dim,
    Refused,
    Size,
    Strided,
    expanded,
    permuted,
    selected,
    squeezed,
    unsqueezed,
)

SAME = {
    "aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default",
    "aten.lift_fresh_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device",
    "aten._to_copy.default", "aten.type_as.default",
}  # fmt: skip
INTEGERS = (torch.int32, torch.int64)
RESHAPES = {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
             "aten._reshape_copy.default", "aten.unflatten.int", "aten.view_as.default"}  # fmt: skip


def size_of(count: Any) -> Size:
    """A traced number as rows of the batch times something, or as a plain one.

    Raises:
        Refused: it is neither.
    """
    if isinstance(count, int):
        return Size(count)
    expression = count.node.expr
    (symbol,) = expression.free_symbols or (None,)
    times = expression.coeff(symbol)
    if not times.is_Integer or times <= 0 or expression != times * symbol:
        raise Refused(f"got the number {expression}, expected a multiple of the rows of the batch")
    return Size(int(times), True)


def view(e: Emitter, target: str, x: Strided, a: Arguments, sizes: Sequence[Size]) -> Strided | list[Strided] | None:
    """The tensor or tensors that a view of a value gives, of the sizes traced; None: no view."""
    match target:
        case _ if target in SAME:
            return x
        case _ if target in RESHAPES:
            return e.view(x, sizes)
        case "aten.unsqueeze.default":
            return unsqueezed(x, a["dim"] % (x.rank + 1))
        case "aten.squeeze.dim" | "aten.squeeze.dims" | "aten.squeeze.default":
            return squeezed(x, [d % x.rank for d in _dims(a.get("dim"), x.rank)])
        case "aten.transpose.int" | "aten.t.default" | "aten.permute.default":
            return permuted(x, _order(a, x.rank))
        case "aten.expand.default" | "aten.expand_as.default":
            return expanded(x, sizes)
        case "aten.repeat.default":
            return _repeated(x, a["repeats"])
        case "aten.repeat_interleave.self_int" if a["dim"] is not None:
            at = a["dim"] % x.rank + 1
            return e.view(_repeated(unsqueezed(x, at), [a["repeats"] if i == at else 1 for i in range(x.rank + 1)]), sizes)
        case "aten.select.int":
            dim = a["dim"] % x.rank
            if dim == 0 and x in e.stacked:
                return e.stacked[x][a["index"]]
            return selected(x, dim, a["index"] % x.size(dim))
        case "aten.slice.Tensor":
            dim = (a["dim"] or 0) % x.rank
            return _cut(e, x, dim, a["start"], a["end"], a["step"])
        case "aten.split.Tensor" | "aten.split_with_sizes.default" | "aten.chunk.default" | "aten.unbind.int":
            return _split(e, target, x, a)
        case "aten.unfold.default":
            return _windows(e, x, a["dimension"] % x.rank, a["size"], a["step"])
        case "aten.diagonal.default":
            return _diagonal(e, x, a["dim1"] % x.rank, a["dim2"] % x.rank, a["offset"])
    return None


def raw_view(target: str, x: Raw, a: Arguments, sizes: Sequence[Size]) -> Raw | list[Raw] | None:
    """The same for raw inputs, whose first dimension is the batch."""
    rank = x.at.ndim + 1
    if x.flat or target in RESHAPES:
        if target in SAME:
            return x
        if target not in RESHAPES or not sizes[0].batch or any(s.batch for s in sizes[1:]):
            return None
        flat = len(sizes) == 1 and sizes[0].count > 1
        if sizes[0].count > 1 and not flat:
            return None
        return replace(x.of(lambda v: v.reshape(-1 if flat else tuple(s.count for s in sizes[1:]))), flat=flat)
    match target:
        case _ if target in SAME:
            return x
        case "aten.unsqueeze.default":
            return x.of(lambda v: np.expand_dims(v, _row(a["dim"] % (rank + 1))))
        case "aten.squeeze.dim" | "aten.squeeze.dims" | "aten.squeeze.default":
            dims = [d % rank for d in _dims(a.get("dim"), rank)]
            return x.of(lambda v: v.squeeze(tuple(d - 1 for d in dims if d and v.shape[d - 1] == 1)))
        case "aten.select.int":
            return x.of(lambda v: np.asarray(v.take(a["index"], _row(a["dim"] % rank))))
        case "aten.slice.Tensor":
            dim = (a["dim"] or 0) % rank
            if dim == 0:
                if a["start"] not in (None, 0) or not endless(a["end"]) or a["step"] != 1:
                    raise Refused("got a slice of the batch, expected each row to be computed from itself")
                return x
            index = (slice(None),) * (dim - 1) + (slice(a["start"], a["end"], a["step"]),)
            return x.of(lambda v: v[index])
        case "aten.split.Tensor" | "aten.split_with_sizes.default" | "aten.chunk.default" | "aten.unbind.int":
            dim = _row(a["dim"] % rank)
            starts = _starts(target, a, x.at.shape[dim])
            parts = [Raw(x.at.take(range(s, s + n), dim), x.shift.take(range(s, s + n), dim)) for s, n in starts]
            return [p.of(lambda v: v.squeeze(dim)) for p in parts] if "unbind" in target else parts
        case "aten.expand.default":
            return x.of(lambda v: np.broadcast_to(v, tuple(s.count for s in sizes[1:])))
        case "aten.transpose.int" | "aten.permute.default":
            order = _order(a, rank)
            return x.of(lambda v: v.transpose([d - 1 for d in order[1:]])) if order[0] == 0 else None
    return None


def _row(dim: int) -> int:
    if dim == 0:
        raise Refused("got a choice among the rows of the batch, expected each row to be computed from itself")
    return dim - 1


def _dims(value: Any, rank: int) -> list[int]:
    return list(range(rank)) if value is None else [value] if isinstance(value, int) else list(value)


def _order(a: Arguments, rank: int) -> list[int]:
    if "dims" in a:
        return [d % rank for d in a["dims"]]
    order = list(range(rank))
    if rank > 1:
        i, j = a.get("dim0", 0) % rank, a.get("dim1", 1) % rank
        order[i], order[j] = order[j], order[i]
    return order


def _cut(e: Emitter, x: Strided, dim: int, start: Any, end: Any, step: int) -> Strided:
    if start in (None, 0) and step == 1 and endless(end):
        return x
    if any(atom.batch for atom in x.dims[dim]):
        raise Refused("got a slice of the batch, expected each row to be computed from itself")
    span = range(x.size(dim))[start:end:step]
    return e.sliced(x, dim, span.start, len(span), step)


def _starts(target: str, a: Arguments, count: int) -> list[tuple[int, int]]:
    if "unbind" in target:
        return [(i, 1) for i in range(count)]
    if "with_sizes" in target:
        sizes = list(a["split_sizes"])
        return [(sum(sizes[:i]), n) for i, n in enumerate(sizes)]
    size = -(-count // a["chunks"]) if "chunk" in target else a["split_size"]
    return [(i, min(size, count - i)) for i in range(0, count, size)]


def _split(e: Emitter, target: str, x: Strided, a: Arguments) -> list[Strided]:
    dim = a["dim"] % x.rank
    if any(atom.batch for atom in x.dims[dim]):
        raise Refused("got a split of the batch, expected each row to be computed from itself")
    parts = [_cut(e, x, dim, s, s + n, 1) for s, n in _starts(target, a, x.size(dim))]
    return [selected(p, dim, 0) for p in parts] if "unbind" in target else parts


def _windows(e: Emitter, x: Strided, dim: int, size: int, step: int) -> Strided:
    """Windows of a dimension, which counts them, their elements last."""
    x = e.sliced(x, dim, 0, x.size(dim))  # an even run, if it was none
    count, stride = (x.size(dim) - size) // step + 1, max((atom.stride for atom in x.dims[dim]), default=0)
    at, inside = (((Atom(n, s),) if n > 1 else ()) for n, s in ((count, stride * step), (size, stride)))
    return replace(x, dims=(*x.dims[:dim], at, *x.dims[dim + 1 :], inside))


def _diagonal(e: Emitter, x: Strided, first: int, second: int, offset: int) -> Strided:
    """Elements whose positions along two dimensions are `offset` apart, last."""
    x = e.sliced(x, first, max(0, -offset), x.size(first) - max(0, -offset))
    x = e.sliced(x, second, max(0, offset), x.size(second) - max(0, offset))
    count, stride = min(x.size(first), x.size(second)), sum(atom.stride for d in (first, second) for atom in x.dims[d])
    kept = [dim for d, dim in enumerate(x.dims) if d not in (first, second)]
    return replace(x, dims=(*kept, (Atom(count, stride),) if count > 1 else ()))


def _repeated(x: Strided, repeats: Sequence[Any]) -> Strided:
    if any(isinstance(r, Size) and r.batch for r in repeats):
        raise Refused("got rows repeated by the rows of the batch, expected each row to be computed from itself")
    dims: list[Dim] = [()] * (len(repeats) - x.rank) + list(x.dims)
    for i, times in enumerate(repeats):
        if times > 1 and any(atom.batch for atom in dims[i]):
            raise Refused("got rows of the batch repeated, expected each row to be computed from itself")
        dims[i] = ((Atom(times, 0),) if times > 1 else ()) + dims[i]
    return replace(x, dims=tuple(dims))
