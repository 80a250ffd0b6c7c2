"""What each ATen call with a value in it becomes: nodes of the graph. A closed list; what is not in it cannot be taken over."""

from dataclasses import replace

import torch

from dpiframe_core.compiler.operations.arguments import Arguments, constant, integers, limit, number, tensor
from dpiframe_core.compiler.operations.arithmetic import binary, rounded
from dpiframe_core.compiler.operations.convolution import POOLS, convolution, pooled
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.joins import cat, continued, flipped, indexed, padded, selected_at, stack
from dpiframe_core.compiler.operations.ordered import kth, median, quantile
from dpiframe_core.compiler.operations.positions import (
    RowStarts,
    bucketed,
    gathered,
    looked_up,
    of_own_row,
    one_hot_rows,
    ranked,
)
from dpiframe_core.compiler.operations.products import attention, bilinear, einsum, matmul
from dpiframe_core.compiler.operations.reductions import along, group_norm, layer_norm, reduced
from dpiframe_core.compiler.operations.scattered import added_at, copied_at, filled_at, put_in_rows, scattered, written_over
from dpiframe_core.compiler.operations.strided import Atom, Frame, Refused, Size, Strided, frame_of, fresh, unsqueezed
from dpiframe_core.compiler.operations.tensors import sizes_of, widened
from dpiframe_core.graph.aten import Constant
from dpiframe_core.graph.graph import Node
from dpiframe_core.operators.batch_norm import BatchNorm, fold_after

# fmt: off
SAME_NAME = (
    "abs", "neg", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "square", "relu", "sigmoid", "tanh",
    "silu", "mish", "hardswish", "hardsigmoid", "log_sigmoid", "sin", "cos", "atan", "erf", "sign", "floor", "ceil", "round",
    "trunc", "log10", "logical_not", "exp2", "sinh", "cosh", "tan", "asin", "acos", "asinh", "acosh", "atanh", "erfc",
)
# fmt: on
UNARY = {f"aten.{n}.default": f"aten.{n}" for n in SAME_NAME}
BINARY = "add sub mul div maximum minimum pow eq ne gt ge lt le logical_and logical_or logical_xor atan2"
BINARY += " fmod remainder floor_divide"
REDUCTIONS = {
    "aten.sum.dim_IntList": "aten.sum", "aten.sum.default": "aten.sum", "aten.mean.dim": "aten.mean",
    "aten.mean.default": "aten.mean", "aten.amax.default": "aten.amax", "aten.amin.default": "aten.amin",
    "aten.max.default": "aten.amax", "aten.min.default": "aten.amin",
    "aten.prod.dim_int": "aten.prod", "aten.prod.default": "aten.prod",
    "aten.logsumexp.default": "aten.logsumexp", "aten.linalg_vector_norm.default": "aten.linalg_vector_norm",
    "aten.norm.ScalarOpt_dim": "aten.linalg_vector_norm", "aten.var.correction": "aten.var",
}  # fmt: skip


