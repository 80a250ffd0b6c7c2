"""Layers on a CPU: linear ones with weights packed once for oneDNN, DCN's cross network in one pass, the head. Each has its
plain twin in `reference`. Knows no graph.
"""

import platform
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels import reference

_ATTRIBUTES = {"identity": "none", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}


def has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512-BF16 or AMX); others only emulate it, slower than float32."""
    return _packs() and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _packs() -> bool:
    """oneDNN's prepacked products exist in every torch for x86 so far, but are no public interface."""
    ops = torch.ops.mkldnn
    x86 = platform.machine() in ("x86_64", "AMD64") and torch._C._has_mkldnn
    return x86 and all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


class Linear:
    """activation(x W^T + b) for x[rows, in] of `dtype`, weight [out, in], bias [out] or None.

    Measured on two Zen 4 cores. Many rows: oneDNN with packed weights and the activation fused 220 GFLOP/s, MKL (torch.addmm)
    185, and for 8 rows half of MKL's time. One row reads 2.6 MB of weights (624 x 1024) from the L3 in 31 us with a batch of
    smaller products, which MKL spreads over the cores; the same as one product, which it does not, takes 53 us; oneDNN 45 to
    95. So a single row is multiplied in float32 whatever the precision.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        dtype: torch.dtype,
        params: Sequence[torch.Tensor] = (),
        slope: float = 0.0,
    ) -> None:
        out, width = weight.shape
        slices = next(n for n in (16, 8, 4, 2, 1) if out % n == 0)
        self._slices = weight.float().view(slices, out // slices, width).transpose(1, 2)
        self._slice_bias = (torch.zeros(out) if bias is None else bias.float()).view(slices, 1, -1)
        self._weight, self._bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self._dtype, self._fused = dtype, _ATTRIBUTES.get(activation)
        self._activate = partial(reference.activate_, activation=activation, params=params, slope=slope)
        self._product: Callable[[torch.Tensor], torch.Tensor] | None = None
        if _packs():
            packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)
            run = torch.ops.mkldnn._linear_pointwise.default
            self._product = lambda x: run(x, packed, self._bias, self._fused or "none", [], "")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """dtype[rows, out] (float32 for a single row)."""
        if x.shape[0] == 1:
            one = x.float().view(1, 1, -1).expand(len(self._slices), 1, -1)
            return self._activate(torch.baddbmm(self._slice_bias, one, self._slices).view(1, -1))
        if self._product is None:
            return self._activate(reference.linear(x.to(self._dtype), self._weight, self._bias, "identity"))
        y = self._product(x.to(self._dtype))
        return y if self._fused else self._activate(y)


class CrossV1:
    """DCN's cross network folded into one pass over x0, as `interaction.CrossV1`: x_l = a_l x_0 + c_l, where
    a_{l+1} = a_l (1 + x_0^T w_l) + c_l^T w_l.

    Args:
        weights, biases: [layers, width]. head: [tasks, width] if only its share of the scores is wanted, else None.
    """

    def __init__(self, weights: torch.Tensor, biases: torch.Tensor, head: torch.Tensor | None) -> None:
        w, b = weights.double(), biases.double()
        self._layers = len(w)
        c = torch.cat([torch.zeros_like(b[:1]), b.cumsum(0)])  # c_0 .. c_L
        self._k = (c[:-1] * w).sum(1).float().unbind()
        self._c = (c[-1] if head is None else head.double() @ c[-1]).float()
        self._weights = weights if head is None else torch.cat([weights, head])
        self._ones = (torch.arange(len(self._weights)) < self._layers).float()[:, None]
        self._head = head is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x_L float32[rows, width], or x_L head^T float32[rows, tasks]."""
        x = x.float()
        dots = torch.addmm(self._ones, self._weights, x.t())  # 1 + x_0^T w_l, by layer: [layers, rows]
        a, *later = dots[: self._layers].unbind()
        for k, dot in zip(self._k[1:], later, strict=True):
            a = torch.addcmul(k, a, dot)
        return torch.addcmul(self._c, a[:, None], dots[self._layers :].t() if self._head else x)


class Head:
    """sigmoid(sum_p part_p W[:, first_p : last_p]^T + b + sum(logits)), in float32.

    Args:
        columns: of each part its first column of the weight and its width.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, columns: Sequence[tuple[int, int]]) -> None:
        self._shares = [weight[:, first : first + width].t() for first, width in columns]
        self._bias = bias

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        """float32[rows, tasks]; the parts first, then the logits."""
        z = self._bias
        for part, share in zip(values, self._shares, strict=False):
            z = torch.addmm(z, part.float(), share)
        for logit in values[len(self._shares) :]:
            z = z + logit
        return z.sigmoid_()
