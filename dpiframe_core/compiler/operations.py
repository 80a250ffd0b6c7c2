"""What each ATen call with a value in it becomes: nodes of the graph. A closed list; what is not in it cannot be taken over."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dpiframe_core.compiler.emit import Const, Emitter, Tensor
from dpiframe_core.compiler.strided import Frame, Refused, Strided, frame_of, permuted, squeezed, unsqueezed

Arguments = Mapping[str, Any]

# ATen name -> (operator of the graph, its plain arguments in order).
UNARY = {
    **{f"aten.{n}.default": f"aten.{n}" for n in (
        "abs neg exp expm1 log log1p log2 sqrt rsqrt reciprocal square relu sigmoid tanh silu mish hardswish hardsigmoid "
        "log_sigmoid sin cos erf sign floor ceil logical_not"
    ).split()},
}  # fmt: skip
BINARY = "add sub mul div maximum minimum pow eq ne gt ge lt le logical_and logical_or logical_xor"
REDUCTIONS = {
    "aten.sum.dim_IntList": "aten.sum", "aten.sum.default": "aten.sum", "aten.mean.dim": "aten.mean",
    "aten.mean.default": "aten.mean", "aten.amax.default": "aten.amax", "aten.amin.default": "aten.amin",
    "aten.logsumexp.default": "aten.logsumexp", "aten.linalg_vector_norm.default": "aten.linalg_vector_norm",
    "aten.norm.ScalarOpt_dim": "aten.linalg_vector_norm", "aten.var.correction": "aten.var",
}  # fmt: skip


def operation(e: Emitter, target: str, a: Arguments) -> Strided | None:
    """The value of an ATen call on values and constants; None: there is no such operation here."""
    name = target.split(".")[1]
    if target in UNARY:
        return e.elementwise(UNARY[target], [a["self"]])
    if name in BINARY.split():
        return _binary(e, name, a)
    if target in REDUCTIONS:
        return _reduced(e, target, a)
    match target:
        case "aten.rsub.Scalar" | "aten.rsub.Tensor":
            return _binary(e, "sub", {"self": a["other"], "other": a["self"], "alpha": a["alpha"]})
        case "aten.leaky_relu.default":
            return e.elementwise("aten.leaky_relu", [a["self"]], [_number(a["negative_slope"])])
        case "aten.elu.default":
            return e.elementwise("aten.elu", [a["self"]], [_number(a[k]) for k in ("alpha", "scale", "input_scale")])
        case "aten.gelu.default":
            return e.elementwise("aten.gelu", [a["self"]], [a["approximate"] == "tanh"])
        case "aten.softplus.default":
            return e.elementwise("aten.softplus", [a["self"]], [_number(a["beta"]), _number(a["threshold"])])
        case "aten.clamp.default" | "aten.clamp_min.default" | "aten.clamp_max.default" | "aten.hardtanh.default":
            low, high = a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))
            return e.elementwise("aten.clamp", [a["self"]], [_limit(low, "-inf"), _limit(high, "inf")])
        case "aten.prelu.default" | "aten._prelu_kernel.default":
            slope = a["weight"].tensor
            return e.elementwise("aten.prelu", [a["self"], Const(slope.reshape(-1, *[1] * (a["self"].rank - 2)).reshape(
                slope.shape if slope.numel() == 1 else (-1, *[1] * (a["self"].rank - 2))))])  # fmt: skip
        case "aten.where.self" | "aten.where.ScalarOther" | "aten.where.ScalarSelf" | "aten.where.Scalar":
            return e.elementwise("aten.where", [_tensor(a[k]) for k in ("condition", "self", "other")])
        case "aten.masked_fill.Scalar" | "aten.masked_fill.Tensor":
            return e.elementwise("aten.masked_fill.Scalar", [a["self"], a["mask"]], [_number(a["value"])])
        case "aten.softmax.int" | "aten._softmax.default" | "aten.log_softmax.int" | "aten._log_softmax.default":
            return _along(e, "aten.log_softmax" if "log" in target else "aten.softmax", a)
        case "aten.cumsum.default":
            return _along(e, "aten.cumsum", a)
        case "aten.linear.default":
            return e.linear(a["input"], _constant(a["weight"]), a["bias"] and _constant(a["bias"]))
        case "aten.addmm.default" if a["beta"] == a["alpha"] == 1:
            return e.elementwise("aten.add", [matmul(e, a["mat1"], a["mat2"]), a["self"]])
        case "aten.baddbmm.default" if a["beta"] == a["alpha"] == 1:
            return e.elementwise("aten.add", [matmul(e, a["batch1"], a["batch2"]), a["self"]])
        case "aten.matmul.default":
            return matmul(e, a["self"], a["other"])
        case "aten.mm.default" | "aten.bmm.default":
            return matmul(e, a["self"], a["mat2"])
        case "aten.einsum.default":
            return _einsum(e, a["equation"], a["tensors"])
        case "aten.layer_norm.default":
            return _layer_norm(e, a)
        case "aten._native_batch_norm_legit_no_training.default":
            return _batch_norm(e, a)
        case "aten.scaled_dot_product_attention.default":
            return _attention(e, a)
        case "aten.cat.default":
            return cat(e, a["tensors"], a["dim"])
        case "aten.stack.default":
            rank = max(t.rank for t in a["tensors"] if isinstance(t, Strided)) + 1
            return cat(e, [_unsqueezed(t, a["dim"] % rank) for t in a["tensors"]], a["dim"] % rank)
        case "aten.index_select.default":
            return _selected(e, a["self"], a["dim"], a["index"])
        case "aten.index.Tensor":
            return _indexed(e, a["self"], a["indices"])
    return None


def _binary(e: Emitter, name: str, a: Arguments) -> Strided:
    left, right = a["self"], a["other"] if "other" in a else a["exponent"]
    alpha = a.get("alpha", 1)
    if alpha != 1:
        right = right * alpha if isinstance(right, int | float) else e.elementwise("aten.mul.Scalar", [right], [_number(alpha)])
    op = f"aten.{name}"
    if isinstance(right, Strided | Const) and isinstance(left, Strided | Const) and not (_is_number(left) or _is_number(right)):
        return e.elementwise(op, [left, right])
    if isinstance(left, Strided):
        if name in ("maximum", "minimum"):
            limits = [_number(right), None] if name == "maximum" else [None, _number(right)]
            return e.elementwise("aten.clamp", [left], limits)
        return e.elementwise(f"{op}.Scalar", [left], [_number(right)])
    flipped = {"add": "add", "mul": "mul", "sub": "rsub", "pow": "rpow", "eq": "eq", "ne": "ne", "gt": "lt", "ge": "le"}
    flipped |= {"lt": "gt", "le": "ge", "maximum": "maximum", "minimum": "minimum"}
    if name == "div":
        return e.elementwise("aten.mul.Scalar", [e.elementwise("aten.reciprocal", [right])], [_number(left)])
    if name in ("maximum", "minimum"):
        return _binary(e, name, {"self": right, "other": left})
    return e.elementwise(f"aten.{flipped[name]}.Scalar", [right], [_number(left)])


def _reduced(e: Emitter, target: str, a: Arguments) -> Strided:
    x: Strided = a["self"]
    dims = [d % x.rank for d in _list(a.get("dim"))] or list(range(x.rank))
    frame = frame_of([x], x.rank)
    rows = tuple(sorted(frame.position(d) for d in dims))
    op, keep = REDUCTIONS[target], bool(a.get("keepdim", False))
    kept = [x.dims[d] for d in range(x.rank) if d not in dims and d != frame.at]
    if op == "aten.sum" and e.whole(x) and frame == Frame(x.rank, 0) and not any(kept):
        made = frame.back(e.node("sum", [x.base], 1), (1,) * (x.rank - 1))
    else:
        more = [_number(a["ord"] if "ord" in a else a["p"])] if op == "aten.linalg_vector_norm" else []
        more += [_number(1 if a["correction"] is None else a["correction"])] if op == "aten.var" else []
        made = e.call(op, [x], [rows, True, *more], frame)
    return made if keep else squeezed(made, dims)


def _along(e: Emitter, op: str, a: Arguments) -> Strided:
    x: Strided = a["self"]
    frame = frame_of([x], x.rank)
    return e.call(op, [x], [frame.position(a["dim"] % x.rank)], frame)


def matmul(e: Emitter, a: Tensor, b: Tensor) -> Strided:
    """a @ b; a product with a constant matrix on the right is a linear layer."""
    if isinstance(a, Strided) and isinstance(b, Const) and b.tensor.ndim <= 2:
        if b.tensor.ndim == 2:
            return e.linear(a, Const(b.tensor.t()), None)
        return squeezed(e.linear(a, Const(b.tensor[None]), None), [a.rank - 1])
    tensors = (a, b)
    ranks = [t.rank if isinstance(t, Strided) else t.tensor.ndim for t in tensors]
    rank = max(ranks)
    frame = frame_of([t for t in tensors if isinstance(t, Strided)], rank)
    if min(ranks) < 2 or frame.at >= rank - 2:
        raise Refused("got a product over the batch, expected each row to be computed from itself")
    return e.call("aten.matmul", [t if isinstance(t, Strided) else e_aligned(t, frame) for t in tensors], [], frame)


def e_aligned(c: Const, frame: Frame) -> Const:
    """A constant matrix, or a stack of them, without the batch's dimension; two dimensions at least."""
    from dpiframe_core.compiler.emit import aligned

    matrix = c.tensor.shape[-2:]
    found = aligned(c, frame).tensor
    return Const(found.reshape(*found.shape[:-2], *matrix) if found.ndim >= 2 else found.reshape(matrix), None)