def operation(e: Emitter, target: str, a: Arguments) -> Strided | Const | list[Strided] | None:
    """The value of an ATen call on values and constants; None: there is no such operation here."""
    name = target.split(".")[1]
    if target in UNARY:
        return e.elementwise(UNARY[target], [a["self"]])
    if name in BINARY.split():
        return binary(e, name, a)
    if target in REDUCTIONS:
        return _reduced(e, target, a)
    if name[:-2] in POOLS:
        return pooled(e, POOLS[name[:-2]], a, int(name[-2]))
    match target:
        case "aten.rsub.Scalar" | "aten.rsub.Tensor":
            return binary(e, "sub", {"self": a["other"], "other": a["self"], "alpha": a["alpha"]})
        case "aten.leaky_relu.default":
            return e.elementwise("aten.leaky_relu", [a["self"]], [number(a["negative_slope"])])
        case "aten.elu.default":
            return e.elementwise("aten.elu", [a["self"]], [number(a[k]) for k in ("alpha", "scale", "input_scale")])
        case "aten.selu.default":  # its two constants, from the paper (Klambauer et al. 2017)
            return e.elementwise("aten.elu", [a["self"]], [1.6732632423543772, 1.0507009873554805, 1.0])
        case "aten.relu6.default":
            return e.elementwise("aten.clamp", [a["self"]], [0, 6])
        case (
            "aten.bitwise_not.default"
            | "aten.bitwise_and.Tensor"
            | "aten.bitwise_or.Tensor"
            | "aten.bitwise_xor.Tensor"
            | ("aten.__and__.Tensor" | "aten.__or__.Tensor" | "aten.__xor__.Tensor")
            | ("aten.__and__.Scalar" | "aten.__or__.Scalar" | "aten.__xor__.Scalar")
        ):
            truths = [Const(torch.tensor(v)) if isinstance(v, bool) else v for v in (a[k] for k in ("self", "other") if k in a)]
            if not all(v.boolean if isinstance(v, Strided) else v.tensor.dtype == torch.bool for v in truths):
                raise Refused(f"got {target} of integers, expected truth values")
            return e.elementwise(f"aten.logical_{name.removeprefix('bitwise_').strip('_')}", truths)
        case "aten.var.dim" | "aten.std.dim" | "aten.std.correction":
            correction = a["correction"] if "correction" in a else int(a["unbiased"])
            made = _reduced(e, "aten.var.correction", {**a, "correction": correction})
            return e.elementwise("aten.sqrt", [made]) if name == "std" else made
        case "aten.std_mean.dim" | "aten.std_mean.correction" | "aten.var_mean.dim" | "aten.var_mean.correction":
            spread = operation(e, target.replace("_mean", ""), a)
            assert isinstance(spread, Strided)
            return [spread, _reduced(e, "aten.mean.dim", a)]
        case "aten.cdist.default":
            x, y = (widened(v, len(sizes_of(v)) - at) for v, at in ((a["x1"], 1), (a["x2"], 2)))
            apart = binary(e, "sub", {"self": x, "other": y})
            return reduced(e, "aten.linalg_vector_norm", apart, [-1], float(a["p"]), keep=False)
        case "aten.gelu.default":
            return e.elementwise("aten.gelu", [a["self"]], [a["approximate"] == "tanh"])
        case "aten.softplus.default":
            return e.elementwise("aten.softplus", [a["self"]], [number(a["beta"]), number(a["threshold"])])
        case "aten.clamp.default" | "aten.clamp_min.default" | "aten.clamp_max.default" | "aten.hardtanh.default":
            low, high = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
            return e.elementwise("aten.clamp", [a["self"]], [limit(low, "-inf"), limit(high, "inf")])
        case "aten.clamp_min.Tensor" | "aten.clamp_max.Tensor":
            low = name == "clamp_min"
            return binary(e, "maximum" if low else "minimum", {"self": a["self"], "other": a["min" if low else "max"]})
        case "aten.clamp.Tensor":
            found: Strided = a["self"]
            for name, bound in (("maximum", a["min"]), ("minimum", a["max"])):
                found = found if bound is None else binary(e, name, {"self": found, "other": bound})
            return found
        case "aten.max.other" | "aten.min.other":
            return binary(e, f"{name}imum", a)
        case "aten.any.dim" | "aten.any.dims" | "aten.all.dim" | "aten.all.dims":
            is_true = a["self"] if a["self"].boolean else e.elementwise("aten.ne.Scalar", [a["self"]], [0])
            dims = [a["dim"]] if isinstance(a["dim"], int) else a["dim"]
            one = reduced(e, "aten.amax" if name == "any" else "aten.amin", is_true, dims, keep=a["keepdim"])
            return e.elementwise("aten.ne.Scalar", [one], [0])
        case "aten.prelu.default" | "aten._prelu_kernel.default":
            slope, channels = constant(a["weight"]).tensor, (-1, *[1] * (a["self"].rank - 2))
            return e.elementwise("aten.prelu", [a["self"], Const(slope.reshape(channels if slope.numel() > 1 else ()))])
        case "aten.where.self" | "aten.where.ScalarOther" | "aten.where.ScalarSelf" | "aten.where.Scalar":
            return e.elementwise("aten.where", [tensor(a[k]) for k in ("condition", "self", "other")])
        case "aten.masked_fill.Scalar" | "aten.masked_fill.Tensor":
            return e.elementwise("aten.masked_fill.Scalar", [a["self"], a["mask"]], [number(a["value"])])
        case "aten.index_put.default" if _is_masked(a):  # x[mask] = number
            mask = a["indices"][0]
            for _ in range(len(sizes_of(a["self"])) - mask.rank):
                mask = unsqueezed(mask, mask.rank)
            return e.elementwise("aten.where", [tensor(v) for v in (mask, a["values"], a["self"])])
        case "aten.softmax.int" | "aten._softmax.default" | "aten.log_softmax.int" | "aten._log_softmax.default":
            return along(e, "aten.log_softmax" if "log" in target else "aten.softmax", a["self"], a["dim"])
        case "aten.cumsum.default" | "aten.cumprod.default":
            return along(e, f"aten.{name}", a["self"], a["dim"])
        case "aten.max.dim" | "aten.min.dim":
            return [reduced(e, f"aten.{what}{name}", a["self"], [a["dim"]], keep=a["keepdim"]) for what in ("a", "arg")]
        case "aten.argmax.default" | "aten.argmin.default" if a["dim"] is not None:
            return reduced(e, f"aten.{name}", a["self"], [a["dim"]], keep=a["keepdim"])
        case "aten.flip.default":
            return flipped(e, a["self"], a["dims"])
        case "aten.bilinear.default":
            return bilinear(e, a)
        case "aten.linear.default":
            return e.linear(a["input"], constant(a["weight"]), a["bias"] and constant(a["bias"]))
        case "aten.conv1d.default" | "aten.conv1d.padding" | "aten.conv2d.default" | "aten.conv2d.padding":
            return convolution(e, a)
        case "aten.addmm.default" if a["beta"] == a["alpha"] == 1:
            return e.elementwise("aten.add", [matmul(e, a["mat1"], a["mat2"]), a["self"]])
        case "aten.baddbmm.default" if a["beta"] == a["alpha"] == 1:
            return e.elementwise("aten.add", [matmul(e, a["batch1"], a["batch2"]), a["self"]])
        case "aten.matmul.default":
            return matmul(e, a["self"], a["other"])
        case "aten.mm.default" | "aten.bmm.default":
            return matmul(e, a["self"], a["mat2"])
        case "aten.tensordot.default" if isinstance(a["other"], Const) and a["other"].tensor.ndim == 2:
            of_self, of_other = a["dims_self"][0], a["dims_other"][0]
            if len(a["dims_self"]) == 1 and of_self % a["self"].rank == a["self"].rank - 1:
                return matmul(e, a["self"], Const(a["other"].tensor.movedim(of_other, 0)))
        case "aten.einsum.default":
            return einsum(e, a["equation"], a["tensors"])
        case "aten.layer_norm.default":
            return layer_norm(e, a)
        case "aten.group_norm.default":
            return group_norm(e, a, a["num_groups"])
        case "aten.instance_norm.default" if a["use_input_stats"]:
            return group_norm(e, a, a["input"].size(1))
        case "aten.batch_norm.default" | "aten._native_batch_norm_legit_no_training.default" if not a.get("training"):
            return _batch_norm(e, a)
        case (
            "aten.batch_norm.default"
            | "aten._native_batch_norm_legit.no_stats"
            | "aten._native_batch_norm_legit_functional.default"
        ):
            raise Refused("got batch norm by the statistics of the batch, expected those kept in training")
        case "aten.scaled_dot_product_attention.default":
            return attention(e, a)
        case "aten.cat.default":
            return cat(e, a["tensors"], a["dim"])
        case "aten.pad.default" | "aten.constant_pad_nd.default" if a.get("mode", "constant") == "constant":
            return padded(e, a["self"], a["pad"], number(a["value"] or 0))
        case "aten.pad.default":
            return continued(e, a["self"], a["pad"], a["mode"])
        case "aten.stack.default":
            return stack(e, a["tensors"], a["dim"])
        case "aten.embedding.default":
            return looked_up(e, constant(a["weight"]), a["indices"])
        case "aten.index_select.default" if isinstance(a["self"], Const) and a["dim"] == 0:
            return looked_up(e, constant(a["self"]), a["index"])
        case "aten.index_select.default":
            return selected_at(e, a["self"], a["dim"], a["index"])
        case "aten._unsafe_index.Tensor":
            return indexed(e, a["self"], a["indices"])
        case "aten.index.Tensor" if isinstance(a["self"], Const) and len(a["indices"]) == 1:
            return looked_up(e, constant(a["self"]), a["indices"][0], from_the_end=True)
        case "aten.index.Tensor" if isinstance(a["indices"][0], RowStarts):
            return of_own_row(e, a["self"], a["indices"])
        case "aten.index.Tensor":
            return indexed(e, a["self"], a["indices"])
        case "aten.topk.default":
            return ranked(e, a["self"], a["dim"], "topk", [int(number(a["k"])), a["largest"], a["sorted"]])
        case "aten.sort.default" | "aten.sort.stable":
            return ranked(e, a["self"], a["dim"], "sort", [a["descending"]])
        case "aten.argsort.default" | "aten.argsort.stable":
            return ranked(e, a["self"], a["dim"], "sort", [a["descending"]])[1]
        case "aten.bucketize.Tensor":
            return bucketed(e, a["self"], a["boundaries"], a["right"])
        case "aten.searchsorted.Tensor" if a["sorter"] is None:
            return bucketed(e, a["self"], a["sorted_sequence"], a["right"] or a["side"] == "right")
        case "aten.one_hot.default":
            return looked_up(e, one_hot_rows(a["num_classes"]), a["self"])
        case "aten.gather.default":
            return gathered(e, a["self"], a["dim"], a["index"])
        case "aten.scatter.src" | "aten.scatter.value" | "aten.scatter_add.default":
            source = a["value"] if "value" in a else a["src"]
            return scattered(e, a["self"], a["dim"], a["index"], source, add=name == "scatter_add")
        case "aten.scatter_reduce.two" if a["reduce"] == "sum" and a["include_self"]:
            return scattered(e, a["self"], a["dim"], a["index"], a["src"], add=True)
        case "aten.index_put.default" if isinstance(a["indices"][0], RowStarts):
            return put_in_rows(e, a["self"], a["indices"], a["values"], add=a["accumulate"])
        case "aten.index_fill.int_Scalar":
            return filled_at(e, a["self"], a["dim"], a["index"], a["value"])
        case "aten.slice_scatter.default":
            return written_over(e, a["self"], a["src"], a)
        case "aten.index_add.default":
            return added_at(e, a["self"], a["dim"], a["index"], a["source"], number(a["alpha"]))
        case "aten.index_copy.default":
            return copied_at(e, a["self"], a["dim"], a["index"], a["source"])
        case "aten.median.dim":
            return median(e, a)
        case "aten.kthvalue.default":
            return kth(e, a, a["k"] - 1)
        case "aten.quantile.scalar":
            return quantile(e, a)
        case "aten.round.decimals":
            return rounded(e, a["self"], 10.0 ** a["decimals"])
        case "aten.isinf.default":
            return e.elementwise("aten.eq.Scalar", [e.elementwise("aten.abs", [a["self"]])], ["inf"])
    return None


