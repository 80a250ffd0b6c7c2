"""A target attention's weights as the tensor cores take them (attention_mma.cu): words of 4 bytes in the order of the lanes.

A product's right factor b[depth, 8] gives lane 4 g + t of a warp two words: of unit g and of two words of depth that are
numbered by t. What these hold is free, as long as the left factor holds the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention.attention_columns import AttentionColumns
from kernels.dense.activation import unit_params
from kernels.reference import split_attention

Layer = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]  # weight, bias, parameters of the activation


@dataclass(frozen=True, slots=True)
class MmaSizes:
    """What follows from the shape of an attention: tiles of 8 units of each layer, and steps of 8 words along the keys' dim.

    aligned: the parts whose rows begin at 16 bytes and fill whole steps. each: columns in a word.
    """

    tiles: tuple[int, ...]
    steps: int
    aligned: tuple[bool, ...]
    each: int

    @property
    def columns(self) -> int:
        """Of a key, padding among them."""
        return self.steps * 8 * self.each


def mma_sizes(columns: AttentionColumns, units: Sequence[int], dtype: torch.dtype) -> MmaSizes:
    """The sizes that attention_mma.cu works out too."""
    each, last = 4 // dtype.itemsize, len(units) - 1
    # Every second layer is computed 16 units at a time, and a left factor has 16 in bf16.
    tiles = tuple(-(-n // 8) if i % 2 and i == last else -(-n // 16) * 2 for i, n in enumerate(units))
    starts = zip(columns.dims, columns.queries, columns.keys, strict=True)
    aligned = tuple(d % (8 * each) == 0 and all(at * dtype.itemsize % 16 == 0 for at in (q, k)) for d, q, k in starts)
    return MmaSizes(tiles, sum(-(-d // (8 * each)) for d in columns.dims), aligned, each)


def packed_weights(
    layers: Sequence[Layer],
    out: tuple[torch.Tensor, torch.Tensor],
    activation: str,
    slope: float,
    dims: Sequence[int],
    sizes: MmaSizes,
) -> torch.Tensor:
    """int32 words on the host: the factors of all layers, their biases and shapes, and out; see attention_mma.cu."""
    factors, others = list[npt.NDArray[np.int32]](), list[torch.Tensor]()
    for i, ((weight, bias, params), tiles) in enumerate(zip(layers, sizes.tiles, strict=True)):
        n = len(bias)
        if i == 0:
            depth = _key_columns(dims, sizes)
            of_query, of_key, of_product = (_lanes(w, depth, tiles, sizes) for w in split_attention(weight.double().cpu()))
            factors += [_words(_paired(of_query), sizes, rounded=True)]
            both = np.stack([_pairs(of_key), _pairs(of_product)], 2)  # formed on the device, and not rounded before
            factors += [_words(both, sizes, rounded=False)]
        else:
            depth = _unit_columns(sizes.tiles[i - 1], sizes.each)
            factors += [_words(_paired(_lanes(weight.double().cpu(), depth, tiles, sizes)), sizes, rounded=True)]
        bias_and_shapes = torch.zeros(4, 8 * tiles)
        bias_and_shapes[0, :n] = bias
        bias_and_shapes[1:] = unit_params(activation, params, slope, n, 8 * tiles, torch.device("cpu"))
        others.append(bias_and_shapes.flatten())
    of_units = torch.zeros(8 * sizes.tiles[-1] + 4)
    of_units[: out[0].numel()] = out[0].flatten()
    of_units[8 * sizes.tiles[-1]] = out[1].reshape(())
    return torch.cat([*(torch.from_numpy(f) for f in factors), *(t.view(torch.int32) for t in (*others, of_units))])


def _key_columns(dims: Sequence[int], sizes: MmaSizes) -> npt.NDArray[np.int64]:
    """[steps, 2 words, 4 threads, each]: columns of a key; -1: none. A thread loads four words of an aligned part at once."""
    parts, first = [], 0
    s, j, t, h = np.ix_(*(np.arange(n) for n in (max(-(-d // (8 * sizes.each)) for d in dims), 2, 4, sizes.each)))
    for dim, aligned in zip(dims, sizes.aligned, strict=True):
        steps = -(-dim // (8 * sizes.each))
        paired = s < (steps // 2 * 2 if aligned else 0)
        word = np.where(paired, s // 2 * 16 + t * 4 + s % 2 * 2 + j, s * 8 + t * 2 + j)
        column = (word * sizes.each + h)[:steps]
        parts.append(np.where(column < dim, first + column, -1))
        first += dim
    return np.concatenate(parts)


def _unit_columns(tiles: int, each: int) -> npt.NDArray[np.int64]:
    """[steps, 2 words, 4 threads, each]: units of the layer before, as its sums lie over the lanes."""
    s, j, t, h = np.ix_(*(np.arange(n) for n in (tiles // each, 2, 4, each)))
    return 8 * s + 2 * t + j + 0 * h if each == 1 else 16 * s + 8 * j + 2 * t + h


def _lanes(weight: torch.Tensor, depth: npt.NDArray[np.int64], tiles: int, sizes: MmaSizes) -> npt.NDArray[np.float64]:
    """[steps, tiles, 8 units, 4 threads, 2 words, each] of a weight [units, columns], zero beyond it."""
    wide = np.zeros((8 * tiles, max(weight.shape[1], int(depth.max()) + 1) + 1))  # the last column is that of -1
    wide[: weight.shape[0], : weight.shape[1]] = weight.numpy()
    return wide[:, depth].reshape(tiles, 8, -1, 2, 4, sizes.each).transpose(2, 0, 1, 4, 3, 5)


def _pairs(lanes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[steps, tiles / 2, 32 lanes, 4 words, each]: two tiles side by side."""
    steps, tiles, _, _, _, each = lanes.shape
    split = lanes.reshape(steps, tiles // 2, 2, 32, 2, each)
    return split.swapaxes(2, 3).reshape(steps, tiles // 2, 32, 4, each)


def _paired(lanes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[steps, *]: tiles in pairs, and an odd last one behind them."""
    even, steps = lanes.shape[1] // 2 * 2, len(lanes)
    return np.concatenate([_pairs(lanes[:, :even]).reshape(steps, -1), lanes[:, even:].reshape(steps, -1)], 1)


def _words(values: npt.NDArray[np.float64], sizes: MmaSizes, *, rounded: bool) -> npt.NDArray[np.int32]:
    """As bfloat16 in pairs, or float32, `rounded` to the digits of tf32, which the tensor cores would else cut off."""
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
    if sizes.each == 2:
        return flat.bfloat16().view(torch.int32).numpy()
    words = flat.float().view(torch.int32).numpy()
    return ((words + 0x1000) & ~0x1FFF).astype(np.int32) if rounded else words
