"""Float tables to int8 with a scale for each column. Pure functions on tensors, which may be memory-mapped: they go by parts.

The scale is a column's largest magnitude / 127. On the demo model's trained tables a clipping one, of the least squared error,
has 1.4 % less RMS error and up to ten times the largest error; one scale for a whole table has 1.6 times the RMS error.
"""

import torch

_PART = 1 << 16  # rows


def quantize(weight: torch.Tensor, part_rows: int = _PART) -> tuple[torch.Tensor, torch.Tensor]:
    """int8[rows, dim] in -127 to 127 and float32[dim], above 0: value = int8 * scale, off by at most half a scale."""
    largest = torch.stack([part.float().abs().amax(0) for part in torch.split(weight, part_rows)]).amax(0)
    scale = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
    stored = torch.empty_like(weight, dtype=torch.int8)
    for part, out in zip(torch.split(weight, part_rows), torch.split(stored, part_rows), strict=True):
        out.copy_((part.float() / scale).round_().clamp_(-127, 127))
    return stored, scale


def largest_error(weight: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor | None) -> float:
    """The largest |value of weight - value of stored|."""
    worst = 0.0
    for part, own in zip(torch.split(weight, _PART), torch.split(stored, _PART), strict=True):
        value = own.float() if scale is None else own.float() * scale
        worst = max(worst, float((part.float() - value).abs().max()))
    return worst
