"""Layers as the source libraries have them, batch norm not yet folded: each gives our parameters, and its own forward.

`parameters` makes what the bundle stores; `__call__` computes float64 as the library's evaluation mode does, for golden rows
that owe nothing to our graphs. Knows no checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.errors import InputError

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class BatchNorm:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias, over [n, units]; weight and bias None: 1 and 0."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    epsilon: float

    def scale_shift(self) -> tuple[Tensor, Tensor]:
        """float64[units] twice: y = x * scale + shift."""
        scale = (self.variance.double() + self.epsilon).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -self.mean.double() * scale
        return scale, shift if self.bias is None else shift + self.bias.double()

    def __call__(self, x: Tensor) -> Tensor:
        scale, shift = self.scale_shift()
        return x * scale + shift


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """One of our activation kinds. `slope`: of PReLU and Dice, [1] or [units]; `norm`: Dice's."""

    kind: str
    slope: Tensor | None = None
    norm: BatchNorm | None = None

    def __call__(self, x: Tensor) -> Tensor:
        match self.kind:
            case "dice":
                assert self.norm is not None
                assert self.slope is not None
                p = torch.sigmoid(self.norm(x))
                return p * x + self.slope.double() * (1 - p) * x
            case "prelu":
                assert self.slope is not None
                return torch.where(x >= 0, x, self.slope.double() * x)
        return _PLAIN[self.kind](x)


_PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "leaky_relu": functional.leaky_relu,
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
        return self.activation(y if self.norm is None else self.norm(y))

    def folded(self) -> tuple[Tensor, Tensor]:
        """(weight, bias) as float64 with the batch norm inside."""
        weight = self.weight.double()
        bias = torch.zeros(len(weight), dtype=torch.float64) if self.bias is None else self.bias.double()
        if self.norm is None:
            return weight, bias
        scale, shift = self.norm.scale_shift()
        return weight * scale[:, None], bias * scale + shift

    def parameters(self, prefix: str) -> Parameters:
        weight, bias = self.folded()
        return {f"{prefix}.weight": weight.float(), f"{prefix}.bias": bias.float()}


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

    def parameters(self, prefix: str) -> Parameters:
        out: Parameters = {}
        for i, layer in enumerate(self.layers):
            out |= layer.parameters(f"{prefix}.{i}")
        return out


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
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l (DCN-V2). weights: [D, D], biases: [D] a layer."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def __call__(self, x0: Tensor) -> Tensor:
        x = x0
        for w, b in zip(self.weights, self.biases, strict=True):
            x = x0 * (x @ w.double().T + b.double()) + x
        return x

    def parameters(self, prefix: str) -> Parameters:
        return _numbered(prefix, self.weights, self.biases)


def factorization_machine(fields: Tensor) -> Tensor:
    """Sum of <v_i, v_j> over pairs, pair by pair; fields [n, F, dim] -> [n, 1]."""
    total = torch.zeros(len(fields), 1, dtype=torch.float64)
    for i in range(fields.shape[1]):
        for j in range(i):
            total += (fields[:, i] * fields[:, j]).sum(1, keepdim=True)
    return total


def one_activation(activations: Sequence[Activation], where: str) -> Any:
    """The kind that all layers share.

    Raises:
        InputError: they differ, which our models cannot express.
    """
    kinds = sorted({a.kind for a in activations})
    if len(kinds) > 1:
        raise InputError(where, kinds, "the same activation in every layer")
    return kinds[0] if kinds else "relu"


def _numbered(prefix: str, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Parameters:
    out: Parameters = {}
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        out |= {f"{prefix}.{i}.weight": w.float().contiguous(), f"{prefix}.{i}.bias": b.float().contiguous()}
    return out
