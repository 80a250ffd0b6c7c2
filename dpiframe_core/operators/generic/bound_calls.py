"""Generic operators on a CPU as calls whose operands and results, float32, stay where they are (`row_tiles`): written in place
where torch can, by fewer passes than `aten_functions` where a CPU may look at values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from dpiframe_core.graph.aten import AtenCall, Constant, Window
from kernels.norms.norms import RowChoice, RowNorm
from kernels.runtime.c_build import cpu_library

_COPIED = 1 << 17  # numbers of windows at a time

Call = Callable[[], object]
Function = Callable[..., torch.Tensor]

_COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le")
_OTHERS = "logical_not logical_and logical_or logical_xor softmax log_softmax cumsum cumprod index_select cat"
# What torch writes in place beside `aten_functions.WRITES`.
_WRITES: dict[str, Function] = {
    **{f"aten.{name}": getattr(torch, name) for name in (*_COMPARISONS, *_OTHERS.split())},
    **{f"aten.{name}.Scalar": getattr(torch, name) for name in _COMPARISONS},
}


def bound_call(
    call: AtenCall, function: Function, writes: Function | None, operands: Sequence[torch.Tensor], args: Sequence[object],
    out: torch.Tensor,
) -> Call:  # fmt: skip
    """`out`, float32[rows, *sizes], becomes function(*operands, *args). writes: what does so in place."""
    first = operands[0]
    match call.op:
        case "aten.clone":
            return partial(out.copy_, first)
        case "aten.relu":
            return partial(torch.clamp_min, first, 0, out=out)
        case "aten.gelu":
            gelu: Function = torch._C._nn.gelu
            return partial(gelu, first, approximate="tanh" if args[0] else "none", out=out)
        case "aten.linear" if isinstance(call.operands[1], Window):
            return _row_products(operands, out)
        case "aten.linear":
            return _linear(first, operands[1], operands[2:], out)
        case "aten.where":
            return _choice(first, operands[1], operands[2], out)
        case "aten.masked_fill.Scalar":
            return _choice(operands[1], torch.tensor(float(str(args[0]))), first, out)
        case "aten.rsub.Scalar":
            return partial(torch.sub, torch.tensor(args[0], dtype=torch.float32), first, out=out)
        case "aten.prelu" if first.dim() == 2 and operands[1].numel() in (1, first.shape[1]):
            slope = operands[1].reshape(-1)
            return lambda: out.copy_(torch.prelu(first, slope))
        case "aten.softmax" if cpu_library() is not None and args[0] == first.dim() - 1:
            return _norm(first, out, out.shape[-1])
        case "aten.layer_norm" if cpu_library() is not None:
            count, eps = (float(str(a)) for a in args)
            return _norm(first, out, prod(out.shape[-int(count) :]), eps, *operands[1:])
        case "aten.take_along_dim":
            return _taken(call, function, operands, out)
        case "aten.sort":  # the values of equal elements are the same in any order
            sort: Callable[..., torch.return_types.sort] = torch.sort
            return lambda: out.copy_(sort(first, *args).values)
        case "aten.matmul" if first.dim() == operands[1].dim() == 3 and len(first) == len(operands[1]):
            return partial(torch.bmm, first, operands[1], out=out)  # a few rows without its detour
        case "aten.matmul" if first.dim() == 4 and operands[1].dim() == 3:
            writes = None
    writes = writes or _WRITES.get(call.op)
    if writes is not None and call.op == "aten.cat":
        return partial(writes, operands, *args, out=out)
    if writes is not None:
        return partial(writes, *operands, *args, out=out)
    return lambda: out.copy_(function(*operands, *args))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Sequence[torch.Tensor], out: torch.Tensor) -> Call:
    """One product for all rows. Windows that overlap are copied some rows at a time, so that the cache holds them."""
    flat = _flat(x)
    product = partial(torch.addmm, bias[0]) if bias else torch.mm
    if flat is not None:
        return partial(product, flat, weight.t(), out=out.view(-1, out.shape[-1]))
    rows, calls = min(len(x), _COPIED // x[0].numel() + 1), list[Call]()
    copied, made = torch.empty(rows * x[0].numel()), torch.empty(rows * out[0].numel())
    for own, place in zip(torch.split(x, rows), torch.split(out, rows), strict=True):
        held, columns = copied[: own.numel()], x.shape[-1]
        if x.stride(-1) == 1:
            calls.append(partial(held.view(own.shape).copy_, own))
            calls.append(partial(product, held.view(-1, columns), weight.t(), out=place.view(-1, out.shape[-1])))
            continue
        # Column by column of the product, as they lie in memory: the windows of one place are a run, or nearly.
        turned, product_of = made[: place.numel()].view(len(weight), -1), held.view(columns, -1)
        calls.append(partial(held.view(columns, *own.shape[:-1]).copy_, own.movedim(-1, 0)))
        calls.append(partial(torch.mm, weight, product_of, out=turned))
        as_out = turned.view(-1, *place.shape[:-1]).movedim(0, -1)
        calls.append(partial(torch.add, as_out, bias[0], out=place) if bias else partial(place.copy_, as_out))

    return partial(_in_turn, calls)


def _in_turn(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _row_products(operands: Sequence[torch.Tensor], out: torch.Tensor) -> Call:
    """As `fewer_passes.split_linears` wants them: k[rows, L, dim] times weights[dim, units] of each row."""
    query, keys, of_query, of_keys, of_product, bias = operands
    calls, rows = list[Call](), min(len(query), _COPIED // (2 * of_keys.numel()) + 1)
    weights, share = torch.empty(rows, *of_keys.shape), torch.empty(rows, of_keys.shape[1])
    for q, k, place in zip(torch.split(query, rows), torch.split(keys, rows), torch.split(out, rows), strict=True):
        w, once = weights[: len(q)], share[: len(q)]
        calls.append(partial(torch.addcmul, of_keys, q[:, :, None], of_product, out=w))
        calls += [partial(torch.addmm, bias, q, of_query, out=once), partial(torch.bmm, k, w, out=place)]
        calls.append(partial(place.add_, once[:, None]))

    return partial(_in_turn, calls)


def _choice(condition: torch.Tensor, yes: torch.Tensor, no: torch.Tensor, out: torch.Tensor) -> Call:
    """By C, where a row is a matrix or a vector. torch takes 2 to 5 ns a number where it has to broadcast."""
    of = [t.expand(out.shape) for t in (condition, yes, no, out)]
    if out.dim() > 2 and out.shape[-1] == 1:
        of = [t.squeeze(-1) for t in of]
    if of[0].dim() == 2:
        of = [t.unsqueeze(1) for t in of]
    if cpu_library() is not None and of[0].dim() == 3 and all(t.stride(2) in (0, 1) for t in of):
        return RowChoice(of[:3], of[3])
    return lambda: torch.where(condition != 0, yes, no, out=out)


def _norm(x: torch.Tensor, out: torch.Tensor, width: int, *how: Any) -> Call:
    if x.is_contiguous():
        return RowNorm(x, out, width, *how)
    norm = RowNorm(out, out, width, *how)

    def run() -> None:
        out.copy_(x)
        norm()

    return run


def _flat(x: torch.Tensor) -> torch.Tensor | None:
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None


def _taken(call: AtenCall, function: Function, operands: Sequence[torch.Tensor], out: torch.Tensor) -> Call:
    """Elements at positions: of whole vectors, or where no dimension is broadcast, at once, else by the function."""
    (x, index), dim = operands, call.args[0]
    assert isinstance(dim, int)
    plainly = partial(function, x, index, *call.args)
    vectors = dim == 1 and x.dim() == 3 and index.shape[2] == 1
    if vectors and isinstance(call.operands[0], Constant):
        read = partial(torch.index_select, x[0], 0)
        return _unless_refused(lambda: read(index.long().view(-1), out=out.view(-1, x.shape[2])), plainly, out)
    if vectors and x.is_contiguous():
        count, rows, target = x.shape[1], x.view(-1, x.shape[2]), out.view(-1, x.shape[2])
        starts = torch.arange(0, len(rows), count).view(-1, 1, 1)

        def run() -> None:
            near = index.long().clamp_(0, count - 1)
            if torch.equal(near.float(), index):  # else a row would read its neighbour's
                torch.index_select(rows, 0, near.add_(starts).view(-1), out=target)
            else:
                out.copy_(plainly())

        return run
    if x.shape[:dim] + x.shape[dim + 1 :] == index.shape[:dim] + index.shape[dim + 1 :]:
        return _unless_refused(lambda: torch.gather(x, dim, index.long(), out=out), plainly, out)
    return lambda: out.copy_(plainly())


def _unless_refused(call: Call, plainly: Callable[[], torch.Tensor], out: torch.Tensor) -> Call:
    """A position that is none, as NaN is, or that counts from the end, makes torch raise."""

    def run() -> None:
        try:
            call()
        except (IndexError, RuntimeError):
            out.copy_(plainly())

    return run
