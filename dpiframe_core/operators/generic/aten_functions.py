"""What the operators of `aten` compute: a closed table from name to torch function, and a call bound to its parameters.

Nothing here waits for a device or depends on what values hold, so that it can be captured; rows never meet (`aten` says why).
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch.nn import functional

from dpiframe_core.graph.aten import AtenCall, Window, contiguous
from dpiframe_core.graph.aten_rules import Plain
from dpiframe_core.operators.generic.bound_calls import Call, bound_call
from dpiframe_core.operators.generic.windows import window

Function = Callable[..., torch.Tensor]
_COPIED = 1 << 14  # numbers of a product's factor, that cost less to copy than another product


def _cat(*operands_and_dim: torch.Tensor | int) -> torch.Tensor:
    *parts, dim = operands_and_dim
    return torch.cat(parts, dim)  # type: ignore[arg-type]


def _einsum(*operands_and_equation: torch.Tensor | str) -> torch.Tensor:
    *operands, equation = operands_and_equation
    found: torch.Tensor = torch.einsum(equation, *operands)
    return found


def _layer_norm(x: torch.Tensor, *rest: torch.Tensor | float) -> torch.Tensor:
    *affine, count, eps = rest
    return functional.layer_norm(x, x.shape[-int(count) :], *affine[:2], eps=float(eps))  # type: ignore


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of a[rows, n, 1, k] and b[n, k, m] torch would copy b for each row; n products on a CPU write where they belong."""
    apart = a.dim() == 4 and b.dim() == 3 and a.shape[1:3] == (len(b), 1) and a.device.type == "cpu"
    if not apart or len(a) * b.shape[1] * b.shape[2] < _COPIED:
        return torch.matmul(a, b)
    out = a.new_empty(len(a), len(b), 1, b.shape[2])
    for i, factor in enumerate(b):
        torch.mm(a[:, i, 0], factor, out=out[:, i, 0])
    return out


def _take_along_dim(x: torch.Tensor, index: torch.Tensor, dim: int, from_the_end: bool) -> torch.Tensor:
    """NaN where there is no such position, for which torch raises: a score of it is refused, another element would pass."""
    count = x.shape[dim]
    index = torch.where(index < 0, index + count, index) if from_the_end else index
    nearest = index.long().clamp(0, count - 1)  # also of NaN, for which devices have different integers
    return torch.where(nearest == index, torch.take_along_dim(x, nearest, dim), torch.nan)


def _prod(x: torch.Tensor, dims: tuple[int, ...], keepdim: bool) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):  # torch takes one at a time
        x = torch.prod(x, dim, keepdim)
    return x


def _topk(x: torch.Tensor, dim: int, k: int, largest: bool, in_order: bool) -> "torch.return_types.topk":
    return torch.topk(x, k, dim, largest, in_order)


def _sort(x: torch.Tensor, dim: int, descending: bool) -> "torch.return_types.sort":
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(condition != 0, a, b)


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where(mask != 0, value, x)


_SAME = "abs neg exp expm1 log log1p log2 sqrt rsqrt reciprocal square sigmoid tanh sin cos erf sign floor ceil"
_SAME += " atan round trunc log10 exp2 sinh cosh tan asin acos asinh acosh atanh erfc fmod remainder"
_SAME += " add sub mul div maximum minimum pow atan2 clamp sum mean amax amin matmul"
_SAME_ONLY = "relu logical_not eq ne gt ge lt le logical_and logical_or logical_xor"
_SAME_ONLY += " logsumexp softmax log_softmax cumsum cumprod index_select"
_OF_FUNCTIONAL = "silu mish hardswish hardsigmoid leaky_relu softplus linear"

# Those whose result may be written straight into a strided buffer.
WRITES: dict[str, Function] = {
    **{f"aten.{name}": getattr(torch, name) for name in _SAME.split()},
    **{f"aten.{name}.Scalar": getattr(torch, name) for name in ["add", "sub", "mul", "div", "pow", "fmod", "remainder"]},
}

