"""Writes a graph node by node from operations on strided tensors: known operators where an operation is one, else generic ones.

Equal nodes are written once. Owns the parameters that the nodes name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

import torch

from dpiframe_core.compiler.operations.strided import (
    BATCH,
    Atom,
    Frame,
    Refused,
    Size,
    Strided,
    frame_of,
    fresh,
    merged,
    sliced,
    viewed,
)
from dpiframe_core.graph.aten import AtenCall, Constant, Window
from dpiframe_core.graph.aten_rules import RULES, Plain, Shape, Sizes
from dpiframe_core.graph.graph import Attrs, Node

ACTIVATIONS = {"aten.relu": "relu", "aten.sigmoid": "sigmoid", "aten.tanh": "tanh"}
RESERVED = {"x", "w", "lookup", "head", "cross", "logit"}  # names that lookups, fusion and `tidy` give
TRUTHS = {f"aten.{op}{kind}" for op in ("eq", "ne", "gt", "ge", "lt", "le") for kind in ("", ".Scalar")} | {
    f"aten.logical_{op}" for op in ("not", "and", "or", "xor")
}


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A tensor that does not depend on the inputs. name: the module's, if it is a parameter as it stands.

    batch_dim: the dimension (of size 1 here) that in the module has the batch's rows, all equal; None: it has none.
    """

    tensor: torch.Tensor
    name: str | None = None
    batch_dim: int | None = None


Tensor = Strided | Const


