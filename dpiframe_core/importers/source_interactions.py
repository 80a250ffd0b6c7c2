"""Feature interactions as the source libraries have them: cross networks, FM, CIN, target attention.

As in `source_layers`: `parameters` gives ours, `__call__` computes the library's own formula in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import LeakyReLU, Plain
from dpiframe_core.importers.source_layers import Activation, Linear, Mlp, Parameters
from dpiframe_core.importers.state_dict import StateDict


@dataclass(frozen=True, slots=True, eq=False)
class CrossVector:
    """x_{l+1} = x_0 (x_l . w_l) + b_l + x_l (DCN). weights, biases: [D] a layer."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def __call__(self, x0: Tensor) -> Tensor:
        x = x0
        for w, b in zip(self.weights, self.biases, strict=True):
            x = x0 * (x @ w.double())[:, None] + b.double() + x
        return x

    def parameters(self, prefix: str) -> Parameters:
        return _numbered(prefix, self.weights, self.biases)


@dataclass(frozen=True, slots=True, eq=False)
class CrossMatrix:
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l (DCN-V2). weights: [D, D], biases: [D] a layer.

    With `outer_bias`: x_0 * (W_l x_l) + b_l + x_l.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    outer_bias: bool = False

    def __call__(self, x0: Tensor) -> Tensor:
        x = x0
        for w, b in zip(self.weights, self.biases, strict=True):
            wx, bias = x @ w.double().T, b.double()
            x = x0 * wx + bias + x if self.outer_bias else x0 * (wx + bias) + x
        return x

    def parameters(self, prefix: str) -> Parameters:
        return _numbered(prefix, self.weights, self.biases)


@dataclass(frozen=True, slots=True, eq=False)
class CrossLowRank:
    """x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l. v: [r, D], u: [D, r], biases: [D] a layer."""

    v: tuple[Tensor, ...]
    u: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def __call__(self, x0: Tensor) -> Tensor:
        x = x0
        for v, u, b in zip(self.v, self.u, self.biases, strict=True):
            x = x0 * (x @ v.double().T @ u.double().T + b.double()) + x
        return x

    def parameters(self, prefix: str) -> Parameters:
        out = _numbered(prefix, self.u, self.biases)
        return out | {f"{prefix}.{i}.v.weight": v.float().contiguous() for i, v in enumerate(self.v)}


@dataclass(frozen=True, slots=True, eq=False)
class CrossMixture:
    """The gated mixture of experts of low rank. u, v: [E, D, r], c: [E, r, r], biases: [D] a layer; gates: [E, D]."""

    u: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    c: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    gates: Tensor

    def __call__(self, x0: Tensor) -> Tensor:
        x = x0
        for u, v, c, b in zip(self.u, self.v, self.c, self.biases, strict=True):
            gate = torch.softmax(x @ self.gates.double().T, 1)
            out = torch.zeros_like(x)
            for e in range(len(u)):
                inner = torch.tanh(torch.tanh(x @ v[e].double()) @ c[e].double().T)
                out += gate[:, e : e + 1] * x0 * (inner @ u[e].double().T + b.double())
            x = out + x
        return x

    def parameters(self, prefix: str) -> Parameters:
        out = _numbered(prefix, [torch.cat(list(u), 1) for u in self.u], self.biases)
        for i, (v, c) in enumerate(zip(self.v, self.c, strict=True)):
            out[f"{prefix}.{i}.v.weight"] = torch.cat([one.T for one in v]).float().contiguous()
            out[f"{prefix}.{i}.c.weight"] = _block_diagonal(c).float()
        return out | {f"{prefix}.gates.weight": self.gates.float().contiguous()}


def read_mixture(
    weights: StateDict, lists: tuple[str, str, str], layers: int, experts: int, width: int, rank: int | None = None
) -> CrossMixture:
    """Takes the parameters below `crossnet`, where `lists` name those of U, V and C."""

    def each(name: str, *shape: int | None) -> tuple[Tensor, ...]:
        return tuple(weights.take(f"crossnet.{name}.{i}", *shape) for i in range(layers))

    u = each(lists[0], experts, width, rank)
    rank = u[0].shape[2]
    v, c, biases = each(lists[1], experts, width, rank), each(lists[2], experts, rank, rank), each("bias", width, 1)
    gates = torch.cat([weights.take(f"crossnet.gating.{e}.weight", 1, width) for e in range(experts)])
    return CrossMixture(u, v, c, tuple(b[:, 0] for b in biases), gates)