def _einsum(e: Emitter, equation: str, tensors: Sequence[Tensor]) -> Strided:
    equation = equation.replace(" ", "")
    if "->" not in equation or "." in equation:
        raise Refused(f"got einsum {equation!r}, expected letters and a result")
    terms, out = equation.split("->")[0].split(","), equation.split("->")[1]
    letters = {term[t.batch_dim] for t, term in zip(tensors, terms, strict=True) if isinstance(t, Strided)}
    (batch, *others) = letters
    constants = [term for t, term in zip(tensors, terms, strict=True) if isinstance(t, Const)]
    if others or batch not in out or any(batch in term for term in constants):
        raise Refused(f"got einsum {equation!r}, expected one letter for the batch, in the result and in no constant")
    operands: list[Tensor] = []
    for i, (t, term) in enumerate(zip(tensors, terms, strict=True)):
        if isinstance(t, Strided):  # the batch in front
            order = [t.batch_dim, *(d for d in range(t.rank) if d != t.batch_dim)]
            terms[i] = "".join(term[d] for d in order)
            t = permuted(t, order)
        operands.append(t)
    result = batch + out.replace(batch, "")
    rank = max(len(term) for term in [*terms, result])
    made = e.call("aten.einsum", operands, [",".join(terms) + "->" + result], EinsumFrame(rank, 0))
    return permuted(made, [result.index(letter) for letter in out])


