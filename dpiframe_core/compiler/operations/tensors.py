"""What is asked of tensors of either kind, values and constants alike."""

import torch

from dpiframe_core.compiler.operations.emit import Const, Emitter, Tensor
from dpiframe_core.compiler.operations.strided import Strided, permuted, unsqueezed


def sizes_of(t: Tensor) -> list[int]:
    """Of each dimension, the rows of the batch not counted."""
    if isinstance(t, Strided):
        return [t.size(d) for d in range(t.rank)]
    return [1 if d == t.batch_dim else n for d, n in enumerate(t.tensor.shape)]


def widened(t: Tensor, at: int) -> Tensor:
    """With a dimension of size 1 more."""
    if isinstance(t, Strided):
        return unsqueezed(t, at)
    batch = t.batch_dim
    return Const(t.tensor.unsqueeze(at), None, batch if batch is None or batch < at else batch + 1)


def part(e: Emitter, t: Tensor, dim: int, start: int, size: int) -> Tensor:
    """So many elements of a dimension."""
    if size == sizes_of(t)[dim]:
        return t
    return (
        e.sliced(t, dim, start, size) if isinstance(t, Strided) else Const(t.tensor.narrow(dim, start, size), None, t.batch_dim)
    )


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions change places."""
    if isinstance(t, Strided):
        return permuted(t, [*range(t.rank - 2), t.rank - 1, t.rank - 2])
    return Const(t.tensor.mT, None, t.batch_dim)


def scaled(e: Emitter, t: Tensor, factor: float) -> Tensor:
    """Times a number."""
    if isinstance(t, Strided):
        return e.elementwise("aten.mul.Scalar", [t], [factor])
    return Const(torch.mul(t.tensor, factor), None, t.batch_dim)
