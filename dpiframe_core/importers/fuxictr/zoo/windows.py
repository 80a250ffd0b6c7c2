"""Models of the zoo with convolutions: a window slides down the fields of [n, channels, fields, dim], each dimension by itself.

Every function gives the logit, [n, 1]; names and defaults are those of FuxiCTR's `model_zoo/*/src/*.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.errors import InputError
from dpiframe_core.importers.networks.layers import activation, inner_products, mlp
from dpiframe_core.importers.networks.net import Net

_LAST_KEPT = 3  # of CCPM's last layer, and the fewest of any


def ccpm(m: Net) -> Tensor:
    """Liu et al. 2015: wide convolutions, of each the greatest few values, in the fields' order."""
    fields = m.fields()
    x, count = fields.unsqueeze(1), fields.shape[1]
    layers = m.children("conv_layer.conv_layer")
    for i, child in enumerate(layers, 1):
        x = _convolved(m, f"conv_layer.conv_layer.{child}", x, wide=True)
        share = 1 - (i / len(layers)) ** (len(layers) - i)  # section 3.3; 0 of the last
        x = _greatest(x, max(_LAST_KEPT, int(share * count)))
        x = activation(m, m.setting("activation", "Tanh", str), x, "activation")
    return m.linear("fc", x.flatten(1))


def fgcnn(m: Net) -> Tensor:
    """Liu et al. 2019: convolutions make further fields, which a dense layer recombines; inner products of all, and an MLP."""
    fields = m.fields()
    x = fields if m.flag("share_embedding", False) else m.fields("fg_embedding_layer")
    _, height, dim = x.shape
    x, made = x.unsqueeze(1), [fields]
    layers = m.children("fgcnn_layer.conv_layers")
    how = m.setting("conv_activation", "Tanh", str)
    for i, size in zip(layers, _pooling_sizes(m, len(layers)), strict=True):
        layer = f"fgcnn_layer.conv_layers.{i}"
        x = _convolved(m, f"{layer}.0", x, wide=False)
        x = m.batch_norm(f"{layer}.1", x) if m.flag("conv_batch_norm", True) else x
        x = functional.max_pool2d(activation(m, how, x, "conv_activation"), (size, 1), padding=(height % size, 0))
        height = -(-height // size)
        recombined = m.linear(f"fgcnn_layer.recombine_layers.{i}.0", x.flatten(1))
        made.append(torch.unflatten(activation(m, how, recombined, "conv_activation"), 1, (-1, dim)))
    fields = torch.cat(made, 1)
    return mlp(m, "dnn", torch.cat([fields.flatten(1), inner_products(fields)], 1), "dnn_activations")


def _convolved(m: Net, name: str, x: Tensor, *, wide: bool) -> Tensor:
    """`wide`: every window that has one of the fields; else one window about each."""
    weight = m.parameter(f"{name}.weight")
    beside = weight.shape[2] - 1
    return functional.conv2d(x, weight, m.parameter(f"{name}.bias"), padding=(beside if wide else beside // 2, 0))


def _greatest(x: Tensor, count: int) -> Tensor:
    """The `count` greatest along dimension 2, in the order in which they stand. Of equal ones the first: `topk` leaves it open,
    and takes others on a GPU. Windows of rows that are zeros (padding) are often equal.
    """
    first = x.sort(dim=2, descending=True, stable=True).indices[:, :, :count]
    return x.gather(2, first.sort(dim=2).values)


def _pooling_sizes(m: Net, layers: int) -> list[int]:
    given = m.setting("pooling_sizes", [2, 2, 2, 2], list, int)
    sizes = [size for size in (given if isinstance(given, list) else [given] * layers) if isinstance(size, int) and size > 0]
    if len(sizes) != layers:
        raise InputError(f"{m.where}: pooling_sizes", given, f"a positive whole number, or one for each of {layers} layers")
    return sizes
