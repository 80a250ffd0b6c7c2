"""Folds batch normalisation, as it is in evaluation, into the linear layer beside it. Pure functions on tensors, in float64."""

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
    """Weight[out, in] and bias[out], float32, of one layer that does as x W^T + b and then `norm` [out] do.

    Raises:
        ValueError: `norm` is not as wide as the layer's output.
    """
    scale, shift = _of_width(norm, weight.shape[0], "output")
    before = torch.zeros_like(scale) if bias is None else bias.double()
    return (weight.double() * scale[:, None]).float(), (before * scale + shift).float()


def fold_before(norm: BatchNorm, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight[out, in] and bias[out], float32, of one layer that does as `norm` [in] and then x W^T + b do.

    Raises:
        ValueError: `norm` is not as wide as the layer's input.
    """
    scale, shift = _of_width(norm, weight.shape[1], "input")
    after = weight.double() @ shift + (0.0 if bias is None else bias.double())
    return (weight.double() * scale).float(), after.float()


def _of_width(norm: BatchNorm, width: int, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    if norm.mean.shape != (width,):
        raise ValueError(f"batch norm: got {tuple(norm.mean.shape)} means, expected {width}, as many as the layer's {what}")
    return norm.scale_and_shift()
