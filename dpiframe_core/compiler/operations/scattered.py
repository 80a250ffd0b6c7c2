"""Elements put, or added, at positions of a row that values say, as a gate of the best experts has it. Each position is
compared with all that there are. And those at constant positions.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dpiframe_core.compiler.operations.arguments import Arguments, constant, endless, is_number, number
from dpiframe_core.compiler.operations.arithmetic import binary
from dpiframe_core.compiler.operations.emit import Const, Emitter, Tensor
from dpiframe_core.compiler.operations.joins import cat, padded, selected_at
from dpiframe_core.compiler.operations.positions import RowStarts
from dpiframe_core.compiler.operations.reductions import reduced
from dpiframe_core.compiler.operations.strided import BATCH, Refused, Strided, expanded, permuted, unsqueezed
from dpiframe_core.compiler.operations.tensors import part, sizes_of, widened
from dpiframe_core.graph.aten import Window

_MOST_POSITIONS = 1 << 10  # each is compared with each that is given
_POSITIONS = {"aten.topk.positions", "aten.sort.positions", "aten.argmax", "aten.argmin"}


def scattered(e: Emitter, x: Tensor, dim: int, index: Any, source: Any, *, add: bool) -> Strided:
    """torch.scatter or scatter_add along a dimension of a row. Of several elements for one position, of which torch puts any,
    the largest is put.
    """
    if not isinstance(index, Strided):
        raise Refused("got scatter at constant positions, expected index_copy, index_fill or torch.cat for these")
    rank, dim = index.rank, dim % index.rank
    if BATCH in index.dims[dim]:
        raise Refused("got a scatter among the rows of the batch, expected each row to be computed from itself")
    sizes, own = sizes_of(x), sizes_of(index)
    if len(sizes) != rank:
        raise Refused(f"got scatter at {own} into {sizes} a row, expected as many dimensions")
    count = sizes[dim]
    others = [d for d in range(rank) if d != dim]
    if count > _MOST_POSITIONS or any(sizes[d] != own[d] for d in others):
        raise Refused(f"got scatter of {own} into {sizes} a row, expected equal sizes but for {dim}, at most {_MOST_POSITIONS}")
    hits = e.elementwise("aten.eq", [unsqueezed(index, rank), Const(torch.arange(float(count)))])

    def put_back(found: Strided) -> Strided:
        """Without the dimension of the elements given; that of the positions lies in its place."""
        return permuted(found, [*range(dim), rank - 1, *range(dim, rank - 1)])

    if is_number(source) and not add:
        each: Tensor = Const(torch.tensor(float(number(source))))
    else:
        given = _given(e, source, own)
        if add:
            nothing = Const(torch.tensor(0.0))
            parts = e.elementwise("aten.where", [hits, given, nothing])
            total = put_back(reduced(e, "aten.sum", parts, [dim], keep=False))
            return _checked(e, e.elementwise("aten.add", [total, x]), index, hits, dim, count)
        parts = e.elementwise("aten.masked_fill.Scalar", [given, e.inverted(hits)], ["-inf"])
        each = put_back(reduced(e, "aten.amax", parts, [dim], keep=False))
    hit = e.elementwise("aten.ne.Scalar", [put_back(reduced(e, "aten.amax", hits, [dim], keep=False))], [0])
    return _checked(e, e.elementwise("aten.where", [hit, each, x]), index, hits, dim, count)


def put_in_rows(e: Emitter, x: Tensor, indices: Sequence[Any], values: Any, *, add: bool) -> Strided:
    """x[arange(n), i] = values, or with `arange(n)[:, None]` several of each row; positions below 0 count from the end."""
    rows, *others = indices
    in_front = isinstance(x, Const) or x.dims[0] == (BATCH,)
    if not (isinstance(rows, RowStarts) and rows.step == len(others) == 1 and len(sizes_of(x)) == 2 and in_front):
        raise Refused("got an assignment by an index of rows, expected x[torch.arange(n), i] = .. of [n, columns]")
    index: Any = others[0]
    if not isinstance(index, Strided) or index.rank != len(rows.sizes) or not rows.sizes[0].batch:
        raise Refused("got an assignment by an index of rows of another rank, expected arange(n)[:, None] for i[n, k]")
    if index.rank == 1:
        index = unsqueezed(index, 1)
        values = widened(values, 1) if len(sizes_of(values)) == 1 else values
    count = sizes_of(x)[1]
    if not _known(e, index, count):
        below = e.elementwise("aten.lt.Scalar", [index], [0])
        index = e.elementwise("aten.where", [below, e.elementwise("aten.add.Scalar", [index], [count]), index])
    return scattered(e, x, 1, index, values if is_number(values) else _repeated(values, index), add=add)


def _repeated(values: Tensor, index: Strided) -> Tensor:
    """Values for each of several positions, of which each row, or all rows, have one or as many."""
    if isinstance(values, Strided):
        return expanded(values, index.sizes) if values.rank == 2 and values.size(1) == 1 else values
    return Const(values.tensor.expand(1, index.size(1)), None, 0)


def filled_at(e: Emitter, x: Strided, dim: int, index: Any, value: Any) -> Strided:
    """torch.index_fill: a number at constant positions of one dimension."""
    dim %= x.rank
    _within_rows(x, dim)
    mask = torch.zeros(x.size(dim), dtype=torch.bool)
    mask[constant(index).tensor.long()] = True
    here = Const(mask.reshape(-1, *[1] * (x.rank - 1 - dim)))
    return e.elementwise("aten.where", [here, Const(torch.tensor(float(number(value)))), x])


def written_over(e: Emitter, x: Tensor, source: Tensor, a: Arguments) -> Tensor:
    """torch.slice_scatter: others in the place of a slice's elements, as x[:, 1:] = .. has it."""
    dim = a["dim"] % len(sizes_of(x))
    count = sizes_of(x)[dim]
    in_rows = BATCH in x.dims[dim] if isinstance(x, Strided) else dim == x.batch_dim
    if in_rows:
        if a["start"] not in (None, 0) or a["step"] != 1 or not endless(a["end"]):
            raise Refused("got a slice of the batch that is written over, expected each row to be computed from itself")
        return source
    at = range(count)[slice(a["start"], a["end"], a["step"])]
    if a["step"] != 1 or not at:
        return copied_at(e, x, dim, Const(torch.tensor(list(at))), source) if at else x
    ahead = [part(e, x, dim, 0, at.start)] if at.start else []
    behind = [part(e, x, dim, at.stop, count - at.stop)] if at.stop < count else []
    return cat(e, [*ahead, source, *behind], dim)


