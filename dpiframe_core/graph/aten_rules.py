"""The closed table of ATen functions: for each the sizes of its result, from those of its operands and its plain arguments.

A rule refuses what does not fit with a ValueError. Sizes leave out the batch, dimension 0 of every operand that has rows.
"""

import re
from collections.abc import Callable, Sequence
from math import isfinite

Shape = tuple[int, ...]
Plain = bool | int | float | str | Shape | None
Sizes = tuple[bool, Shape]  # (one for each row of the batch?, its sizes without the batch)
Rule = Callable[[Sequence[Sizes], Sequence[Plain]], Shape]


def broadcast(operands: Sequence[Sizes]) -> Shape:
    """The sizes of operands combined element by element. Rows must line up: all that have a batch have the same rank."""
    ranks = {len(sizes) for batched, sizes in operands if batched}
    if len(ranks) != 1 or any(len(sizes) > max(ranks) for _, sizes in operands):
        raise ValueError(f"got sizes {[s for _, s in operands]}, expected rows of one rank and constants of no higher one")
    out = [1] * max(ranks)
    for _, sizes in operands:
        for i, size in enumerate(sizes, len(out) - len(sizes)):
            if size != 1 and out[i] not in (1, size):
                raise ValueError(f"got sizes {[s for _, s in operands]}, expected ones that broadcast")
            out[i] = max(out[i], size)
    return tuple(out)


