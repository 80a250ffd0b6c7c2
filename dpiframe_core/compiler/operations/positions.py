"""Elements at positions that depend on values: of a row's own history, or of a constant table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from dpiframe_core.compiler.operations.arithmetic import as_compared
from dpiframe_core.compiler.operations.emit import Const, Emitter, Tensor
from dpiframe_core.compiler.operations.joins import rows_of, selected_at
from dpiframe_core.compiler.operations.reductions import reduced
from dpiframe_core.compiler.operations.strided import BATCH, Refused, Size, Strided, frame_of, selected, unsqueezed
from dpiframe_core.graph.aten_rules import Plain

_MOST_ROWS = 1 << 16  # of a table that is a parameter: larger ones belong into the store, where an id reads them
_MOST_CLASSES = 1 << 10  # their table has as many rows and columns


@dataclass(frozen=True, slots=True)
class RowStarts:
    """arange(0, B * columns, step): where the bags of raw ids in a row begin; by steps of 1 the numbers of the rows.

    sizes: that it has by now.
    """

    step: int
    sizes: tuple[Size, ...]


def gathered(e: Emitter, x: Tensor, dim: int, index: Any) -> Strided:
    """torch.gather along a dimension of a row. An index that is repeated is read once."""
    if isinstance(index, Const):
        return _gathered_at(e, x, dim, index)
    dim %= index.rank
    frame = frame_of([t for t in (x, index) if isinstance(t, Strided)], index.rank)
    position = frame.position(dim)
    for d in range(index.rank):
        if d == dim or BATCH in index.dims[d]:
            continue
        if isinstance(x, Strided) and x.size(d) > index.size(d):
            x = e.sliced(x, d, 0, index.size(d))
        if not any(atom.stride for atom in index.dims[d]):
            index = replace(index, dims=(*index.dims[:d], (), *index.dims[d + 1 :]))
    return e.call("aten.take_along_dim", [x if isinstance(x, Strided) else rows_of(x, frame), index], [position, False], frame)


def _gathered_at(e: Emitter, x: Tensor, dim: int, index: Const) -> Strided:
    """By the same positions in each row: one choice among all that a row has."""
    dim %= index.tensor.ndim
    if not isinstance(x, Strided) or index.batch_dim != 0 or dim == 0 or x.dims[0] != (BATCH,):
        raise Refused("got gather by constant positions, expected the same [1, ..] for all rows, not along them")
    sizes, at = [x.size(d) for d in range(1, x.rank)], index.tensor[0].long()
    places = torch.meshgrid(*(torch.arange(n) for n in at.shape), indexing="ij")
    flat = torch.zeros_like(at)
    for d, size in enumerate(sizes):
        flat = flat * size + (at if d == dim - 1 else places[d])
    chosen = selected_at(e, e.view(x, [Size(1, True), Size(prod(sizes))]), 1, Const(flat.flatten()))
    return e.view(chosen, [Size(1, True), *map(Size, at.shape)])


def of_own_row(e: Emitter, x: Tensor, indices: Sequence[Any]) -> Strided:
    """x[arange(n), i]: of each row the elements at positions of its own; those below 0 count from the end."""
    rows, *others = indices
    if isinstance(x, Const) and x.batch_dim == 0 and rows.step == len(others) == 1:
        return _at(e, Const(x.tensor[0]), others[0])
    if isinstance(x, Const) or rows.step != 1 or len(others) > 1 or x.dims[0] != (BATCH,):
        raise Refused("got an index of rows and several others, expected x[torch.arange(n), i] with one position a row")
    if not others:
        return x
    index = others[0]
    if isinstance(index, Const) and index.tensor.ndim == 0:
        return selected(x, 1, int(index.tensor) % x.size(1))
    return _at(e, x, index)


def looked_up(e: Emitter, table: Const, index: Strided, *, from_the_end: bool = False) -> Strided:
    """Rows of a constant at positions that are computed."""
    if len(table.tensor) > _MOST_ROWS:
        rule = f"at most {_MOST_ROWS} (make the position an id: a feature of its own)"
        raise Refused(f"got a choice among {len(table.tensor)} rows by values of the batch, expected {rule}")
    return _at(e, table, index, from_the_end)


def ranked(e: Emitter, x: Strided, dim: int, how: str, args: Sequence[Plain]) -> list[Strided]:
    """topk or sort along a dimension of a row: the values, and the positions where they stood."""
    frame = frame_of([x], x.rank)
    arguments = [frame.position(dim % x.rank), *args]
    return [e.call(f"aten.{how}{what}", [x], arguments, frame) for what in ("", ".positions")]


def bucketed(e: Emitter, x: Strided, boundaries: Any, right: bool) -> Strided:
    """The bucket of each element: all bounds but those that it is not above. So NaN is above all, as torch has it."""
    if not isinstance(boundaries, Const) or boundaries.tensor.ndim != 1:
        raise Refused("got boundaries that depend on the batch, or several rows of them, expected one row of constants")
    name = "lt" if right else "le"
    under = e.elementwise(f"aten.{name}", [unsqueezed(x, x.rank), as_compared(name, boundaries)])
    return e.elementwise("aten.rsub.Scalar", [reduced(e, "aten.sum", under, [-1], keep=False)], [len(boundaries.tensor)])


def one_hot_rows(classes: int) -> Const:
    """The table whose rows F.one_hot gives: of ids it lies in the store, as any."""
    if not 1 <= classes <= _MOST_CLASSES:
        rule = f"1 to {_MOST_CLASSES} (an nn.Embedding for one_hot and a product)"
        raise Refused(f"got one_hot of {classes} classes, expected {rule}")
    return Const(torch.eye(classes), f"one_hot.{classes}")


def _at(e: Emitter, x: Tensor, index: Any, from_the_end: bool = True) -> Strided:
    if not isinstance(index, Strided) or index.boolean or index.dims[0] != (BATCH,):
        raise Refused("got an index that is no position in each row, expected integers [n, ..] computed from the row")
    flat = e.view(index, [Size(1, True), Size(index.count)])
    below = list(x.sizes[2:]) if isinstance(x, Strided) else [Size(n) for n in x.tensor.shape[1:]]
    for _ in below:
        flat = unsqueezed(flat, flat.rank)
    frame = frame_of([x, flat], flat.rank) if isinstance(x, Strided) else frame_of([flat], flat.rank)
    found = e.call("aten.take_along_dim", [x, flat], [1, from_the_end], frame)
    return e.view(found, [*index.sizes, *below])