FUNCTIONS: dict[str, Function] = {
    **WRITES,
    **{f"aten.{name}": getattr(torch, name) for name in _SAME_ONLY.split()},
    **{f"aten.{name}.Scalar": getattr(torch, name) for name in ["eq", "ne", "gt", "ge", "lt", "le"]},
    **{f"aten.{name}": getattr(functional, name) for name in _OF_FUNCTIONAL.split()},
    **{f"aten.floor_divide{how}": lambda x, y: torch.div(x, y, rounding_mode="floor") for how in ("", ".Scalar")},
    **{f"aten.trunc_divide{how}": lambda x, y: torch.div(x, y, rounding_mode="trunc") for how in ("", ".Scalar")},
    "aten.prod": _prod,
    "aten.argmax": lambda x, dims, keepdim: torch.argmax(x, dims[0], keepdim),
    "aten.argmin": lambda x, dims, keepdim: torch.argmin(x, dims[0], keepdim),
    "aten.log_sigmoid": functional.logsigmoid,
    "aten.clone": lambda x: x,
    "aten.prelu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "aten.rsub.Scalar": lambda x, n: n - x,
    "aten.rpow.Scalar": lambda x, n: torch.pow(n, x),
    "aten.elu": lambda x, alpha, scale, of_input: torch.where(x > 0, x * scale, (x * of_input).expm1() * (alpha * scale)),
    "aten.gelu": lambda x, by_tanh: functional.gelu(x, approximate="tanh" if by_tanh else "none"),
    "aten.where": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.linalg_vector_norm": lambda x, dims, keepdim, order: torch.linalg.vector_norm(x, order, dims, keepdim),
    "aten.var": lambda x, dims, keepdim, correction: torch.var(x, dims, correction=correction, keepdim=keepdim),
    "aten.layer_norm": _layer_norm,
    "aten.cat": _cat,
    "aten.matmul": _matmul,
    "aten.einsum": _einsum,
    "aten.take_along_dim": _take_along_dim,
    "aten.topk": lambda *call: _topk(*call).values,
    "aten.topk.positions": lambda *call: _topk(*call).indices,
    "aten.sort": lambda *call: _sort(*call).values,
    "aten.sort.positions": lambda *call: _sort(*call).indices,
}


class AtenOperator:
    """One call bound to its parameters, on their device. Safe to use from several threads and streams.

    Args:
        params: the node's, float32, in its order.
        dtype: of the operands.
        one_view: a window is made by one call, and not by those that tell a compiler what is read (`windows`).
    """

    def __init__(
        self,
        call: AtenCall,
        params: Sequence[torch.Tensor],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        one_view: bool = False,
    ) -> None:
        self._call, self._dtype, self._one_view = call, dtype, one_view
        self._params = [p.to(device, dtype).contiguous() for p in params]
        # A tensor from here on: to make one of a tuple would be a copy from the host in every call.
        self._args = [_argument(a, device if call.op == "aten.index_select" else None) for a in call.args]
        self._writes = WRITES.get(call.op)
        self._function = FUNCTIONS[call.op]
        self._whole = [_in_order(o) if isinstance(o, Window) else 0 for o in call.operands]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32[B, product of sizes] from the node's inputs, any float[B, >= width] with columns side by side."""
        return self._function(*self._operands(inputs), *self._args).float().reshape(len(inputs[0]), -1)

    def into(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """The same, written into the first columns of `out`, any float dtype."""
        sizes = self._call.sizes
        target = window(out, sizes, contiguous(sizes))
        if self._writes and out.dtype == torch.float32:
            self._writes(*self._operands(inputs), *self._args, out=target)
        else:
            target.copy_(self._function(*self._operands(inputs), *self._args))

    def bound(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> Call:
        """The same, to be called many times: of inputs and of `out`, float32[rows, width], that stay where they are."""
        target = out.view(len(out), *self._call.sizes)
        return bound_call(self._call, self._function, self._writes, self._operands(inputs), self._args, target)

    def _operands(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows = len(inputs[0])
        operands = []
        for operand, count in zip(self._call.operands, self._whole, strict=True):
            if isinstance(operand, Window):
                x = inputs[operand.value]
                if count == x.shape[1] and x.is_contiguous():
                    found = x if len(operand.sizes) == 1 else x.view(rows, *operand.sizes)
                elif self._one_view and x.stride(1) == 1:
                    strides, offset = (x.stride(0), *operand.strides), x.storage_offset() + operand.offset
                    found = x.as_strided((rows, *operand.sizes), strides, offset)
                else:
                    found = window(x, operand.sizes, operand.strides, operand.offset)
                found = found if found.dtype == self._dtype else found.to(self._dtype)
            else:
                found = self._params[operand.param]
                if self._call.op in ("aten.cat", "aten.take_along_dim"):
                    found = found.expand(rows, *found.shape)
            operands.append(found)
        return operands


def _in_order(w: Window) -> int:
    """How many columns a window has, if it is the first ones in order; else 0. A value of so many is all that is read."""
    along = zip(w.sizes, w.strides, contiguous(w.sizes), strict=True)
    return prod(w.sizes) if not w.offset and all(n == 1 or stride == own for n, stride, own in along) else 0


def _argument(value: Plain, indices_on: torch.device | None) -> object:
    if isinstance(value, tuple) and indices_on is not None:
        return torch.tensor(value, device=indices_on)
    return float(value) if value in ("inf", "-inf") else value