def _reduced(e: Emitter, target: str, a: Arguments) -> Strided:
    op = REDUCTIONS[target]
    more = [number(a["ord"] if "ord" in a else a["p"])] if op == "aten.linalg_vector_norm" else []
    more += [number(1 if a["correction"] is None else a["correction"])] if op == "aten.var" else []
    dims = integers(a.get("dim")) or list(range(a["self"].rank))
    return reduced(e, op, a["self"], dims, *more, keep=bool(a.get("keepdim", False)))


def _batch_norm(e: Emitter, a: Arguments) -> Strided:
    """Batch norm by the statistics kept: within a linear layer ahead, or scale and shift."""
    x: Strided = a["input"]
    mean, variance = constant(a["running_mean"]).tensor, constant(a["running_var"]).tensor
    affine = (None if a[k] is None else constant(a[k]).tensor for k in ("weight", "bias"))
    norm = BatchNorm(mean, variance, a["eps"], *affine)
    ahead = next((n for n in e.nodes if n.outputs == (x.base,) and n.op == "linear"), None)
    if ahead and frame_of([x], x.rank) == Frame(2, 0) and e.whole(x):
        own = e.params[ahead.params[0]].reshape(len(mean), -1)
        weight, bias = fold_after(own, e.params[ahead.params[1]] if len(ahead.params) == 2 else None, norm)
        name, layer = e.name, fresh(ahead.inputs[0], [Size(1, True), Size(e.width(ahead.inputs[0]))])
        e.name = f"{ahead.name}.norm"
        made = e.linear(layer, Const(weight, f"{e.name}.weight"), Const(bias, f"{e.name}.bias"))
        e.name = name
        return made
    last = x.dims[1] == (Atom(len(mean), 1),) and e.permuted_whole(x)
    product = next((n for n in e.nodes if n.outputs == (x.base,) and _has_columns(n, len(mean))), None) if last else None
    if product:
        return replace(x, base=_normed(e, product, norm))
    shape = (-1, *[1] * (x.rank - 2))
    scale, shift = norm.scale_and_shift()
    scaled = e.elementwise("aten.mul", [x, Const(scale.reshape(shape))])
    return e.elementwise("aten.add", [scaled, Const(shift.reshape(shape))])


def _has_columns(n: Node, count: int) -> bool:
    """Whether it is a product of each window or step, so many columns wide."""
    return n.attrs.aten is not None and n.attrs.aten.op == "aten.linear" and n.attrs.aten.sizes[-1] == count


def _normed(e: Emitter, product: Node, norm: BatchNorm) -> str:
    """Such a product with a norm of its columns within its weight."""
    call = product.attrs.aten
    assert call is not None
    own = [e.params[p] for p in product.params]
    weight, bias = fold_after(own[0], own[1] if len(own) == 2 else None, norm)
    names = [e.param(weight, f"{e.name}.weight"), e.param(bias, f"{e.name}.bias")]
    call = replace(call, operands=(call.operands[0], Constant(0), Constant(1)))
    return e.node("aten", product.inputs, e.width(product.outputs[0]), names, replace(product.attrs, aten=call))


def _is_masked(a: Arguments) -> bool:
    """Whether one number is put where a mask of the first dimensions says so."""
    (mask, *more), value = a["indices"], a["values"]
    one = isinstance(value, Const) and value.tensor.numel() == 1 and not a["accumulate"]
    return one and not more and isinstance(mask, Strided) and mask.boolean and mask.rank <= len(sizes_of(a["self"]))