def copied_at(e: Emitter, x: Tensor, dim: int, index: Any, source: Tensor) -> Strided:
    """torch.index_copy: other elements at constant positions of one dimension."""
    if isinstance(x, Const):
        raise Refused("got index_copy into a constant, expected torch.cat, or an index_copy into a value")
    dim %= x.rank
    _within_rows(x, dim)
    count, positions = x.size(dim), constant(index).tensor.flatten()
    chosen = torch.arange(count)
    for i, position in enumerate(positions.tolist()):
        chosen[position] = count + i
    return selected_at(e, cat(e, [x, source], dim), dim, Const(chosen))


def added_at(e: Emitter, x: Tensor, dim: int, index: Any, source: Strided, alpha: float) -> Tensor:
    """torch.index_add: others added at constant positions of one dimension, in the order that they have."""
    sizes, dim = sizes_of(x), dim % source.rank
    _within_rows(source, dim)
    positions = [int(p) for p in constant(index).tensor.flatten()]
    ended = padded(e, source, [*[0, 0] * (source.rank - 1 - dim), 0, 1], 0)  # with nothing to add behind it
    while positions.count(-1) < len(positions):
        chosen = [len(positions)] * sizes[dim]
        for i, position in enumerate(positions):
            if position >= 0 and chosen[position] == len(positions):
                chosen[position], positions[i] = i, -1
        x = binary(e, "add", {"self": x, "other": selected_at(e, ended, dim, Const(torch.tensor(chosen))), "alpha": alpha})
    return x


def _within_rows(x: Strided, dim: int) -> None:
    if BATCH in x.dims[dim]:
        raise Refused("got elements put among the rows of the batch, expected each row to be computed from itself")


def _given(e: Emitter, source: Any, own: list[int]) -> Tensor:
    """As many of the source's elements as there are positions, with a dimension behind them."""
    if is_number(source):
        return Const(torch.tensor(float(number(source))))
    sizes = sizes_of(source)
    if len(sizes) != len(own) or any(n < wanted for n, wanted in zip(sizes, own, strict=True)):
        raise Refused(f"got scatter of {sizes} at {own} positions a row, expected an element for each")
    for d, n in enumerate(own):
        source = part(e, source, d, 0, n)
    return widened(source, len(own))


def _checked(e: Emitter, made: Strided, index: Strided, hits: Strided, dim: int, count: int) -> Strided:
    """NaN, so that the score is refused, where a position is none, for which torch raises; those of topk and the like are."""
    if _known(e, index, count):
        return made
    valid = reduced(e, "aten.amin", reduced(e, "aten.amax", hits, [-1], keep=False), [dim], keep=True)
    no_number = e.elementwise(
        "aten.log", [e.elementwise("aten.sub.Scalar", [e.elementwise("aten.mul.Scalar", [valid], [2])], [1])]
    )
    return e.elementwise("aten.add", [made, no_number])


def _known(e: Emitter, index: Strided, count: int) -> bool:
    """Whether topk or the like gave the positions, among so many at most."""
    call = next((n.attrs.aten for n in e.nodes if n.outputs[0] == index.base), None)
    if call is None or call.op not in _POSITIONS or not isinstance(call.operands[0], Window):
        return False
    dim = call.args[0][0] if isinstance(call.args[0], tuple) else call.args[0]
    return isinstance(dim, int) and call.operands[0].sizes[dim - 1] <= count
