"""Layers that several models share. x is [n, width], fields are [n, fields, dim] unless a line says otherwise."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.errors import InputError
from dpiframe_core.importers.networks.net import Net

_DICE_EPSILON = 1e-9  # of FuxiCTR's Dice
_MASKED = -1e9  # what FuxiCTR writes where attention must not look

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "identity": lambda x: x, "linear": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh, "softmax": lambda x: x.softmax(-1), "leakyrelu": lambda x: functional.leaky_relu(x, 0.01),
    "gelu": functional.gelu, "silu": functional.silu, "elu": functional.elu, "selu": functional.selu, "mish": functional.mish,
    "softplus": functional.softplus, "relu6": functional.relu6, "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid, "logsigmoid": functional.logsigmoid, "softsign": lambda x: x / (1 + x.abs()),
}  # fmt: skip
_WITH_PARAMETERS = ("dice", "prelu")


def activation(m: Net, given: object, x: Tensor, key: str) -> Tensor:
    """An activation without parameters, by the name that torch.nn gives its class; `key`: the setting, for errors."""
    name = str(given or "none").lower()
    if name not in _PLAIN:
        raise InputError(f"{m.where}: {key}", given, f"one of {', '.join((*_PLAIN, *_WITH_PARAMETERS))}")
    return _PLAIN[name](x)


def mlp(
    m: Net, prefix: str, x: Tensor, key: str, default: object = "ReLU", *, output: bool = True, last: object = None
) -> Tensor:
    """FuxiCTR's MLP_Block, layer by layer as the checkpoint numbers them: linear, batch norm, activation (Dice and PReLU, too).

    Args:
        key: the setting with the hidden activations, one name or a list; `default`: the constructor's.
        output: whether the last linear layer ends the block, with the activation `last` in place of the hidden ones.
    """
    return stack(m, f"{prefix}.mlp", x, m.setting(key, default, str, list, type(None)), key, output=output, last=last)


def stack(m: Net, prefix: str, x: Tensor, given: object, key: str, *, output: bool, last: object = None) -> Tensor:
    """As `mlp`, of an nn.Sequential at `prefix` whose hidden activations are `given`."""
    children = [f"{prefix}.{i}" for i in m.children(prefix)]
    layers = [c for c in children if _is_linear(m, c)]
    hidden = layers[:-1] if output else layers
    names = given if isinstance(given, list) else [given] * len(hidden)
    if len(names) != len(hidden):
        raise InputError(f"{m.where}: {key}", given, f"one activation for each of {len(hidden)} layers")
    waiting: object = None
    for child in children:
        if _is_linear(m, child):
            x = m.linear(child, activation(m, waiting, x, key))
            waiting = names[hidden.index(child)] if child in hidden else None
        elif m.has(f"{child}.running_mean"):
            x = m.batch_norm(child, x)
        elif m.has(f"{child}.alpha"):
            x, waiting = dice(m, child, x), None
        elif m.has(f"{child}.bias"):
            x = m.layer_norm(child, x)
        else:
            x, waiting = functional.prelu(x, m.parameter(f"{child}.weight")), None
    return activation(m, last, activation(m, waiting, x, key), key)


def activations(m: Net, key: str, count: int, default: object = "ReLU") -> list[object]:
    """A setting that names one activation for `count` layers, or a list of them."""
    given = m.setting(key, default, str, list, type(None))
    return given if isinstance(given, list) else [given] * count


def _is_linear(m: Net, name: str) -> bool:
    return m.has(f"{name}.weight") and m.peek(f"{name}.weight").ndim == 2


def dice(m: Net, name: str, x: Tensor) -> Tensor:
    """p x + alpha (1 - p) x with p = sigmoid of x normalised (Zhou et al. 2018, eq. 3); along the last dimension."""
    mean, variance = m.parameter(f"{name}.bn.running_mean"), m.parameter(f"{name}.bn.running_var")
    p = torch.sigmoid((x - mean) * torch.rsqrt(variance + _DICE_EPSILON))
    return p * x + m.parameter(f"{name}.alpha") * (1 - p) * x


def pairs_of(count: int) -> tuple[list[int], list[int]]:
    """The two sides of all pairs i < j, in the order of an upper triangle's rows."""
    left, right = zip(*combinations(range(count), 2), strict=True)
    return list(left), list(right)


def pair_products(fields: Tensor) -> Tensor:
    """[n, pairs, dim]: v_i * v_j for i < j."""
    left, right = pairs_of(fields.shape[1])
    return fields[:, left] * fields[:, right]


def inner_products(fields: Tensor) -> Tensor:
    """[n, pairs]: <v_i, v_j> for i < j."""
    count = fields.shape[1]
    dots = torch.matmul(fields, fields.transpose(1, 2)).flatten(1)
    return dots[:, [i * count + j for i, j in combinations(range(count), 2)]]


def bi_interaction(fields: Tensor) -> Tensor:
    """[n, dim]: the sum of all v_i * v_j, as 1/2 ((sum v)^2 - sum v^2) (He & Chua 2017, eq. 4)."""
    return 0.5 * (fields.sum(1) ** 2 - (fields**2).sum(1))


def pair_sum(fields: Tensor) -> Tensor:
    """[n, 1]: the sum of all <v_i, v_j> (Rendle 2010)."""
    return bi_interaction(fields).sum(1, keepdim=True)


def symmetric_sums(fields: Tensor, order: int) -> list[Tensor]:
    """[n, dim] for each size from 1 to `order`: the sum over all sets of so many fields of their product, e_k.

    By Newton's identities, k e_k = sum over i of (-1)^(i - 1) e_(k - i) p_i, from the power sums p_i.
    """
    powers = [fields]
    for _ in range(order - 1):
        powers.append(powers[-1] * fields)
    sums = [p.sum(1) for p in powers]
    out: list[Tensor] = []
    for k in range(1, order + 1):
        total = sums[k - 1] if k % 2 else -sums[k - 1]
        for i in range(1, k):
            term = out[k - i - 1] * sums[i - 1]
            total = total + term if i % 2 else total - term
        out.append(total / k)
    return out


def cross(m: Net, name: str, x0: Tensor, x: Tensor) -> Tensor:
    """x0 (w x) + b: one cross layer of DCN without its residual."""
    return m.linear(f"{name}.weight", x) * x0 + m.parameter(f"{name}.bias")


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / scale) v along the last two dimensions; `mask`: true where attention may look."""
    scores = query @ key.transpose(-1, -2)
    scores = scores if scale is None else scores / scale
    if mask is not None:
        scores = scores.masked_fill(~mask, _MASKED)
    return scores.softmax(-1) @ value


def heads(x: Tensor, count: int) -> Tensor:
    """[n, length, count * d] -> [n, count, length, d]."""
    return torch.unflatten(x, -1, (count, -1)).transpose(1, 2)


def unheads(x: Tensor) -> Tensor:
    """[n, count, length, d] -> [n, length, count * d]."""
    return x.transpose(1, 2).flatten(2)


def weighted_sum(m: Net, prefix: str, x: Tensor) -> Tensor:
    """[n, dim] of [n, items, dim]: attention by a hidden ReLU layer, h^T relu(W x + b) (Xiao et al. 2017, eq. 5)."""
    scores = m.linear(f"{prefix}.2", torch.relu(m.linear(f"{prefix}.0", x)))
    return (scores.softmax(1) * x).sum(1)