def _arguments(args: Sequence[Plain], kinds: str) -> None:
    """`kinds`, a letter each: n number, i integer, b bool, d tuple of integers, s text, o number or None."""
    fits = len(args) == len(kinds)
    for value, kind in zip(args, kinds, strict=False):
        match kind:
            case "n" | "o":
                number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
                fits &= number or value in ("inf", "-inf") or (kind == "o" and value is None)
            case "i":
                fits &= isinstance(value, int) and not isinstance(value, bool)
            case "b":
                fits &= isinstance(value, bool)
            case "d":
                fits &= isinstance(value, tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
            case _:
                fits &= isinstance(value, str)
    if not fits:
        raise ValueError(f"got arguments {tuple(args)}, expected {len(kinds)} of the kinds {kinds!r}")


def _count(operands: Sequence[Sizes], low: int, high: int | None = None) -> None:
    if not low <= len(operands) <= (high or low):
        raise ValueError(f"got {len(operands)} operands, expected {low}" + (f" to {high}" if high else ""))


def _dim(dim: Plain, sizes: Shape) -> int:
    """The index into `sizes` of a dimension that counts the batch."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= len(sizes):
        raise ValueError(f"got dimension {dim}, expected 1 to {len(sizes)}: 0 is the batch")
    return dim - 1


def _row(operand: Sizes) -> Shape:
    if not operand[0]:
        raise ValueError("got a constant, expected a value as first operand")
    return operand[1]


def _elementwise(count: int, kinds: str = "") -> Rule:
    def rule(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
        _count(operands, count)
        _arguments(args, kinds)
        return broadcast(operands)

    return rule


def _reduction(kinds: str = "") -> Rule:
    """args: dimensions, keepdim, and what `kinds` says."""

    def rule(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
        _count(operands, 1)
        _arguments(args, "db" + kinds)
        sizes, dims = _row(operands[0]), args[0]
        assert isinstance(dims, tuple)
        at = {_dim(d, sizes) for d in dims}
        if not dims or len(at) != len(dims):
            raise ValueError(f"got dimensions {dims}, expected distinct ones")
        return tuple(1 if i in at else s for i, s in enumerate(sizes) if args[1] or i not in at)

    return rule


def _chosen(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    """A position along one dimension. args: as of a reduction."""
    assert isinstance(args[0], tuple)
    if len(args[0]) != 1:
        raise ValueError(f"got dimensions {args[0]}, expected one")
    return _reduction()(operands, args)


def _along(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    _count(operands, 1)
    _arguments(args, "i")
    _dim(args[0], _row(operands[0]))
    return operands[0][1]


def _topk(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    """args: the dimension, how many, the largest?, in order?"""
    _count(operands, 1)
    _arguments(args, "iibb")
    sizes, k = _row(operands[0]), args[1]
    at = _dim(args[0], sizes)
    assert isinstance(k, int)
    if not 1 <= k <= sizes[at]:
        raise ValueError(f"got the first {k}, expected 1 to {sizes[at]} of them")
    return (*sizes[:at], k, *sizes[at + 1 :])


def _sort(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    """args: the dimension, from the largest on?"""
    _arguments(args, "ib")
    return _along(operands, args[:1])


def _matmul(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    _count(operands, 2)
    _arguments(args, "")
    (left, a), (right, b) = operands
    lowest = {(True, True): (2, 2), (True, False): (1, 2), (False, True): (2, 2)}[left, right]
    if len(a) < lowest[0] or len(b) < lowest[1] or a[-1] != b[-2]:
        raise ValueError(f"got matrices {a} and {b} a row, expected [.., i, j] and [.., j, k]")
    if len(a) == 1:
        if len(b) > 2:
            raise ValueError(f"got a vector a row and a constant {b}, expected a matrix")
        return (b[-1],)
    return (*broadcast([(left, a[:-2]), (right, b[:-2])]), a[-2], b[-1])


def _linear(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    _count(operands, 2, 3)
    _arguments(args, "")
    x, (_, weight) = _row(operands[0]), operands[1]
    if any(batched for batched, _ in operands[1:]) or not x or len(weight) != 2 or weight[1] != x[-1]:
        raise ValueError(f"got x {x} and weight {weight}, expected [.., in] and a constant [out, in]")
    if len(operands) == 3 and operands[2][1] != weight[:1]:
        raise ValueError(f"got bias {operands[2][1]}, expected {weight[:1]}")
    return (*x[:-1], weight[0])


def _layer_norm(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    """args: how many trailing dimensions, eps; operands: x, perhaps weight and bias."""
    _count(operands, 1, 3)
    _arguments(args, "in")
    x, count = _row(operands[0]), args[0]
    assert isinstance(count, int)
    if not 1 <= count <= len(x) or any(batched or sizes != x[-count:] for batched, sizes in operands[1:]):
        raise ValueError(f"got {[s for _, s in operands]} over {count} dimensions, expected constants of the last ones")
    return x


def _cat(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    _arguments(args, "i")
    first = operands[0][1]
    at = _dim(args[0], first)
    if any(len(s) != len(first) or s[:at] + s[at + 1 :] != first[:at] + first[at + 1 :] for _, s in operands):
        raise ValueError(f"got sizes {[s for _, s in operands]}, expected equal ones but for dimension {args[0]}")
    return (*first[:at], sum(s[at] for _, s in operands), *first[at + 1 :])


def _index_select(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    _count(operands, 1)
    _arguments(args, "id")
    sizes, indices = _row(operands[0]), args[1]
    at = _dim(args[0], sizes)
    assert isinstance(indices, tuple)
    if not indices or not all(0 <= i < sizes[at] for i in indices):
        raise ValueError(f"got indices {indices}, expected some from 0 to {sizes[at] - 1}")
    return (*sizes[:at], len(indices), *sizes[at + 1 :])


def _take_along_dim(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    """Of a value or a constant what stands at the second operand's positions. args: dimension, do those below 0 count back?"""
    _count(operands, 2)
    _arguments(args, "ib")
    (_, sizes), (batched, index) = operands
    at = _dim(args[0], sizes)
    pairs = list(zip(sizes, index, strict=False))
    if not batched or len(index) != len(sizes) or any(1 not in {n, i} and n != i for d, (n, i) in enumerate(pairs) if d != at):
        raise ValueError(f"got positions {index} a row for sizes {sizes}, expected as many, equal or 1 but for {args[0]}")
    return tuple(i if d == at else max(n, i) for d, (n, i) in enumerate(pairs))


_EQUATION = re.compile(r"[A-Za-z]*(,[A-Za-z]*)*->[A-Za-z]+")


def _einsum(operands: Sequence[Sizes], args: Sequence[Plain]) -> Shape:
    """args: the equation. The first letter of its result is the batch, which every value's term begins with."""
    _arguments(args, "s")
    equation = str(args[0])
    terms, out = equation.split("->")[0].split(","), equation.split("->")[-1]
    if not _EQUATION.fullmatch(equation) or len(terms) != len(operands) or len(set(out)) != len(out):
        raise ValueError(f"got equation {equation!r} for {len(operands)} operands, expected letters, a term for each")
    size: dict[str, int] = {}
    for (batched, sizes), term in zip(operands, terms, strict=True):
        letters = term[1:] if batched else term
        if term.startswith(out[0]) != batched or out[0] in letters or len(letters) != len(sizes):
            raise ValueError(
                f"got {equation!r} for sizes {sizes}, expected {out[0]!r} first, and there alone, in values' terms"
            )
        for letter, n in zip(letters, sizes, strict=True):
            if size.setdefault(letter, n) != n:
                raise ValueError(f"got {equation!r} with {letter} of {size[letter]} and {n}, expected one size")
    if not set(out[1:]) <= set(size):
        raise ValueError(f"got equation {equation!r}, expected a result of letters of its operands")
    return tuple(size[letter] for letter in out[1:])


_UNARY = "abs neg exp expm1 log log1p log2 sqrt rsqrt reciprocal square relu sigmoid tanh silu mish hardswish hardsigmoid"
_UNARY += " log_sigmoid sin cos atan erf sign floor ceil round trunc log10 logical_not clone"
_UNARY += " exp2 sinh cosh tan asin acos asinh acosh atanh erfc"
_BINARY = "add sub mul div maximum minimum pow eq ne gt ge lt le logical_and logical_or logical_xor prelu atan2"
_BINARY += " fmod remainder floor_divide trunc_divide"
_SCALAR = "add sub rsub mul div pow rpow eq ne gt ge lt le fmod remainder floor_divide trunc_divide"

RULES: dict[str, Rule] = {
    **{f"aten.{name}": _elementwise(1) for name in _UNARY.split()},
    **{f"aten.{name}": _elementwise(2) for name in _BINARY.split()},
    **{f"aten.{name}.Scalar": _elementwise(1, "n") for name in _SCALAR.split()},
    "aten.leaky_relu": _elementwise(1, "n"),  # slope
    "aten.elu": _elementwise(1, "nnn"),  # alpha, scale, input scale
    "aten.gelu": _elementwise(1, "b"),  # by tanh?
    "aten.softplus": _elementwise(1, "nn"),  # beta, threshold
    "aten.clamp": _elementwise(1, "oo"),  # least, most
    "aten.where": _elementwise(3),
    "aten.masked_fill.Scalar": _elementwise(2, "n"),
    "aten.sum": _reduction(),
    "aten.mean": _reduction(),
    "aten.amax": _reduction(),
    "aten.amin": _reduction(),
    "aten.prod": _reduction(),
    "aten.argmax": _chosen,
    "aten.argmin": _chosen,
    "aten.logsumexp": _reduction(),
    "aten.linalg_vector_norm": _reduction("n"),  # order
    "aten.var": _reduction("n"),  # correction
    "aten.softmax": _along,
    "aten.log_softmax": _along,
    "aten.cumsum": _along,
    "aten.cumprod": _along,
    "aten.topk": _topk,
    "aten.topk.positions": _topk,
    "aten.sort": _sort,
    "aten.sort.positions": _sort,
    "aten.matmul": _matmul,
    "aten.linear": _linear,
    "aten.layer_norm": _layer_norm,
    "aten.cat": _cat,
    "aten.index_select": _index_select,
    "aten.einsum": _einsum,
    "aten.take_along_dim": _take_along_dim,
}