class EinsumFrame(Frame):
    """Operands of ranks of their own, each with the batch in front."""

    def row(self, t: Strided) -> Any:
        return Frame(t.rank, 0).row(t)

    def back(self, base: str, sizes: tuple[int, ...], boolean: bool = False) -> Strided:
        return Frame(len(sizes) + 1, 0).back(base, sizes, boolean)


def _layer_norm(e: Emitter, a: Arguments) -> Strided:
    x, count = a["input"], len(a["normalized_shape"])
    frame = frame_of([x], x.rank)
    if frame.at >= x.rank - count:
        raise Refused("got a normalisation over the batch, expected each row to be computed from itself")
    affine = [_constant(a[k]) for k in ("weight", "bias") if a[k] is not None]
    return e.call("aten.layer_norm", [x, *affine], [count, float(a["eps"])], frame)


def _batch_norm(e: Emitter, a: Arguments) -> Strided:
    """(x - mean) / sqrt(var + eps) * weight + bias by the statistics kept: folded into a linear layer ahead, or scale and shift."""
    x: Strided = a["input"]
    mean, var = _constant(a["running_mean"]).tensor.double(), _constant(a["running_var"]).tensor.double()
    scale = (var + a["eps"]).rsqrt() * (1 if a["weight"] is None else _constant(a["weight"]).tensor.double())
    shift = (0 if a["bias"] is None else _constant(a["bias"]).tensor.double()) - mean * scale
    ahead = next((n for n in e.nodes if n.outputs == (x.base,) and n.op == "linear"), None)
    if ahead and frame_of([x], x.rank) == Frame(2, 0) and e.whole(x):
        weight = e.params[ahead.params[0]].double().reshape(len(scale), -1)
        bias = e.params[ahead.params[1]].double() if len(ahead.params) == 2 else torch.zeros_like(shift)
        name, layer = e.name, fresh_like(e, ahead.inputs[0])
        e.name = f"{ahead.name}.norm"
        made = e.linear(layer, Const(weight * scale[:, None], f"{e.name}.weight"), Const(bias * scale + shift, f"{e.name}.bias"))
        e.name = name
        return made
    shape = (-1, *[1] * (x.rank - 2))
    scaled = e.elementwise("aten.mul", [x, Const(scale.reshape(shape))])
    return e.elementwise("aten.add", [scaled, Const(shift.reshape(shape))])


def fresh_like(e: Emitter, value: str) -> Strided:
    from dpiframe_core.compiler.strided import Size, fresh

    return fresh(value, [Size(1, True), Size(e.width(value))])


def _attention(e: Emitter, a: Arguments) -> Strided:
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    if a["dropout_p"] or a["is_causal"] or a["enable_gqa"]:
        raise Refused("got attention with dropout, a causal flag or grouped queries, expected none (a mask tensor is fine)")
    scale = a["scale"] if a["scale"] is not None else (q.dims[-1][0].size if q.dims[-1] else 1) ** -0.5
    order = [*range(k.rank - 2), k.rank - 1, k.rank - 2]
    scores = matmul(e, e.elementwise("aten.mul.Scalar", [q], [float(scale)]), permuted(k, order))
    if mask is not None:
        boolean = mask.boolean if isinstance(mask, Strided) else mask.tensor.dtype == torch.bool
        if boolean:
            hidden = e.elementwise("aten.logical_not", [mask]) if isinstance(mask, Strided) else Const(~mask.tensor)
            scores = e.elementwise("aten.masked_fill.Scalar", [scores, hidden], [float("-inf")])
        else:
            scores = e.elementwise("aten.add", [scores, mask])
    return matmul(e, _along(e, "aten.softmax", {"self": scores, "dim": -1}), v)


