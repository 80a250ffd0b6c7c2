"""Layers on a CPU: linear ones with weights packed once for oneDNN, DCN's cross network in one pass, the head. Each has its
plain twin in `reference`. Knows no graph.
"""

import ctypes
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch

from kernels import reference
from kernels.cpu.openmp_pool import pool_arguments
from kernels.runtime.c_build import cpu_library

_FM_DIM = 256  # of dense.c
_LANES, _WIDEST = 16, 512  # of layers.c
_SERIES_PRODUCTS = 1 << 21  # up to which it takes less time than libraries
_NARROW, _SMALL = 1 << 13, 1 << 16  # products of a row, see `Layers.most`
_FEW_ROWS, _SMALL_WEIGHT, _FEW_PRODUCTS = 128, 1 << 18, 1 << 20  # up to which MKL multiplies; the first on Intel's processors
_ATTRIBUTES = {"identity": "none", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
_IN_PLACE = {"relu": torch.relu_, "sigmoid": torch.sigmoid_, "tanh": torch.tanh_}


def has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512-BF16 or AMX); others only emulate it, slower than float32."""
    return _packs() and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _packs() -> bool:
    """oneDNN's prepacked products exist in every torch for x86 so far, but are no public interface."""
    ops = torch.ops.mkldnn
    x86 = platform.machine() in ("x86_64", "AMD64") and torch._C._has_mkldnn
    return x86 and all(hasattr(ops, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))


def few_rows(numbers: int) -> int:
    """Rows up to which MKL multiplies a float32 weight of so many numbers."""
    return max(_FEW_ROWS if _is_intel() else 1, _FEW_PRODUCTS // numbers) if numbers <= _SMALL_WEIGHT else 1


@cache
def _is_intel() -> bool:
    """MKL takes twice the time on others (two Zen 5 cores, 64 rows of 512 x 512: 203 us, oneDNN 85)."""
    with suppress(OSError):
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    return False


class Linear:
    """activation(x W^T + b) for x[rows, in] of `dtype`, weight [out, in], bias [out] or None.

    Measured on two Zen 4 cores. Many rows: oneDNN with packed weights and the activation fused 220 GFLOP/s, MKL (torch.addmm)
    185. One row reads 2.6 MB of weights (624 x 1024) from the L3 in 31 us with a batch of smaller products, which MKL spreads
    over the cores; the same as one product, which it does not, takes 53 us; oneDNN 45 to 95. So a single row is multiplied in
    float32; weights of bfloat16 are read as such where dense.c could be built (two Sapphire Rapids cores: 39 us, float32
    58, oneDNN in bfloat16 73). Few rows, 2.6 MB: oneDNN half of MKL's time for 8 rows. But a call of it costs 14 us more: for
    at most 1 MB of weights MKL is ahead, these laid out [in, out] (one Sapphire Rapids core, 256 x 128: 9 us for 16 rows, 24 by
    oneDNN; 48 and 63 for 128), and from some 200 rows on behind. Up to a million products it is ahead whatever the rows (one
    Zen 4 core, 32 x 32: 7 us for 256 rows, 15 by oneDNN; 23 and 21 for 1,024).
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
        self._weight = weight.to(dtype).contiguous()
        self._bias = torch.zeros(out) if bias is None else bias.float().contiguous()
        library = cpu_library() if dtype == torch.bfloat16 else None
        self._run = None if library is None else partial(library.dpi_row, self._weight.data_ptr(), out, width)
        plain = weight.float() if self._run is None else self._weight  # else nobody reads it as float32
        self._small = weight.numel() <= _SMALL_WEIGHT and dtype == torch.float32
        self._turned = plain.t().contiguous() if self._small else plain.t()
        self._slices = plain.view(slices, out // slices, width).transpose(1, 2)
        self._dtype, self._fused = dtype, _ATTRIBUTES.get(activation)
        self._relu = activation == "relu"
        plainly = partial(reference.activate_, activation=activation, params=params, slope=slope)
        self._activate: Callable[[torch.Tensor], torch.Tensor] = _IN_PLACE.get(activation, plainly)
        self._few = few_rows(weight.numel()) if self._small else 1
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None) if _packs() else None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """dtype[rows, out] (float32 for a single row); `bias`: float32[out] in place of the layer's."""
        if self._run is not None and x.shape[0] == 1:
            return self._one_row(x.float().contiguous(), self._bias if bias is None else bias)
        fused = self._fused if self._packed is not None and not self._is_small(x) else None
        y = self._product(x, self._bias if bias is None else bias, fused or "none")
        return y if fused else self._activate(y)

    def with_shares(self, x: torch.Tensor, shares: torch.Tensor, request: int | None) -> torch.Tensor:
        """activation(x W^T + shares[request]), shares float32[contexts, out] in place of the bias; float32, by dense.c.

        request: address of int32[rows]; None: all rows are of one context.
        """
        if request is None:
            return self(x, shares[0])
        library = cpu_library()
        assert library is not None
        y = self._product(x, None)
        library.dpi_add_shared(y.data_ptr(), *y.shape, shares.data_ptr(), request, self._relu)
        return y if self._relu else self._activate(y)

    def _one_row(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out, width = self._weight.shape
        if self._run is None or x.shape != (1, width) or bias.shape != (out,) or not bias.is_contiguous():
            raise ValueError(f"layer: got x {tuple(x.shape)}, bias {tuple(bias.shape)}, expected (1, {width}) and ({out},)")
        y = torch.empty(1, out)
        self._run(x.data_ptr(), bias.data_ptr(), self._relu, y.data_ptr(), *pool_arguments())
        return y if self._relu else self._activate(y)

    def _is_small(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= self._few

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None, fused: str = "none") -> torch.Tensor:
        if x.shape[0] == 1 and not self._small and bias is not None:
            one = x.float().view(1, 1, -1).expand(len(self._slices), 1, -1)
            return torch.baddbmm(bias.view(len(self._slices), 1, -1), one, self._slices).view(1, -1)
        if self._is_small(x):
            return torch.mm(x.float(), self._turned) if bias is None else torch.addmm(bias, x.float(), self._turned)
        x, bias = x.to(self._dtype), None if bias is None else bias.to(self._dtype)
        if self._packed is None:
            return reference.linear(x, self._weight, bias, "identity")
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._packed, bias, fused, [], "")
        return y


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("in_", "out", "padded", "relu")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
    ]


