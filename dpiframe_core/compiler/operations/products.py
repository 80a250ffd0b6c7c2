"""Products: matmul, einsum and attention as linear layers or generic nodes."""

from collections.abc import Sequence
from math import inf
from string import ascii_letters

import torch

from dpiframe_core.compiler.operations.arguments import Arguments, constant
from dpiframe_core.compiler.operations.emit import Const, Emitter, Tensor, aligned
from dpiframe_core.compiler.operations.reductions import along, reduced
from dpiframe_core.compiler.operations.strided import (
    BATCH,
    Frame,
    Refused,
    Size,
    Strided,
    frame_of,
    permuted,
    squeezed,
    unsqueezed,
)
from dpiframe_core.compiler.operations.tensors import scaled, sizes_of, transposed


def matmul(e: Emitter, a: Tensor, b: Tensor) -> Strided:
    """a @ b; a product with a constant matrix on the right is a linear layer."""
    if isinstance(a, Strided) and isinstance(b, Const) and b.tensor.ndim <= 2 and b.batch_dim is None:
        if b.tensor.ndim == 2:
            return e.linear(a, Const(b.tensor.t()), None)
        return squeezed(e.linear(a, Const(b.tensor[None]), None), [a.rank - 1])
    if isinstance(a, Const) and isinstance(b, Strided) and a.tensor.ndim == 1 and b.rank > 2 and a.batch_dim is None:
        return matmul(e, transposed(b), a)
    if isinstance(a, Strided) and isinstance(b, Const) and a.rank == b.tensor.ndim == 3 and a.dims[1] == (BATCH,):
        return einsum(e, "fbd,fdk->fbk", [a, b])  # a matrix for each of what each row has several of
    tensors = (a, b)
    ranks = [len(sizes_of(t)) for t in tensors]
    rank = max(ranks)
    frame = frame_of([t for t in tensors if isinstance(t, Strided)], rank)
    if min(ranks) < 2 or frame.at >= rank - 2:
        raise Refused("got a product over the batch, expected each row to be computed from itself")
    return e.call("aten.matmul", [t if isinstance(t, Strided) else _matrix(t, frame) for t in tensors], [], frame)


def einsum(e: Emitter, equation: str, tensors: Sequence[Tensor]) -> Strided:
    """By its equation, the batch's letter put first everywhere."""
    terms, out = _spelled(equation.replace(" ", ""), [len(sizes_of(t)) for t in tensors])
    letters = {term[t.batch_dim] for t, term in zip(tensors, terms, strict=True) if isinstance(t, Strided)}
    (batch, *others) = letters
    constants = [term for t, term in zip(tensors, terms, strict=True) if isinstance(t, Const)]
    if others or batch not in out or any(batch in term for term in constants):
        raise Refused(f"got einsum {equation!r}, expected one letter for the batch, in the result and in no constant")
    operands: list[Tensor] = []
    for i, (t, term) in enumerate(zip(tensors, terms, strict=True)):
        if isinstance(t, Strided):  # the batch in front
            order = [t.batch_dim, *(d for d in range(t.rank) if d != t.batch_dim)]
            terms[i] = "".join(term[d] for d in order)
            t = permuted(t, order)
            if frame_of([t], t.rank) != Frame(t.rank, 0):
                raise Refused("got einsum of rows joined with other dimensions, expected a dimension of their own")
        operands.append(t)
    result = batch + out.replace(batch, "")
    made = e.call("aten.einsum", operands, [",".join(terms) + "->" + result], None)
    return permuted(made, [result.index(letter) for letter in out])


def _spelled(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, those that torch lets one leave out among them."""
    given, _, out = equation.partition("->")
    terms = given.split(",")
    unused = [c for c in ascii_letters if c not in equation]
    rest = [rank - len(term) + 3 if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    if "->" not in equation:
        letters = given.replace(",", "").replace(".", "")
        out = "..." * ("..." in given) + "".join(sorted(c for c in letters if letters.count(c) == 1))
    first = len(unused) - max(rest)
    terms = [term.replace("...", "".join(unused[len(unused) - n :])) for term, n in zip(terms, rest, strict=True)]
    return terms, out.replace("...", "".join(unused[first:]))


def bilinear(e: Emitter, a: Arguments) -> Strided:
    """x[.., i] W[o, i, j] y[.., j] + b[o]: a linear layer of x, multiplied by y and summed over j."""
    x, y, weight = a["input1"], a["input2"], constant(a["weight"]).tensor
    out, left, right = weight.shape
    made = matmul(e, x, Const(weight.permute(1, 0, 2).reshape(left, out * right)))
    made = e.view(made, [*x.sizes[:-1], Size(out), Size(right)])
    made = reduced(e, "aten.sum", e.elementwise("aten.mul", [made, unsqueezed(y, y.rank - 1)]), [-1], keep=False)
    return made if a["bias"] is None else e.elementwise("aten.add", [made, constant(a["bias"])])


def attention(e: Emitter, a: Arguments) -> Strided:
    """softmax(q k^T * scale + mask) v, operation by operation."""
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    if a["dropout_p"] or a["enable_gqa"]:
        raise Refused("got attention with dropout or grouped queries, expected none (repeat_interleave the keys' heads)")
    if isinstance(q, Const) and isinstance(k, Const):
        raise Refused("got attention of constants by constants, expected a value among queries and keys")
    queries, width = sizes_of(q)[-2:]
    scores = matmul(e, scaled(e, q, float(a["scale"] if a["scale"] is not None else width**-0.5)), transposed(k))
    if a["is_causal"]:
        mask = Const(torch.ones(queries, sizes_of(k)[-2], dtype=torch.bool).tril())
    if mask is None:
        return matmul(e, along(e, "aten.softmax", scores, -1), v)
    if mask.boolean if isinstance(mask, Strided) else mask.tensor.dtype == torch.bool:
        scores = e.elementwise("aten.masked_fill.Scalar", [scores, e.inverted(mask)], [-inf])
    else:
        scores = e.elementwise("aten.add", [scores, mask])
    weights = along(e, "aten.softmax", scores, -1)
    if isinstance(mask, Strided) or _hides_all(mask.tensor):
        nothing = e.elementwise("aten.eq.Scalar", [reduced(e, "aten.amax", scores, [-1], keep=True)], [-inf])
        weights = e.elementwise("aten.masked_fill.Scalar", [weights, nothing], [0.0])  # torch gives zeros, and no NaN
    return matmul(e, weights, v)


def _hides_all(mask: torch.Tensor) -> bool:
    """Whether some query may look at nothing."""
    hidden = ~mask if mask.dtype == torch.bool else mask == -inf
    return bool(hidden.all(-1).any())


def _matrix(c: Const, frame: Frame) -> Const:
    """A constant matrix, or a stack of them, that lines up with rows; its last two dimensions stay."""
    found = aligned(c, frame).tensor
    matrix = c.tensor.shape[-2:]
    return Const(found.reshape(*found.shape[: max(0, found.ndim - 2)], *matrix))
