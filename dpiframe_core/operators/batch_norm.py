"""Folds batch normalisation, as it is in evaluation, into the linear layer ahead of it. Pure functions, in float64."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class BatchNorm:
    """BatchNorm1d in evaluation: y = (x - mean) / sqrt(variance + eps) * weight + bias, each [w].

    weight, bias: None where it is not affine.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def scale_and_shift(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64[w] each: y = x * scale + shift. What Dice wants as `scale` and `shift`, once rounded."""
        scale = (self.variance.double() + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight.double()
        shift = -self.mean.double() * scale
        return scale, shift if self.bias is None else shift + self.bias.double()


def fold_after(weight: torch.Tensor, bias: torch.Tensor | None, norm: BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight[out, in] and bias[out], float64, of one layer that does as x W^T + b and then `norm` [out] do.

    Raises:
        ValueError: `norm` is not as wide as the layer's output.
    """
    if norm.mean.shape != (len(weight),):
        raise ValueError(
            f"batch norm: got {tuple(norm.mean.shape)} means, expected {len(weight)}, as many as the layer's output"
        )
    scale, shift = norm.scale_and_shift()
    before = torch.zeros_like(scale) if bias is None else bias.double()
    return weight.double() * scale[:, None], before * scale + shift
