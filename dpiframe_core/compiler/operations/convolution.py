"""Convolutions and pooling over dimensions of a row: windows that overlap are strides, so that what they hold is not copied."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpiframe_core.compiler.operations.arguments import Arguments, constant, integers
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.joins import cat, padded
from dpiframe_core.compiler.operations.products import matmul
from dpiframe_core.compiler.operations.reductions import reduced
from dpiframe_core.compiler.operations.strided import BATCH, Atom, Dim, Refused, Size, Strided, merged, permuted

POOLS = {"max_pool": "aten.amax", "adaptive_max_pool": "aten.amax", "avg_pool": "aten.mean", "adaptive_avg_pool": "aten.mean"}


def convolution(e: Emitter, a: Arguments) -> Strided:
    """x[n, channels, *spatial] by weight[out, channels / groups, *kernel]: a product with what each window holds."""
    x, weight, groups = a["input"], constant(a["weight"]).tensor, a["groups"]
    bias, kernel = a["bias"] and constant(a["bias"]), tuple(weight.shape[2:])
    _check_batch(x, len(kernel))
    dilation = _each(a["dilation"], len(kernel))
    x = _with_zeros(e, x, _padding(a["padding"], kernel, dilation))
    x = e.copied(x) if groups > 1 and len(merged(x.dims[1])) > 1 else x
    x, at, inside = _windows(e, x, kernel, _each(a["stride"], len(kernel)), dilation)
    own, channels = x.size(1) // groups, x.dims[1]
    if groups > 1:
        step = merged(channels)[0].stride
        channels, apart = ((Atom(own, step),) if own > 1 else ()), (Atom(groups, own * step),)
    # By falling strides: what a window holds is one run of a row then, wherever it can be.
    parts = sorted(enumerate([channels, *inside]), key=lambda part: -max((atom.stride for atom in part[1]), default=0))
    taps: Dim = tuple(atom for _, dim in parts for atom in dim)
    factors = weight.permute(0, *(1 + i for i, _ in parts)).reshape(groups, len(weight) // groups, -1)
    if groups == 1:
        made = e.linear(replace(x, dims=(x.dims[0], *at, taps)), Const(factors[0]), bias)
        return permuted(made, [0, made.rank - 1, *range(1, made.rank - 1)])
    broadcast = factors.mT.reshape(groups, *[1] * (len(kernel) - 1), factors.shape[2], -1)
    made = matmul(e, replace(x, dims=(x.dims[0], apart, *at, taps)), Const(broadcast))
    made = permuted(made, [0, 1, made.rank - 1, *range(2, made.rank - 1)])
    made = e.view(made, [made.sizes[0], Size(len(weight)), *made.sizes[3:]])
    return e.elementwise("aten.add", [made, Const(bias.tensor.reshape(-1, *[1 for _ in kernel]))]) if bias else made


def pooled(e: Emitter, op: str, a: Arguments, spatial: int) -> Strided:
    """The largest or the mean of each window, `op` being "aten.amax" or "aten.mean"."""
    x = a["self"]
    _check_batch(x, spatial)
    if "output_size" in a:
        outs, sizes = _each(a["output_size"], spatial), [x.size(d) for d in range(2, x.rank)]
        if any(n % out for n, out in zip(sizes, outs, strict=True)):
            raise Refused(f"got pooling of {sizes} to {list(outs)}, expected sizes that it divides")
        kernel = tuple(n // out for n, out in zip(sizes, outs, strict=True))
        stride, padding, dilation = kernel, (0,) * spatial, (1,) * spatial
    else:
        kernel = _each(a["kernel_size"], spatial)
        stride, padding = _each(a["stride"] or kernel, spatial), _each(a["padding"], spatial)
        dilation = _each(a.get("dilation", 1), spatial)
    uneven = any(padding) and (max(dilation) > 1 if op == "aten.amax" else not a["count_include_pad"])
    if a.get("ceil_mode") or a.get("divisor_override") or uneven:
        raise Refused("got pooling of windows that are cut off or spread, expected whole ones (ceil_mode=False, no dilation)")
    x = _with_edges(e, x, padding) if op == "aten.amax" else _with_zeros(e, x, [(n, n) for n in padding])
    x, at, inside = _windows(e, x, kernel, stride, dilation)
    windows = replace(x, dims=(*x.dims[:2], *at, *inside))
    return reduced(e, op, windows, range(2 + spatial, 2 + 2 * spatial), keep=False)


def _windows(
    e: Emitter, x: Strided, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Strided, list[Dim], list[Dim]]:
    """The tensor, copied where a spatial dimension is no even run; dimensions that count the windows, and those within one."""
    if any(len(merged(dim)) > 1 for dim in x.dims[2:]):
        x = e.copied(x)
    at, inside = list[Dim](), list[Dim]()
    for dim, k, step, apart in zip(x.dims[2:], kernel, stride, dilation, strict=True):
        (run,) = merged(dim) or [Atom(1, 0)]
        count = (run.size - apart * (k - 1) - 1) // step + 1
        at.append((Atom(count, step * run.stride),) if count > 1 else ())
        inside.append((Atom(k, apart * run.stride),) if k > 1 else ())
    return x, at, inside


def _padding(given: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Zeros ahead of and behind each spatial dimension."""
    if isinstance(given, str):
        whole = [(k - 1) * apart if given == "same" else 0 for k, apart in zip(kernel, dilation, strict=True)]
        return [(n // 2, n - n // 2) for n in whole]
    return [(n, n) for n in _each(given, len(kernel))]


def _with_zeros(e: Emitter, x: Strided, pads: Sequence[tuple[int, int]]) -> Strided:
    return padded(e, x, [n for both in reversed(pads) for n in both], 0)


def _with_edges(e: Emitter, x: Strided, pads: Sequence[int]) -> Strided:
    """Padded for a maximum: by the first and the last element, of which each window that reaches beyond has one anyway."""
    for d, n in enumerate(pads, 2):
        if n:
            ends = [e.sliced(x, d, at, 1) for at in (0, x.size(d) - 1)]
            first, last = (replace(t, dims=(*t.dims[:d], (Atom(n, 0),) if n > 1 else (), *t.dims[d + 1 :])) for t in ends)
            x = cat(e, [first, x, last], d)
    return x


def _each(value: Any, spatial: int) -> tuple[int, ...]:
    given = integers(value)
    return tuple(given * spatial if len(given) == 1 else given)


def _check_batch(x: Strided, spatial: int) -> None:
    if x.rank != 2 + spatial or BATCH not in x.dims[0]:
        raise Refused("got a window over the batch, expected each row to be computed from itself")
