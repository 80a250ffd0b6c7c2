"""Nodes of the feature interactions that read columns of a value: pairwise dots, the compressed interaction network, target
attention, a mixture of experts, recurrences. Graph nodes only, their shapes checked.
"""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import ACTIVATION_PARAMS, Attended, Attrs, Node

T = TypeVar("T")


class _Rows(Protocol):
    def __getitem__(self, rows: slice, /) -> Self: ...


R = TypeVar("R", bound=_Rows)


def dot(
    g: GraphBuilder, values: Sequence[str], dim: int, name: str, module: str, *, keep: int = 0, diagonal: bool = False
) -> str:
    """The first `keep` columns of the joined values, then <v_i, v_j> of all their vectors of `dim` columns with j < i
    (`diagonal`: j <= i), row by row: (1,0), (2,0), (2,1), .. (Naumov et al. 2019).
    """
    width = sum(map(g.width, values))
    fields, rest = divmod(width, dim)
    if rest or keep > width or not fields or not 1 <= len(values) <= 2:
        got = f"{len(values)} values of {width} columns, {keep} to keep"
        raise ValueError(f"{name}: got {got}, expected one or two values of whole vectors of {dim}")
    attrs = Attrs(fields=fields, dim=dim, keep=keep, diagonal=diagonal)
    pairs = fields * (fields + (1 if diagonal else -1)) // 2
    return g.node(Node(name, "dot", tuple(values), (name,), module, attrs=attrs), keep + pairs)


def cin(
    g: GraphBuilder, x: str, offset: int, fields: int, dim: int, units: Sequence[int], prefix: str, module: str,
    *, activation: str = "identity", slope: float = 0.0, halves: bool = False, bias: bool = True,
) -> str:  # fmt: skip
    """The compressed interaction network of m = `fields` vectors from column `offset` on (Lian et al. 2018, eq. 6 and 7).

    X^k[n, d] = activation(sum_ij W^k[n, i m + j] X^{k-1}[i, d] X^0[j, d] + b^k[n]), summed over d. With `halves` the first
    half of a layer's maps goes into the next layer and the second half is summed, but for the last layer: all of it.
    """
    if offset + fields * dim > g.width(x):
        raise ValueError(f"{prefix}: got columns up to {offset + fields * dim}, expected at most {g.width(x)}")
    if not units or activation in ACTIVATION_PARAMS or (halves and any(u % 2 for u in units[:-1])):
        raise ValueError(f"{prefix}: got units {list(units)} and {activation}, expected layers (even if halved), no parameters")
    attrs = Attrs(
        offset=offset, fields=fields, dim=dim, units=tuple(units), halves=halves, activation=activation, slope=slope
    )  # fmt: skip
    params, before, pooled = [], fields, 0
    for k, n in enumerate(units):
        params.append(g.param(f"{prefix}.{k}.weight", (n, before * fields)))
        if bias:
            params.append(g.param(f"{prefix}.{k}.bias", (n,)))
        before = n // 2 if halves else n
        pooled += before if k < len(units) - 1 else n
    return g.node(Node(prefix, "cin", (x,), (prefix,), module, tuple(params), attrs), pooled)


def attention(
    g: GraphBuilder, x: str, attended: Attended, units: Sequence[int], prefix: str, module: str,
    *, activation: str = "sigmoid", slope: float = 0.0,
) -> str:  # fmt: skip
    """Target attention (Zhou et al. 2018, eq. 3): sum_l w_l k_l, w_l = an MLP of [q, k_l, q - k_l, q * k_l].

    Its layers are `prefix.{i}.weight` [units[i], 4 d or units[i - 1]], `.bias` and their activation's parameters, its
    output `prefix.out.weight` [1, units[-1]] and `.bias` [1]. Weights are multiplied by the mask, and with softmax what is
    masked weighs nothing.
    """
    a, width = attended, g.width(x)
    ends = [q + d for q, d in zip(a.queries, a.dims, strict=True)] + [a.mask + a.length if a.mask >= 0 else 0]
    ends += [k + a.length * d for k, d in zip(a.keys, a.dims, strict=True)] + [at + n for at, _, n in a.kept]
    if max(ends) > width or min((*a.queries, *a.keys)) < 0 or a.length < 1 or not units:
        raise ValueError(f"{prefix}: got columns up to {max(ends)} and {len(units)} layers, expected <= {width} and >= 1")
    params, before = list[str](), 4 * a.dim
    for i, n in enumerate(units):
        params += [g.param(f"{prefix}.{i}.weight", (n, before)), g.param(f"{prefix}.{i}.bias", (n,))]
        params += g.activation_params(activation, f"{prefix}.{i}", n)
        before = n
    params += [g.param(f"{prefix}.out.weight", (1, before)), g.param(f"{prefix}.out.bias", (1,))]
    attrs = Attrs(attended=a, units=tuple(units), activation=activation, slope=slope)
    out = sum(n for _, _, n in a.kept) + a.dim
    return g.node(Node(prefix, "attention", (x,), (prefix,), module, tuple(params), attrs), out)


def mixture(g: GraphBuilder, x: str, gates: str, name: str, module: str) -> str:
    """softmax(gates)[i] times the i-th of as many equally wide parts of x."""
    fields = g.width(gates)
    if g.width(x) % fields:
        raise ValueError(f"{name}: got {g.width(x)} columns, expected a multiple of the {fields} gates")
    attrs = Attrs(fields=fields, dim=g.width(x) // fields)
    return g.node(Node(name, "mixture", (x, gates), (name,), module, attrs=attrs), g.width(x))


def linear_params(a: Attrs, params: Sequence[T]) -> tuple[T, T | None, Sequence[T]]:
    """Weight, bias if there is one, and the parameters of the activation, of a linear node's parameters."""
    own = len(params) - len(ACTIVATION_PARAMS.get(a.activation, ()))
    return params[0], params[1] if own == 2 else None, params[own:]


def field_projections(attrs: Attrs, params: Sequence[R]) -> list[tuple[R, R | None]]:
    """(weight, bias or None) of each projection of an attention over fields, from its node's parameters: rows of theirs."""
    heads = attrs.field_heads
    assert heads is not None
    left, projections = iter(params), []
    for biased, first in zip(heads.biases, heads.firsts, strict=True):
        own = slice(first, first + heads.heads * heads.size)
        projections.append((next(left)[own], next(left)[own] if biased else None))
    return projections
