"""Layers as the source libraries have them, batch norm not yet folded: each gives our parameters, and its own forward.

`parameters` makes what the bundle stores; `__call__` computes float64 as the library's evaluation mode does, for golden rows
that owe nothing to our graphs. Knows no checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.graph.architecture import Activation as ActivationKind
from dpiframe_core.graph.architecture import Activations, LeakyReLU
from dpiframe_core.operators.batch_norm import BatchNorm, fold_after

Parameters = dict[str, Tensor]


def normed(norm: BatchNorm | None, x: Tensor) -> Tensor:
    """Batch norm as in evaluation; x itself without one."""
    if norm is None:
        return x
    scale, shift = norm.scale_and_shift()
    return x * scale + shift


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """An activation and what it has learned. `alpha`: of PReLU and Dice, [1] or [units]; `norm`: Dice's."""

    kind: ActivationKind
    alpha: Tensor | None = None
    norm: BatchNorm | None = None

    def __call__(self, x: Tensor) -> Tensor:
        alpha = torch.zeros(1) if self.alpha is None else self.alpha.double()
        if isinstance(self.kind, LeakyReLU):
            return torch.where(x >= 0, x, self.kind.slope * x)
        if self.kind == "prelu":
            return torch.where(x >= 0, x, alpha * x)
        if self.kind == "dice":
            p = torch.sigmoid(normed(self.norm, x))
            return p * x + alpha * (1 - p) * x
        return _PLAIN[self.kind](x)

    def parameters(self, prefix: str, units: int) -> Parameters:
        out: Parameters = {}
        if self.alpha is not None:
            out[f"{prefix}.alpha"] = self.alpha.float().reshape(-1).expand(units).contiguous()
        if self.kind == "dice" and self.norm is not None:
            scale, shift = self.norm.scale_and_shift()
            out |= {f"{prefix}.scale": scale.float(), f"{prefix}.shift": shift.float()}
        return out


_PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """activation(norm(W x + b)). weight: [out, in]."""

    weight: Tensor
    bias: Tensor | None
    norm: BatchNorm | None = None
    activation: Activation = field(default_factory=lambda: Activation("identity"))

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight.double(), None if self.bias is None else self.bias.double())
        return self.activation(normed(self.norm, y))

    def folded(self) -> tuple[Tensor, Tensor]:
        """(weight, bias) as float64 with the batch norm inside."""
        if self.norm is not None:
            return fold_after(self.weight, self.bias, self.norm)
        bias = torch.zeros(len(self.weight)) if self.bias is None else self.bias
        return self.weight.double(), bias.double()

    def parameters(self, prefix: str) -> Parameters:
        weight, bias = self.folded()
        own = self.activation.parameters(prefix, len(weight))
        return {f"{prefix}.weight": weight.float().contiguous(), f"{prefix}.bias": bias.float()} | own


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """Linear layers one after the other."""

    layers: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(len(layer.weight) for layer in self.layers)

    @property
    def activations(self) -> Activations:
        """As an architecture takes them: one, if all are the same."""
        kinds = tuple(layer.activation.kind for layer in self.layers)
        return kinds[0] if len(set(map(repr, kinds))) == 1 else kinds or "relu"

    def parameters(self, prefix: str) -> Parameters:
        out: Parameters = {}
        for i, layer in enumerate(self.layers):
            out |= layer.parameters(f"{prefix}.{i}")
        return out


def with_columns(mlp: Mlp, head: Linear, columns: Sequence[int]) -> tuple[Mlp, Linear]:
    """The same on inputs in another order: column k of the new order is column `columns[k]` of the old."""
    if not mlp.layers:
        return mlp, replace(head, weight=head.weight[:, list(columns)])
    first = replace(mlp.layers[0], weight=mlp.layers[0].weight[:, list(columns)])
    return Mlp((first, *mlp.layers[1:])), head


def spread(mlp: Mlp, head: Linear, columns: Sequence[int], width: int) -> tuple[Mlp, Linear]:
    """The same on wider inputs, of which it reads the `columns` alone: weights of the others are zero."""

    def wider(layer: Linear) -> Linear:
        weight = layer.weight.new_zeros(len(layer.weight), width)
        weight[:, list(columns)] = layer.weight
        return replace(layer, weight=weight)

    if not mlp.layers:
        return mlp, wider(head)
    return Mlp((wider(mlp.layers[0]), *mlp.layers[1:])), head


def side_by_side(heads: Sequence[Linear]) -> Linear:
    """One linear layer on the joined inputs of several, for the sum of their outputs."""
    folded = [head.folded() for head in heads]
    return Linear(torch.cat([weight for weight, _ in folded], 1), torch.stack([bias for _, bias in folded]).sum(0))
