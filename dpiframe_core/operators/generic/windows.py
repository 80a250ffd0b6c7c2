"""Strided views of a value's rows (`graph.aten.Window`), as slices, reshapes and `unfold`: of such a compiler knows what is
read, where it takes `as_strided` for an access of a whole buffer, and gives up at the offset of a storage.
"""

import torch

from dpiframe_core.graph.aten_rules import Shape


def window(values: torch.Tensor, sizes: Shape, strides: Shape, offset: int = 0) -> torch.Tensor:
    """A view [rows, *sizes] of values [rows, width]: element (i, j, ..) is column offset + i strides[0] + j strides[1] + ..

    Where columns do not lie side by side, of a copy.
    """
    if values.shape[1] > 1 and values.stride(1) != 1:  # a result that some product left transposed
        values = values.contiguous()
    apart = sorted((d for d in range(len(sizes)) if sizes[d] > 1 and strides[d] > 0), key=lambda d: -strides[d])
    runs = [sizes[d] for d in apart], [strides[d] for d in apart]
    found = _sliced(values, *runs, offset)
    found = _unfolded(values, *runs, offset) if found is None else found
    found = found.permute(0, *(1 + apart.index(d) for d in sorted(apart)))
    for d in range(len(sizes)):
        if d not in apart:
            found = found.unsqueeze(1 + d)
    return found.expand(-1, *sizes)


def _unfolded(values: torch.Tensor, sizes: list[int], strides: list[int], offset: int) -> torch.Tensor:
    """The same of any strides, as those of a convolution's windows, which overlap."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    values = values.narrow(-1, offset, span)
    for size, stride in zip(sizes, strides, strict=True):
        span -= (size - 1) * stride
        values = values.unfold(-1, span, stride)
    return values.squeeze(-1)


def _sliced(values: torch.Tensor, sizes: list[int], strides: list[int], offset: int) -> torch.Tensor | None:
    """The same by falling strides, all more than 0; None where it is no slice of a row divided into equal parts."""
    if 1 in strides[:-1]:
        return None
    for size, stride in zip(sizes, strides, strict=True):
        first, offset = divmod(offset, stride) if stride > 1 else (offset, 0)
        if (first + size) * stride > values.shape[-1]:
            return None
        values = values.narrow(-1, first * stride, size * stride)
        if stride > 1:
            values = values.view(*values.shape[:-1], size, stride)
    return values if strides and strides[-1] == 1 else values.select(-1, offset)
