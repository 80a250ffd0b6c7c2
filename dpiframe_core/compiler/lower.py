"""Goes through a module's ATen calls once, in order, and gives each a meaning: a constant worked out now, raw inputs on their way
to a lookup, a view that costs nothing, or nodes of the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from dpiframe_core.compiler.emit import Const, Emitter
from dpiframe_core.compiler.lookups import Bags, Lookups, Raw, Slot
from dpiframe_core.compiler.operations import cat, operation
from dpiframe_core.compiler.strided import BATCH, Atom, Refused, Size, Strided, merged
from dpiframe_core.compiler.trace import Trace, Verbatim, source_line
from dpiframe_core.compiler.views import SAME, raw_view, size_of, view
from dpiframe_core.errors import InputError

_IGNORED = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range_for_size.default"}
# Their result has the sizes they are told and one value throughout, so a batch of them may be one row.
_FILLED = {
    f"aten.{n}" for n in (
        "zeros.default", "ones.default", "full.default", "new_zeros.default", "new_ones.default", "new_full.default",
        "zeros_like.default", "ones_like.default", "full_like.default", "scalar_tensor.default",
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BagStarts:
    """arange(0, B * columns, step): where the bags of raw ids in a row begin."""

    step: int


class Lowering:
    """One pass over a trace.

    Args:
        columns: for each input the raw column of each element of a row, int64[sizes of a row].
        complete: widths of "x" and "w" as an earlier pass found them; 0 before that.
    """

    def __init__(self, trace: Trace, lookups: Lookups, columns: Sequence[np.ndarray[Any, Any]], complete: dict[str, int]) -> None:
        self._trace, self._lookups = trace, lookups
        self.emitter = Emitter(complete)
        self._values: dict[fx.Node, Any] = {
            node: Const(tensor, name) for node, (name, tensor) in trace.tensors.items()
        } | {node: Raw(at, np.zeros_like(at)) for node, at in zip(trace.inputs, columns, strict=True)}  # fmt: skip

    def run(self) -> Strided:
        """Writes the nodes and gives the scores.

        Raises:
            InputError: a call that cannot be taken over, with its name and source line.
        """
        for node in self._trace.nodes:
            where = f"module: {node.name} ({source_line(node)})"
            self.emitter.name, self.emitter.module = node.name, _module(node)
            try:
                self._values[node] = self._value(node)
            except Refused as error:
                got, _, expected = str(error).removeprefix("got ").partition(", expected ")
                raise InputError(where, Verbatim(got), expected) from None
        result = self._values[self._trace.result]
        if isinstance(result, Raw):
            result = self._numbers(result)
        if not isinstance(result, Strided):
            raise InputError("module output", "a constant", "scores that depend on the features")
        return result

    def _value(self, node: fx.Node) -> Any:
        target, found = str(node.target), node.meta.get("val")
        if target in _IGNORED:
            return None
        if isinstance(found, int | torch.SymInt):
            return size_of(found) if not isinstance(found, int) else found
        if target == "<built-in function getitem>":
            made = self._values[node.args[0]][node.args[1]]  # type: ignore[index]
            if made is None:
                raise Refused(f"got result {node.args[1]} of a call, expected the first")
            return made
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Refused(f"got {target}, expected an ATen operation")
        a = self._arguments(node)
        inside = _flat(a)
        sizes = [size_of(s) for s in found.shape] if isinstance(found, torch.Tensor) else []
        if target in _FILLED:
            return self._filled(target, a, sizes, found)
        if any(isinstance(v, Bags) for v in inside):
            return self._bags(target, a)
        if any(isinstance(v, Raw) for v in inside):
            return self._raw(target, a, sizes, found)
        if any(isinstance(v, Strided) for v in inside):
            return self._of_values(target, a, sizes, found)
        return self._constant(node, target, a, sizes)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """By name, defaults included, with values in place of nodes."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = dict(zip((s.name for s in schema), node.args, strict=False)) | dict(node.kwargs)
        filled = {s.name: given.get(s.name, s.default_value if s.has_default_value() else None) for s in schema}
        return {name: fx.map_arg(value, lambda n: self._values[n]) for name, value in filled.items()}

    def _of_values(self, target: str, a: dict[str, Any], sizes: Sequence[Size], found: Any) -> Any:
        first = next(v for v in a.values() if isinstance(v, Strided | list | tuple))
        if isinstance(first, Strided):
            if target in SAME and found.dtype not in (torch.float32, torch.bool):
                raise Refused(f"got a cast to {found.dtype}, expected float32 values throughout")
            if target in SAME and found.dtype == torch.bool and not first.boolean:
                return self.emitter.elementwise("aten.ne.Scalar", [first], [0])
            seen = view(self.emitter, target, first, a, sizes)
            if seen is not None:
                return seen
        made = operation(self.emitter, target, a)
        if made is None:
            raise Refused(f"got {target}, expected an operation that docs/compile.md lists")
        return (made, None, None) if isinstance(found, tuple | list) else made

    def _raw(self, target: str, a: dict[str, Any], sizes: Sequence[Size], found: Any) -> Any:
        look = self._lookups
        if target == "aten.embedding.default" and isinstance(a["indices"], Raw):
            return self._embedding(a["indices"], _weight(a["weight"]), a["padding_idx"])
        if "embedding_bag" in target and isinstance(a["indices"], Raw):
            return (self._embedding_bag(a), None, None, None)
        raws = [v for v in a.values() if isinstance(v, Raw)]
        if target == "aten.linear.default" and a["bias"] is None and a["input"].at.shape == (1,) and not a["input"].flat:
            weight = _weight(a["weight"])
            slot = look.scaled(int(a["input"].at[0]), weight.name or "", weight.tensor)
            if slot is not None:
                return self._slots([slot], (slot.width,))
        x = raws[0] if raws else None
        if target in ("aten.add.Tensor", "aten.sub.Tensor") and x is not None and len(raws) == 1 and self._is_ids(x):
            other = a["other"] if x is a["self"] else a["self"]
            if x is not a["self"] and "sub" in target:
                raise Refused("got ids subtracted from something, expected ids plus constants")
            return self._shifted(x, other, -1 if "sub" in target else 1)
        if x is not None and len(raws) == 1 and x is next(v for v in a.values() if isinstance(v, Raw | Strided)):
            ids = self._is_ids(x)
            if target in SAME and not ids and found.dtype not in (torch.float32, torch.float64):
                raise Refused(f"got numbers cast to {found.dtype}, expected float32; ids are those of categorical features")
            seen = raw_view(target, x, a, sizes)
            if seen is not None:
                return seen
        if target in ("aten.cat.default", "aten.stack.default") and all(isinstance(t, Raw) for t in a["tensors"]):
            return self._joined(target, a)
        numbers = {k: self._materialised(v) for k, v in a.items()}
        return self._of_values(target, numbers, sizes, found)

    def _materialised(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._materialised(v) for v in value]
        return self._numbers(value) if isinstance(value, Raw) else value

    def _is_ids(self, x: Raw) -> bool:
        features = {self._lookups.columns[at][0] for at in x.at.flat}
        return any(self._lookups.schema.feature(f).is_id for f in features)

    def _numbers(self, x: Raw) -> Strided:
        if x.flat:
            raise Refused("got rows joined into one dimension, expected each row to be computed from itself")
        return self._slots([self._lookups.number(int(at)) for at in x.at.flat], x.at.shape)

    def _joined(self, target: str, a: dict[str, Any]) -> Raw:
        parts: list[Raw] = a["tensors"]
        rank = parts[0].at.ndim + 1 + ("stack" in target)
        dim = a["dim"] % rank
        if dim == 0 or any(p.flat for p in parts):
            raise Refused("got rows put behind rows, expected each row to be computed from itself")
        join = np.stack if "stack" in target else np.concatenate
        return Raw(join([p.at for p in parts], dim - 1), join([p.shift for p in parts], dim - 1))

    def _shifted(self, x: Raw, other: Any, sign: int) -> Raw:
        shift = other.tensor.numpy() if isinstance(other, Const) else np.array(other)
        if not np.issubdtype(shift.dtype, np.integer):
            raise Refused("got ids plus a value, expected ids plus constant integers")
        if shift.ndim > x.at.ndim:
            shift = shift.reshape(shift.shape[1:])
        return Raw(x.at, np.broadcast_to(x.shift + sign * shift, x.at.shape), x.flat)

    def _embedding(self, raw: Raw, weight: Const, padding: int) -> Any:
        if raw.flat:
            raise Refused("got rows joined into one dimension, expected [rows, ..] ids")
        name = weight.name or ""
        bags = self._lookups.bag(raw, name, weight.tensor, padding if padding >= 0 else None, sums=True) if raw.at.size else None
        if bags:
            if raw.at.ndim != 1:
                raise Refused(f"got ids of sizes {raw.at.shape} a row of feature {bags.feature!r}, expected [rows, values]")
            return bags
        slots = self._lookups.embedded(raw, name, weight.tensor)
        return self._slots(slots, (*raw.at.shape, weight.tensor.shape[1]))

    def _embedding_bag(self, a: dict[str, Any]) -> Strided:
        raw, weight, starts = a["indices"], _weight(a["weight"]), a["offsets"]
        if not isinstance(starts, BagStarts) or a["per_sample_weights"] is not None or a["include_last_offset"]:
            raise Refused("got bags of their own sizes or weights, expected embedding_bag of ids [rows, values]")
        if a["mode"] == 2:
            raise Refused("got pooling 'max', expected sum or mean")
        mode, name, width = ("sum", "mean")[a["mode"]], weight.name or "", weight.tensor.shape[1]
        padding = a.get("padding_idx", -1)
        ids = raw.at.reshape(-1, starts.step)
        made = []
        for i in range(len(ids)):
            row = Raw(ids[i], raw.shift.reshape(ids.shape)[i])
            whole = padding is not None and padding >= 0
            bags = self._lookups.bag(row, name, weight.tensor, padding if whole else None, sums=False, mode=mode)
            if bags:
                made.append(self._slots([bags.slot], (1, width)))
                continue
            if whole:
                raise Refused("got a padding_idx for features of one value, expected none: every id is read")
            each = self._slots(self._lookups.embedded(row, name, weight.tensor), (starts.step, width))
            made.append(operation(self.emitter, f"aten.{mode}.dim" + ("_IntList" if mode == "sum" else ""),
                                  {"self": each, "dim": [1], "keepdim": True}))  # fmt: skip
        joined = cat(self.emitter, made, 1)
        return view(self.emitter, "aten.squeeze.dim", joined, {"dim": 1}, []) if len(ids) == 1 else joined  # type: ignore[return-value]

    def _bags(self, target: str, a: dict[str, Any]) -> Any:
        bags = next((v for v in a.values() if isinstance(v, Bags)), None)
        if bags is not None and target in SAME:
            return bags
        if bags is not None and target == "aten.sum.dim_IntList" and list(a["dim"]) in ([1], [-2]):
            width = bags.slot.width
            return self._slots([bags.slot], (1, width) if a["keepdim"] else (width,))
        raise Refused(f"got {target} of a feature of several values, expected the sum over its values, or nn.EmbeddingBag")

    def _slots(self, slots: Sequence[Slot], sizes: Sequence[int]) -> Strided:
        """The columns of some embeddings, of one width, as a tensor [B, *sizes]."""
        parts = [Strided(s.base, ((BATCH,), tuple(merged([Atom(s.width, 1)])) if s.width > 1 else ()), s.offset) for s in slots]
        joined = parts[0] if len(parts) == 1 else cat(self.emitter, parts, 1)
        assert isinstance(joined, Strided)
        return self.emitter.view(joined, [Size(1, True), *map(Size, sizes)])

    def _filled(self, target: str, a: Mapping[str, Any], sizes: Sequence[Size], found: torch.Tensor) -> Const:
        value = a.get("fill_value", a.get("s"))
        value = value if value is not None else float("ones" in target)
        batch = next((i for i, s in enumerate(sizes) if s.batch), None)
        return Const(torch.full([s.count for s in sizes], value, dtype=found.dtype), None, batch)

    def _constant(self, node: fx.Node, target: str, a: dict[str, Any], sizes: Sequence[Size]) -> Any:
        """Worked out now, for a batch of one row where a batch is asked for."""
        sized = any(isinstance(v, Size) for v in _flat(a))
        if target == "aten.arange.start_step" and isinstance(a["end"], Size) and a["start"] == 0:
            return BagStarts(a["step"])
        if sized and target not in ("aten.expand.default", "aten.repeat.default", "aten.view.default", "aten.reshape.default"):
            raise Refused(f"got {target} with the rows of the batch, expected each row to be computed from itself")
        tags = node.target.tags  # type: ignore[union-attr]
        if torch.Tag.nondeterministic_seeded in tags:
            raise Refused(f"got {target}, expected nothing random")
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        positional = [_real(a[s.name]) for s in arguments if not s.kwarg_only]
        named = {s.name: _real(a[s.name]) for s in arguments if s.kwarg_only}
        with torch.no_grad():
            made = node.target(*positional, **named)  # type: ignore[operator]
        batch = next((i for i, s in enumerate(sizes) if s.batch), None)
        name = next((v.name for v in a.values() if isinstance(v, Const)), None) if target in SAME else None
        if isinstance(made, list | tuple):
            return [Const(m) for m in made]
        return Const(made, name, batch)


def _flat(a: Mapping[str, Any]) -> list[Any]:
    """The arguments, and what lists among them hold."""
    return [
        v for value in a.values() for v in (value if isinstance(value, list | tuple) and not isinstance(value, Size) else [value])
    ]


def _real(value: Any) -> Any:
    if isinstance(value, Size):
        return value.count
    if isinstance(value, list | tuple):
        return [_real(v) for v in value]
    return value.tensor if isinstance(value, Const) else value


def _weight(value: Any) -> Const:
    if not isinstance(value, Const):
        raise Refused("got a table that is computed from the inputs, expected a parameter")
    return value if value.name else Const(value.tensor, "a computed table")


def _module(node: fx.Node) -> str:
    """The part of the model that a call belongs to: the first submodule on its way, for people."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    names = [str(path).removeprefix("module").removeprefix(".").split(".")[0] for path, _ in stack]
    return next((name for name in names if name), "model")
