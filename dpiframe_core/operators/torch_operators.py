"""The small operators that fusion removes, by torch: on a CPU, in regions, and in an unfused ablation on a GPU."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dpiframe_core.graph.graph import ACTIVATION_PARAMS, Attrs, Node
from kernels import reference
from kernels.attention.attention_cpu import AttentionLayer

Compute = Callable[..., torch.Tensor]


def small_operator(node: Node, w: Sequence[torch.Tensor]) -> Compute:
    """A function of the node's input values, float[rows, width] each, with its parameters.

    Raises:
        ValueError: an operator that is none of these.
    """
    a = node.attrs
    match node.op:
        case "concat":
            return lambda *parts: torch.cat(parts, 1)
        case "add":
            return lambda first, *rest: sum(rest, start=first)
        case "mul":
            return torch.mul
        case "sum":
            return lambda x: x.float().sum(1, keepdim=True)
        case "bias":
            return lambda x: x + w[0]
        case "activation":
            return lambda x: reference.activate_(x.clone(), a.activation, w, a.slope)
    raise ValueError(f"graph node {node.name}: got op {node.op!r}, expected one that torch computes alone")


def bound_operator(
    node: Node, w: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], out: torch.Tensor
) -> Callable[[], object]:
    """`small_operator` of inputs and a result, float32[rows, width], that stay where they are."""
    writes: dict[str, Callable[..., torch.Tensor]] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh}
    match node.op, node.attrs.activation:
        case "concat", _:
            return partial(torch.cat, list(ins), 1, out=out)
        case "add", _ if len(ins) == 2:
            return partial(torch.add, *ins, out=out)
        case "mul", _:
            return partial(torch.mul, *ins, out=out)
        case "sum", _:
            return partial(torch.sum, ins[0], 1, keepdim=True, out=out)
        case "bias", _:
            return partial(torch.add, ins[0], w[0], out=out)
        case "activation", "relu":
            return partial(torch.clamp_min, ins[0], 0, out=out)
        case "activation", ("sigmoid" | "tanh") as name:
            return partial(writes[name], ins[0], out=out)
    compute = small_operator(node, w)
    return lambda: out.copy_(compute(*ins))


def run_with_torch(node: Node, bias: torch.Tensor | None, ins: list[torch.Tensor], out: torch.Tensor) -> None:
    """Writes out[rows, width] from inputs cut to their widths, too; bias: of a bias node.

    Raises:
        ValueError: an operator that the CUDA backend does not know.
    """
    match node.op:
        case "concat":
            places = torch.split(out, [t.shape[1] for t in ins], 1)
            # Another way to run the model may have its makers write side by side, and buffers are the same.
            apart = [(t, place) for t, place in zip(ins, places, strict=True) if t.data_ptr() != place.data_ptr()]
            if len(apart) == len(ins) and out.is_contiguous():
                torch.cat(ins, 1, out=out)
            else:
                for t, place in apart:
                    place.copy_(t)
        case "add":
            out.copy_(ins[0])
            for other in ins[1:]:
                out.add_(other)
        case "mul":
            torch.mul(ins[0], ins[1], out=out)
        case "sum":
            torch.sum(ins[0], 1, keepdim=True, dtype=out.dtype, out=out)
        case "bias":
            assert bias is not None
            torch.add(ins[0], bias, out=out)
        case "activation":
            reference.activate_(out.copy_(ins[0]), node.attrs.activation)
        case _:
            raise ValueError(f"graph node {node.name}: got op {node.op!r}, expected one that the CUDA backend knows")


def cin_layers(a: Attrs, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight and bias, if there is one, of each layer of a `cin` node."""
    step, layers = len(params) // len(a.units), list[tuple[torch.Tensor, torch.Tensor | None]]()
    for k, units in enumerate(a.units):
        weight, bias = params[k * step], params[k * step + 1] if step == 2 else None
        if a.fields_first:
            weight = weight.reshape(units, a.fields, -1).transpose(1, 2).flatten(1)
        if a.second_on and k < len(a.units) - 1:
            weight, bias = weight.roll(units // 2, 0), None if bias is None else bias.roll(units // 2, 0)
        layers.append((weight, bias))
    return layers


def attention_layers(a: Attrs, w: Sequence[torch.Tensor]) -> tuple[list[AttentionLayer], tuple[torch.Tensor, torch.Tensor]]:
    """Weight, bias and the parameters of the activation of each layer of an `attention` node; its output's weight and bias."""
    assert a.attended is not None
    step = 2 + len(ACTIVATION_PARAMS.get(a.activation, ()))
    layers = [(w[i], w[i + 1], w[i + 2 : i + step]) for i in range(0, len(w) - 2, step)]
    return layers, (w[-2] * a.attended.scale, w[-1] * a.attended.scale)