@dataclass
class Emitter:
    """The nodes so far. `complete`: the widths of the embedded values "x" and "w", known from an earlier run.

    stacked: what lies one behind the other along the first dimension of a tensor, so that who wants one needs no copy of all.
    """

    complete: dict[str, int]
    nodes: list[Node] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    name: str = "node"  # of the call being written, and its part of the model
    module: str = "model"
    stacked: dict[Strided, Sequence[Strided]] = field(default_factory=dict)
    _known: dict[tuple[object, ...], str] = field(default_factory=dict)

    def width(self, value: str) -> int:
        return self.complete[value] if value in self.complete else self.widths[value]

    def node(self, op: str, inputs: Sequence[str], width: int, params: Sequence[str] = (), attrs: Attrs | None = None) -> str:
        """Adds a node, unless there is an equal one, and gives its value."""
        attrs = attrs or Attrs()
        key = (op, tuple(inputs), tuple(params), attrs)
        known = self._known.get(key)
        if known is None:
            name = self._unique(self._prefix(op, params))
            self.nodes.append(Node(name, op, tuple(inputs), (name,), self.module, tuple(params), attrs))
            self.widths[name] = width
            known = self._known[key] = name
        return known

    def param(self, tensor: torch.Tensor, name: str | None) -> str:
        """A parameter under the module's name for it, or a name of its own if it was computed."""
        tensor = tensor.detach().float().contiguous()
        if not torch.isfinite(tensor).all():
            raise Refused(f"got {name or 'a constant'} with NaN or infinite values, expected finite ones (a mask: masked_fill)")
        name = name or f"{self.name}.constant"
        count, plain = 1, name
        while name in self.params and not torch.equal(self.params[name], tensor):
            count += 1
            name = f"{plain}.{count}"
        self.params.setdefault(name, tensor)
        return name

    def whole(self, t: Strided) -> bool:
        """Whether a row of the tensor is a row of its value, element by element."""
        return t.is_run and t.offset == 0 and t.count == self.width(t.base)

    def run(self, t: Strided) -> str:
        """A value whose rows are the tensor's, row-major."""
        return t.base if self.whole(t) else self.copied(t).base

    def sliced(self, t: Strided, at: int, start: int, size: int, step: int = 1) -> Strided:
        """`strided.sliced`, of a copy where the dimension is no even run."""
        found = sliced(t, at, start, size, step) or sliced(self.copied(t), at, start, size, step)
        assert found is not None  # a copy is one run
        return found

    def copied(self, t: Strided) -> Strided:
        """The same tensor on a value of its own."""
        atoms = merged(t.atoms)
        sizes, strides = tuple(a.size for a in atoms), tuple(a.stride for a in atoms)
        call = AtenCall("aten.clone", (Window(0, sizes, strides, t.offset),), (), sizes)
        base = self.node("aten", [t.base], prod(sizes), attrs=Attrs(aten=call))
        strides_left = prod(sizes)
        dims = []
        for dim in t.dims:
            atoms_out = []
            for a in dim:
                if a.batch:
                    atoms_out.append(BATCH)
                else:
                    strides_left //= a.size
                    atoms_out.append(Atom(a.size, strides_left))
            dims.append(tuple(atoms_out))
        return Strided(base, tuple(dims), 0, t.boolean)

    def view(self, t: Strided, sizes: Sequence[Size]) -> Strided:
        """Other sizes for the same elements; a copy only where strides cannot say it."""
        found = viewed(t, sizes) or viewed(self.copied(t), sizes)
        if found is None:
            raise Refused(f"got a view to {[s.count for s in sizes]} a row, expected sizes that keep the batch apart")
        return found

    def call(self, op: str, tensors: Sequence[Tensor], args: Sequence[Plain], frame: Frame | None) -> Strided:
        """A generic node on tensors that fit the frame; constants are whole parameters, broadcast over the batch.

        frame: None if each has a rank of its own, and the batch in front.
        """
        operands: list[Window | Constant] = []
        sizes: list[Sizes] = []
        inputs: list[str] = []
        params: list[str] = []
        for t in tensors:
            if isinstance(t, Const):
                name = self.param(t.tensor, t.name)
                params += [name] if name not in params else []
                operands.append(Constant(params.index(name)))
                sizes.append((False, tuple(self.params[name].shape)))
                continue
            own = frame or Frame(t.rank, 0)
            row = own.row(t)
            if row is None:
                t = self.copied(t)
                row = own.row(t)
                assert row is not None  # dimensions of a copy are runs
            inputs += [t.base] if t.base not in inputs else []
            operands.append(Window(inputs.index(t.base), *row, t.offset))
            sizes.append((True, row[0]))
        plain = tuple(_plain(a) for a in args)
        try:
            out = RULES[op](sizes, plain)
        except ValueError as error:
            raise Refused(str(error)) from None
        base = self.node("aten", inputs, prod(out), params, Attrs(aten=AtenCall(op, tuple(operands), plain, out)))
        return (frame or Frame(len(out) + 1, 0)).back(base, out, op in TRUTHS)

    def elementwise(self, op: str, tensors: Sequence[Tensor], args: Sequence[Plain] = ()) -> Strided:
        """An operation element by element, with torch's broadcasting."""
        infinite = next((i for i, t in enumerate(tensors) if isinstance(t, Const) and t.tensor.isinf().any()), None)
        if infinite is not None and (op in ("aten.add", "aten.where") or (op, infinite) == ("aten.sub", 1)):
            return self._by_infinite(op, tensors, infinite)
        strided = [t for t in tensors if isinstance(t, Strided)]
        if len(tensors) == 1 and self.permuted_whole(strided[0]):
            return self._on_base(op, strided[0], args)
        rank = max(t.rank if isinstance(t, Strided) else t.tensor.ndim for t in tensors)
        frame = frame_of(strided, rank)
        found = self._known_pair(op, tensors, frame)
        return found or self.call(op, [t if isinstance(t, Strided) else aligned(t, frame) for t in tensors], args, frame)

    def linear(self, x: Strided, weight: Const, bias: Const | None) -> Strided:
        """x W^T + b over the last dimension."""
        frame = frame_of([x], x.rank)
        if frame.at == x.rank - 1:
            raise Refused("got a product over the batch, expected each row to be computed from itself")
        if frame != Frame(2, 0):
            return self.call("aten.linear", [x, weight, *([bias] if bias else [])], [], frame)
        out, alone = weight.tensor.shape[0], bias is None and weight.tensor.shape[0] == 1
        # One column without a bias: a vector, as the cross network's layers have it.
        names = [self.param(weight.tensor[0] if alone else weight.tensor, weight.name)]
        if bias:
            names.append(self.param(bias.tensor, bias.name))
        base = self.node("linear", [self.run(x)], out, names)
        return fresh(base, [Size(1, True), Size(out)])

    def _known_pair(self, op: str, tensors: Sequence[Tensor], frame: Frame) -> Strided | None:
        """add, mul and bias of whole values, which fusion knows."""
        if op not in ("aten.add", "aten.mul") or frame != Frame(frame.rank, 0):
            return None
        a, b = tensors
        if isinstance(a, Const) or (isinstance(b, Strided) and self._last_is_linear(a, b)):
            a, b = b, a
        assert isinstance(a, Strided)
        if a.boolean or not self.whole(a) or frame.rank != a.rank:
            return None
        row = frame.row(a)
        assert row is not None
        if isinstance(b, Const):
            vector = aligned(b, frame)
            if op == "aten.add" and a.rank == 2 and vector.tensor.ndim < 2 and vector.tensor.numel() in (1, a.count):
                name = self.param(vector.tensor.expand(row[0]), b.name if tuple(b.tensor.shape) == row[0] else None)
                return frame.back(self.node("bias", [a.base], a.count, [name]), row[0])
            return None
        if b.boolean or not self.whole(b):
            return None
        if frame.row(b) == row and b.rank == a.rank:
            return frame.back(self.node(op.removeprefix("aten."), [a.base, b.base], a.count), row[0])
        if op == "aten.mul" and a.rank == 2 and 1 in (a.count, b.count):
            a, b = (a, b) if b.count == 1 else (b, a)
            return frame.back(self.node("mul", [a.base, b.base], a.count), (a.count,))
        return None

    def _by_infinite(self, op: str, tensors: Sequence[Tensor], at: int) -> Strided:
        """The constant `at` has infinite numbers, as a mask of attention has them, which no parameter may have."""
        c, others = tensors[at], [t for i, t in enumerate(tensors) if i != at]
        assert isinstance(c, Const)
        if op == "aten.where":
            condition, other = others
            value = c.tensor.flatten()[0].item()
            if at == 0 or not (c.tensor == value).all():
                raise Refused("got infinite numbers beside finite ones in a choice, expected one number (masked_fill)")
            condition = self.inverted(condition) if at == 2 else condition
            return self.elementwise("aten.masked_fill.Scalar", [other, condition], [value])
        x = others[0]
        assert isinstance(x, Strided)  # a sum of constants is one
        c = c if op == "aten.add" else replace(c, tensor=-c.tensor, name=None)
        finite = c.tensor.masked_fill(c.tensor.isinf(), 0)
        made = self.elementwise("aten.add", [x, replace(c, tensor=finite, name=None)]) if finite.any() else x
        for value in {*c.tensor[c.tensor.isinf()].tolist()}:  # a sum with it, not the number: NaN stays NaN
            here, summed = replace(c, tensor=c.tensor == value, name=None), self.elementwise("aten.add.Scalar", [x], [value])
            made = self.elementwise("aten.where", [here, summed, made])
        return made

    def inverted(self, truths: Tensor) -> Tensor:
        return Const(truths.tensor == 0) if isinstance(truths, Const) else self.elementwise("aten.logical_not", [truths])

    def _last_is_linear(self, a: Strided, b: Strided) -> bool:
        """Whether a product's factors should change places: x0 * (W x) is how the cross layers are known."""
        ops = {n.outputs[0]: n.op for n in self.nodes}
        return ops.get(a.base) == "linear" and ops.get(b.base) != "linear"

    def permuted_whole(self, t: Strided) -> bool:
        """Whether it shows each element of its value once, in whatever order."""
        atoms = merged(sorted(t.atoms, key=lambda a: -a.stride))
        run = not atoms or (len(atoms) == 1 and atoms[0].stride == 1)
        return run and t.offset == 0 and t.count == self.width(t.base)

    def _on_base(self, op: str, t: Strided, args: Sequence[Plain]) -> Strided:
        width = self.width(t.base)
        if op in ACTIVATIONS:
            base = self.node("activation", [t.base], width, attrs=Attrs(activation=ACTIVATIONS[op]))
        else:
            call = AtenCall(op, (Window(0, (width,), (1,)),), tuple(_plain(a) for a in args), (width,))
            base = self.node("aten", [t.base], width, attrs=Attrs(aten=call))
        return replace(t, base=base, boolean=op in TRUTHS)

    def _prefix(self, op: str, params: Sequence[str]) -> str:
        return params[0].removesuffix(".weight") if op == "linear" and params[0].endswith(".weight") else self.name

    def _unique(self, name: str) -> str:
        taken, count, plain = {n.name for n in self.nodes} | RESERVED, 1, name
        while name in taken:
            count += 1
            name = f"{plain}.{count}"
        return name


def aligned(c: Const, frame: Frame) -> Const:
    """A constant that lines up with rows: without the batch's dimension, whose size it must have as 1.

    Raises:
        Refused: it has a size of its own there, so that it would tell rows apart.
    """
    sizes = [1] * (frame.rank - c.tensor.ndim) + list(c.tensor.shape)
    if sizes[frame.at] != 1 and (c.tensor == c.tensor.flatten()[:1]).all():
        return aligned(Const(c.tensor.flatten()[0]), frame)  # one number, of whatever size: `zeros_like` of what has the batch
    if sizes[frame.at] != 1:
        raise Refused(f"got a constant {tuple(c.tensor.shape)} along the batch, expected each row to be computed from itself")
    split = [1] * ((frame.outer > 1) + (frame.inner > 1))
    sizes = sizes[: frame.at] + split + sizes[frame.at + 1 :]
    while sizes and sizes[0] == 1:
        del sizes[0]
    shape: Shape = tuple(sizes)
    return c if shape == tuple(c.tensor.shape) else Const(c.tensor.reshape(shape))


def _plain(value: Plain) -> Plain:
    if isinstance(value, float) and value in (inf, -inf):
        return "inf" if value > 0 else "-inf"
    return value
