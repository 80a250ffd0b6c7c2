"""What a wave is made of (see `wave`): its jobs with their weights, and what they read and write in one launch. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ACTIVATIONS = ("identity", "relu", "sigmoid", "tanh")  # of a linear job; the kernels know them by their place


@dataclass(frozen=True, slots=True, eq=False)
class LinearJob:
    """activation(x W^T + b), or with `cross` x0 * (x W^T + b) + x. weight[out, in], bias[out]; head[tasks, out]: the head's
    weights for this value, if the head reads it within this wave; kept: whether anything else reads it.

    *_scale, for fp8: a value is what lies in memory times its scale.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str = "identity"
    cross: bool = False
    head: torch.Tensor | None = None
    kept: bool = True
    x_scale: float = 1.0
    x0_scale: float = 1.0
    out_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class FmJob:
    """Factorization machine over x[:, offset : offset + fields * dim]."""

    offset: int
    fields: int
    dim: int
    x_scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CrossJob:
    """DCN's folded cross network dotted with the head's weights: weights[layers + tasks, width], k[layers + tasks]."""

    weights: torch.Tensor
    k: torch.Tensor
    layers: int


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Of one job: x, a cross layer's first input x0, and out (None if only the head reads it)."""

    x: torch.Tensor
    out: torch.Tensor | None
    x0: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadOperands:
    """What the head behind a wave reads and writes.

    Attributes:
        logits: float32[rows, 1 or tasks], at most 3, complete before the wave starts. scores: float32[rows, tasks], pinned.
        done: int32[>= rows / 8], pinned: gets the batch number for every 8 rows (common.cuh, announce).
        partial: float32 scratch of the device, at least rows * column tiles * tasks. arrived: int32 zeros, one a 16 rows.
    """

    logits: Sequence[torch.Tensor]
    scores: torch.Tensor
    done: torch.Tensor
    partial: torch.Tensor
    arrived: torch.Tensor
