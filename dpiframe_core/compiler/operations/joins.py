"""Tensors put side by side, and elements chosen at constant positions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dpiframe_core.compiler.operations.arguments import constant
from dpiframe_core.compiler.operations.emit import Const, Emitter, Tensor
from dpiframe_core.compiler.operations.strided import BATCH, Dim, Frame, Refused, Strided, frame_of, permuted
from dpiframe_core.compiler.operations.tensors import widened


def cat(e: Emitter, tensors: Sequence[Tensor], dim: int) -> Strided:
    """Side by side along a dimension: neighbours that lie so already are one operand, and without a copy if that is all."""
    strided = [t for t in tensors if isinstance(t, Strided)]
    rank = strided[0].rank
    frame = frame_of(strided, rank)
    dim %= rank
    position = frame.position(dim)
    rows = [frame.row(t) for t in strided]
    sizes = [list(row[0]) for row in rows if row]
    alike = frame == Frame(rank, 0) and len(sizes) == len(strided) and all(t.is_run for t in strided)
    if alike and all(set(s[: position - 1]) <= {1} for s in sizes):  # one behind the other, row-major
        joined = _joined(tensors, frame, position - 1)
        runs = [t for t in joined if isinstance(t, Strided)]
        if len(joined) == 1:
            return runs[0]
        if len(runs) == len(joined) and all(e.whole(t) for t in runs):
            total = tuple(sum(s[i] for s in sizes) if i == position - 1 else n for i, n in enumerate(sizes[0]))
            return frame.back(e.node("concat", [t.base for t in runs], sum(t.count for t in runs)), total)
        tensors = joined
    parts = [t if isinstance(t, Strided) else rows_of(t, frame) for t in tensors]
    return e.call("aten.cat", parts, [position], frame)


def _joined(tensors: Sequence[Tensor], frame: Frame, along: int) -> list[Tensor]:
    """Row-major runs, those of one value that lie one behind the other as one run."""
    out = list[Tensor]()
    for t in tensors:
        last = out[-1] if out else None
        if isinstance(t, Strided) and isinstance(last, Strided) and (last.base, last.offset + last.count) == (t.base, t.offset):
            before, own = frame.row(last), frame.row(t)
            if before and own:
                sizes = tuple(n + own[0][i] if i == along else n for i, n in enumerate(before[0]))
                out[-1] = replace(frame.back(t.base, sizes), offset=last.offset)
                continue
        out.append(t)
    return out


def stack(e: Emitter, tensors: Sequence[Tensor], dim: int) -> Strided:
    """Side by side along a new dimension."""
    dim %= max(t.rank for t in tensors if isinstance(t, Strided)) + 1
    return cat(e, [widened(t, dim) for t in tensors], dim)


def padded(e: Emitter, x: Strided, pad: Sequence[int], value: float) -> Strided:
    """Constants around the last dimensions, `pad` from the very last one on. The result lies in memory in the order
    in which x does: a history's steps stay runs of their embeddings.
    """
    pads = dict(enumerate(zip(pad[::2], pad[1::2], strict=True)))  # from the last dimension on
    if not any(map(any, pads.values())):
        return x
    order = list(range(x.rank))
    if BATCH in x.dims[0]:
        order[1:] = sorted(order[1:], key=lambda d: -max((atom.stride for atom in x.dims[d]), default=0))
    x = permuted(x, order)
    for dim in reversed(range(x.rank)):
        both, sizes = pads.get(x.rank - 1 - order[dim], (0, 0)), [1 if s.batch else s.count for s in x.sizes]
        if min(both) < 0:
            raise Refused(f"got padding by {list(pad)}, expected 0 or more (a slice takes columns away)")
        if not any(both):
            continue
        ahead, behind = (Const(torch.full([*sizes[:dim], n, *sizes[dim + 1 :]], value)) for n in both)
        x = cat(e, [t for t in (ahead, x, behind) if isinstance(t, Strided) or t.tensor.numel()], dim)
    return permuted(x, [order.index(d) for d in range(x.rank)])


def continued(e: Emitter, x: Strided, pad: Sequence[int], mode: str) -> Strided:
    """The last dimensions, `pad` from the very last one on, as they go on beyond their ends."""
    for back, ends in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        count = x.size(x.rank - back)
        at = torch.arange(-ends[0], count + ends[1])
        if mode == "reflect":
            at = (count - 1) - ((count - 1) - at.abs()).abs()
        x = selected_at(e, x, -back, Const(at % count if mode == "circular" else at.clamp(0, count - 1)))
    return x


def selected_at(e: Emitter, x: Strided, dim: int, index: Any) -> Strided:
    """The elements at constant positions of one dimension."""
    dim %= x.rank
    frame, positions = frame_of([x], x.rank), constant(index).tensor % x.size(dim)
    return e.call("aten.index_select", [x], [frame.position(dim), tuple(positions.flatten().tolist())], frame)


def flipped(e: Emitter, x: Strided, dims: Sequence[int]) -> Strided:
    """Dimensions of a row turned round."""
    for dim in dims:
        x = selected_at(e, x, dim, Const(torch.arange(x.size(dim)).flip(0)))
    return x


def indexed(e: Emitter, x: Strided, indices: Sequence[Any]) -> Strided:
    """x[:, idx] or x[:, i, j] by constant positions of one dimension, or of neighbouring ones taken together."""
    if not all(i is None or isinstance(i, Const) for i in indices):
        expected = "x[torch.arange(n), i], gather, or constant positions"
        raise Refused(f"got an index that depends on values of the batch, expected {expected}")
    used = [(d, constant(i).tensor) for d, i in enumerate(indices) if i is not None]
    first, last = used[0][0], used[-1][0]
    if last - first != len(used) - 1 or any(i.dtype == torch.bool or i.ndim != 1 for _, i in used):
        raise Refused("got an index by values, expected constant positions along neighbouring dimensions")
    flat = torch.zeros_like(used[0][1])
    for d, positions in used:
        flat = flat * x.size(d) + positions % x.size(d)
    if any(atom.batch for d, _ in used for atom in x.dims[d]):
        raise Refused("got a choice among the rows of the batch, expected each row to be computed from itself")
    joined: Dim = tuple(atom for d, _ in used for atom in x.dims[d])
    return selected_at(e, replace(x, dims=(*x.dims[:first], joined, *x.dims[last + 1 :])), first, Const(flat))


def rows_of(c: Const, frame: Frame) -> Const:
    """A constant in the sizes of a row, without the batch's dimension."""
    sizes, around = list(c.tensor.shape), [n for n in (frame.outer, frame.inner) if n > 1]
    # Of rows that are alike: one, or as many as are joined with each row of the batch.
    split = around if sizes[frame.at] > 1 else [1] * len(around)
    return Const(c.tensor.reshape(*sizes[: frame.at], *split, *sizes[frame.at + 1 :]))