@dataclass(frozen=True, slots=True, eq=False)
class CompressedInteraction:
    """CIN. weights: [units, previous maps, fields], biases: [units] a layer; maps are summed over the embedding.

    With `halves` the first half of a layer's maps (but the last's) goes on, the second half is summed.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    activation: Activation
    halves: bool = False

    def __call__(self, x0: Tensor) -> Tensor:
        """float64[n, fields, dim] -> [n, pooled]."""
        x, pooled = x0, []
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            maps = self.activation(torch.einsum("bhd,bmd,nhm->bnd", x, x0, w.double()) + b.double()[None, :, None])
            x = maps
            if self.halves and i < len(self.weights) - 1:
                x, maps = maps.chunk(2, 1)
            pooled.append(maps.sum(2))
        return torch.cat(pooled, 1)

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(len(w) for w in self.weights)

    def parameters(self, prefix: str) -> Parameters:
        return _numbered(prefix, [w.flatten(1) for w in self.weights], self.biases)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """sum_l w_l k_l, w_l = an MLP of [q, k_l, q - k_l, q * k_l] times the mask; with `softmax` of what is not masked."""

    mlp: Mlp
    out: Linear
    softmax: bool

    @property
    def output_kind(self) -> Plain:
        """The activation behind `out`."""
        kind = self.out.activation.kind
        if isinstance(kind, LeakyReLU) or kind in ("prelu", "dice"):
            raise InputError("attention: output activation", kind, "one without parameters")
        return cast(Plain, kind)

    def __call__(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """float64[n, d], [n, L, d], bool[n, L] -> [n, d]."""
        rows, length, dim = keys.shape
        queries = query[:, None, :].expand(-1, length, -1)
        joined = torch.cat([queries, keys, queries - keys, queries * keys], 2).reshape(rows * length, 4 * dim)
        weight = self.out(self.mlp(joined)).reshape(rows, length) * mask
        if self.softmax:
            weight = torch.softmax(weight - 1e9 * (~mask).double(), 1)
        return (weight[:, :, None] * keys).sum(1)

    def parameters(self, prefix: str) -> Parameters:
        return self.mlp.parameters(prefix) | self.out.parameters(f"{prefix}.out")


def pairs(vectors: Tensor, *, upper: bool, diagonal: bool = False) -> Tensor:
    """<z_i, z_j> of float64[n, F, dim], along rows of the lower triangle (j < i) or of the `upper` one. [n, F(F-1)/2]."""
    rows, columns = zip(*_triangle(vectors.shape[1], upper, diagonal), strict=True)
    return (vectors[:, list(rows)] * vectors[:, list(columns)]).sum(2)


def pairs_from(places: Sequence[int], *, upper: bool, diagonal: bool = False) -> list[int]:
    """For each of our pairs (j < i, along rows of the lower triangle), its place among a library's.

    Args:
        places: for each of our vectors, its place among the library's. upper: the library goes along the upper triangle.
        diagonal: <z_i, z_i> are among the pairs.
    """
    at = {frozenset(pair): k for k, pair in enumerate(_triangle(len(places), upper, diagonal))}
    return [at[frozenset((places[i], places[j]))] for i, j in _triangle(len(places), False, diagonal)]


def _triangle(count: int, upper: bool, diagonal: bool) -> list[tuple[int, int]]:
    own = int(diagonal)
    return [(i, j) for i in range(count) for j in (range(i + 1 - own, count) if upper else range(i + own))]


def _block_diagonal(blocks: Tensor) -> Tensor:
    """[E, r, r] -> [E r, E r]."""
    count, size, _ = blocks.shape
    out = torch.zeros(count, size, count, size, dtype=blocks.dtype)
    for e in range(count):
        out[e, :, e, :] = blocks[e]
    return out.reshape(count * size, count * size)


def factorization_machine(fields: Tensor) -> Tensor:
    """Sum of <v_i, v_j> over pairs, pair by pair; fields [n, F, dim] -> [n, 1]."""
    total = torch.zeros(len(fields), 1, dtype=torch.float64)
    for i in range(fields.shape[1]):
        for j in range(i):
            total += (fields[:, i] * fields[:, j]).sum(1, keepdim=True)
    return total


def _numbered(prefix: str, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Parameters:
    out: Parameters = {}
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        out |= {f"{prefix}.{i}.weight": w.float().contiguous(), f"{prefix}.{i}.bias": b.float().contiguous()}
    return out