def cat(e: Emitter, tensors: Sequence[Tensor], dim: int) -> Strided:
    """Side by side along a dimension: without a copy if they lie so already."""
    strided = [t for t in tensors if isinstance(t, Strided)]
    first, rank = strided[0], strided[0].rank
    frame = frame_of(strided, rank)
    dim %= rank
    position = frame.position(dim)
    rows = [frame.row(t) for t in strided]
    outermost = frame == Frame(rank, 0) and all(r is not None and set(r[0][: position - 1]) <= {1} for r in rows)
    if outermost and len(strided) == len(tensors) and all(t.is_run for t in tensors):
        sizes = [1] * (rank - 1)
        for i, n in enumerate(rows[0][0]):  # type: ignore[index]
            sizes[i] = n if i != position - 1 else sum(r[0][i] for r in rows)  # type: ignore[index]
        ends = [t.offset + t.count for t in strided]
        if all(t.base == first.base for t in strided) and [t.offset for t in strided[1:]] == ends[:-1]:
            joined = Frame(rank, 0).back(first.base, tuple(sizes))
            return Strided(first.base, joined.dims, first.offset)
        if all(e.whole(t) for t in strided):
            base = e.node("concat", [t.base for t in strided], sum(t.count for t in strided))
            return Frame(rank, 0).back(base, tuple(sizes))
    parts = [t if isinstance(t, Strided) else e_aligned_full(t, frame) for t in tensors]
    return e.call("aten.cat", parts, [position], frame)


def e_aligned_full(c: Const, frame: Frame) -> Const:
    shape = list(c.tensor.shape)
    split = [1] * ((frame.outer > 1) + (frame.inner > 1))
    return Const(c.tensor.reshape(*shape[: frame.at], *split, *shape[frame.at + 1 :]))


def _unsqueezed(t: Tensor, at: int) -> Tensor:
    if isinstance(t, Strided):
        return unsqueezed(t, at)
    return Const(t.tensor.unsqueeze(at), None, None if t.batch_dim is None else t.batch_dim + (t.batch_dim >= at))


def _selected(e: Emitter, x: Strided, dim: int, index: Any) -> Strided:
    frame, ids = frame_of([x], x.rank), _constant(index).tensor
    size = [1] + [0] * 0 and x.dims[dim % x.rank]
    count = 1
    for atom in size:
        count *= atom.size
    return e.call("aten.index_select", [x], [frame.position(dim % x.rank), tuple((ids % count).flatten().tolist())], frame)


def _indexed(e: Emitter, x: Strided, indices: Sequence[Any]) -> Strided:
    """x[:, idx] or x[:, i, j] by constant indices of one dimension (i and j of neighbouring dimensions)."""
    used = [(d, _constant(i).tensor) for d, i in enumerate(indices) if i is not None]
    counts = [1] * len(used)
    for n, (d, _) in enumerate(used):
        for atom in x.dims[d]:
            counts[n] *= atom.size
    if any(i.dtype == torch.bool or i.ndim != 1 for _, i in used) or [d for d, _ in used] != list(
        range(used[0][0], used[0][0] + len(used))
    ):
        raise Refused("got an index of values or of several dimensions, expected constant positions along neighbouring dimensions")
    flat = torch.zeros_like(used[0][1])
    for (_, i), count in zip(used, counts, strict=True):
        flat = flat * count + i % count
    if len(used) > 1:
        at, last = used[0][0], used[-1][0]
        x = Strided(x.base, (*x.dims[:at], sum(x.dims[at : last + 1], ()), *x.dims[last + 1 :]), x.offset, x.boolean)
    return _selected(e, x, used[0][0], Const(flat))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Const) and value.tensor.ndim == 0)


def _number(value: Any) -> float | int:
    if isinstance(value, Const) and value.tensor.numel() == 1:
        value = value.tensor.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"got {value!r} as a number, expected one that is known before there is a batch")
    return value


def _limit(value: Any, none: str) -> float | int | None:
    number = None if value is None else _number(value)
    return None if number == float(none) else number


def _list(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _constant(value: Any) -> Const:
    if not isinstance(value, Const):
        raise Refused("got a value of the batch as a parameter, expected a constant")
    return value


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Strided | Const) else Const(torch.tensor(float(_number(value))))