class Layers:
    """Linear layers one after the other, float32, in one call of layers.c.

    Args:
        layers: of each its weight [out, in], its bias [out] or None, and whether a ReLU follows.

    Attributes:
        few: rows up to which this takes less time than layer by layer. 0: it cannot be called.
        most: the same, if the rows come from a lookup and so lie in a cache. The narrower layers are, the more (one Sapphire
            Rapids core, 4,000 rows of 32-32-1, 128-64-1, 624-32-1 from memory: 77 491 1428 us, libraries 126 567 1222).
        shape: inputs of the first, outputs of the last. arguments: the layers, how many, and those outputs, for C.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None, bool]]) -> None:
        library, self.few, self.most = cpu_library(), 0, 0
        padded = [-(-len(weight) // _LANES) * _LANES if len(weight) > 1 else 1 for weight, _, _ in layers]
        products = sum(weight.shape[1] * n for (weight, _, _), n in zip(layers, padded, strict=True))
        if library is None or max(padded) > _WIDEST or products > _SERIES_PRODUCTS:
            return
        self.few, self.shape = _SERIES_PRODUCTS // products, (layers[0][0].shape[1], len(layers[-1][0]))
        self.most = (16 if products <= _NARROW else 4 if products <= _SMALL else 1) * self.few
        self._held, structs = [], []
        for (weight, bias, relu), n in zip(layers, padded, strict=True):
            out, width = weight.shape
            turned, added = torch.zeros(width, n), torch.zeros(n)
            turned[:, :out], added[:out] = weight.t(), 0 if bias is None else bias
            self._held.append((turned, added))
            structs.append(_Layer(width, out, n, relu, turned.data_ptr(), added.data_ptr()))
        self._structs = (_Layer * len(structs))(*structs)
        self.arguments = ctypes.addressof(self._structs), len(structs), self.shape[1]
        self._run = partial(library.dpi_layers, *self.arguments[:2])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, out of the last] of x float32[rows, in of the first].

        Raises:
            ValueError: x of another shape.
        """
        (rows, width), (wanted, out) = x.shape, self.shape
        if width != wanted:
            raise ValueError(f"layers: got x {tuple(x.shape)}, expected [rows, {wanted}]")
        x, y = x.float().contiguous(), torch.empty(rows, out)
        self._run(x.data_ptr(), rows, y.data_ptr(), *pool_arguments())
        return y


class Fm:
    """The factorization machine's second-order term, `reference.fm`, in one pass over x where dense.c could be built.

    It takes half the time of torch's three passes (256 to 4,096 rows of 39 x 16).
    """

    def __init__(self, offset: int, fields: int, dim: int) -> None:
        self._shape = offset, fields, dim
        library = cpu_library()
        self._run = library.dpi_fm if library is not None and dim <= _FM_DIM else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, 1] of x[rows, >= offset + fields * dim]."""
        x, (offset, fields, dim) = x.float(), self._shape
        rows = x.shape[0]
        if self._run is None or x.stride(1) != 1:
            return reference.fm(x, offset, fields, dim)
        out = torch.empty(rows, 1)
        self._run(x.data_ptr() + 4 * offset, rows, x.stride(0), fields, dim, out.data_ptr(), *pool_arguments())
        return out


class CrossV1:
    """DCN's cross network folded into one pass over x0, as on a GPU (row_interactions.cuh): x_l = a_l x_0 + c_l, where
    a_{l+1} = a_l (1 + x_0^T w_l) + c_l^T w_l.

    Args:
        weights, biases: [layers, width]. head: [tasks, width] if only its share of the scores is wanted, else None.
    """

    def __init__(self, weights: torch.Tensor, biases: torch.Tensor, head: torch.Tensor | None) -> None:
        self._layers = len(weights)
        vectors, k, c = reference.folded_cross(weights, biases, head)
        self._weights, self._k = vectors.float(), k[: self._layers].float().unbind()
        self._c = (c if head is None else k[self._layers :]).float()
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
        return scores_of(z, values[len(self._shares) :])


def scores_of(z: torch.Tensor, logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """sigmoid(z + sum(logits)); z may be overwritten."""
    for logit in logits:
        z = z + logit
    return z.sigmoid_()
