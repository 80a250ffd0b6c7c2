"""Goes through a module's ATen calls once, in order, and gives each a meaning: a constant worked out now, raw inputs on
their way to a lookup, a view that costs nothing, or nodes of the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from dpiframe_core.compiler.constants import FILLED, batch_of, filled, worked_out
from dpiframe_core.compiler.lookups import Bags, Indices, Lookups, Raw
from dpiframe_core.compiler.operations.arguments import as_its_type, endless, flat
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.integers import Integers
from dpiframe_core.compiler.operations.operation import operation
from dpiframe_core.compiler.operations.positions import RowStarts
from dpiframe_core.compiler.operations.strided import Refused, Size, Strided, expanded
from dpiframe_core.compiler.raw import RawInputs
from dpiframe_core.compiler.recurrent import RECURRENT, attentive, recurrence
from dpiframe_core.compiler.trace import Trace, Verbatim, source_line
from dpiframe_core.compiler.views import INTEGERS, RESHAPES, SAME, size_of, view
from dpiframe_core.errors import InputError
from kernels.recurrent.attentive_gru import OPERATOR as ATTENTIVE

_IGNORED = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range_for_size.default"}
_DROPOUTS = {f"aten.{name}.default" for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")}
# Of truths, which torch gives as truths, too.
_COUNTING = {"add", "sum", "cumsum", "scatter_add", "scatter_reduce", "index_put", "index_add"}
# What an operation raises for operands that nobody thought of.
_UNTHOUGHT = (AttributeError, KeyError, IndexError, TypeError, RuntimeError)


class Lowering:
    """One pass over a trace.

    Args:
        columns: for each input the raw column of each element of a row, int64[sizes of a row].
        complete: widths of "x" and "w" as an earlier pass found them; 0 before that.
    """

    def __init__(self, trace: Trace, lookups: Lookups, columns: Sequence[Indices], complete: dict[str, int]) -> None:
        self._trace = trace
        self.emitter = Emitter(complete)
        self._inputs = RawInputs(self.emitter, lookups)
        self._integers = Integers(self.emitter)
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
                self._values[node] = made = self._value(node)
                _check_sizes(made, node)
            except Refused as error:
                got, _, expected = str(error).removeprefix("got ").partition(", expected ")
                raise InputError(where, Verbatim(got), expected) from None
        result = self._values[self._trace.result]
        if isinstance(result, Raw):
            result = self._inputs.as_numbers(result)
        if not isinstance(result, Strided):
            raise InputError("module output", "a constant", "scores that depend on the features")
        return self._integers.checked(result)

    def _value(self, node: fx.Node) -> Any:
        target, found = str(node.target), node.meta.get("val")
        if target in _IGNORED:
            return None
        if target in ("aten.item.default", "aten._local_scalar_dense.default"):
            of = self._values[node.args[0]]  # type: ignore[index]
            if not isinstance(of, Const):
                raise Refused("got item() of a value of the batch, expected the same operations for every batch")
            return of.tensor.item()
        if isinstance(found, int):
            return found
        if isinstance(found, torch.SymInt):
            if found.node.expr.free_symbols != {self._trace.batch}:
                raise Refused(f"got the number {found.node.expr} of a tensor, expected one that Python holds")
            return size_of(found)
        if target == "<built-in function getitem>":
            made = self._values[node.args[0]][node.args[1]]  # type: ignore[index]
            if made is None:
                raise Refused(f"got result {node.args[1]} of a call, expected the first")
            return made
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Refused(f"got {target}, expected an ATen operation")
        if target in _DROPOUTS and not (a := self._arguments(node))["train"]:
            return a["input"]
        seeded = torch.Tag.nondeterministic_seeded in node.target.tags
        if seeded and "attention" not in target and target not in RECURRENT:  # the dropout of these is looked at there
            raise Refused(f"got {target}, expected nothing random")
        a = self._arguments(node)
        sizes = [size_of(s) for s in found.shape] if isinstance(found, torch.Tensor) else []
        # Of the other it takes sizes and type alone.
        if found is not None and target.endswith("_as.default") and isinstance(a["self"], Const):
            a["other"] = Const(torch.empty([s.count for s in sizes], dtype=found.dtype))
        inside = flat(a)
        if target in FILLED and isinstance(found, torch.Tensor):
            return filled(target, a, sizes, found.dtype)
        indexing = target in ("aten.index.Tensor", "aten.index_put.default") or "embedding_bag" in target
        if any(isinstance(v, RowStarts) for v in inside) and not indexing:
            return _numbered(target, a, inside, sizes)
        if any(isinstance(v, Bags) for v in inside):
            return self._inputs.bags(target, a)
        if any(isinstance(v, Raw) for v in inside):
            made = self._inputs.value(target, a, sizes, found)
            if made is not None:
                return made
            a = {name: self._inputs.as_numbers(value) for name, value in a.items()}
            inside = flat(a)
        if any(isinstance(v, Strided) for v in inside):
            if target == ATTENTIVE:
                return attentive(self.emitter, a)
            if target in RECURRENT:
                read = {result.args[1] for result in node.users if result.users}
                return recurrence(self.emitter, target, a, read)  # type: ignore[arg-type]
            return self._of_values(node, target, a, sizes, found)
        return worked_out(node, target, a, sizes)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """By name, defaults included, with values in place of nodes."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = dict(zip((s.name for s in schema), node.args, strict=False)) | dict(node.kwargs)
        filled = {s.name: given.get(s.name, s.default_value if s.has_default_value() else None) for s in schema}
        return {name: fx.map_arg(value, lambda n: self._values[n]) for name, value in filled.items()}

    def _of_values(self, node: fx.Node, target: str, a: dict[str, Any], sizes: Sequence[Size], found: Any) -> Any:
        first = next(v for v in a.values() if isinstance(v, Strided | list | tuple))
        if isinstance(first, Strided):
            before = node.args[0].meta["val"].dtype if target in SAME else None  # type: ignore[union-attr]
            if target in SAME and found.dtype not in (*INTEGERS, torch.float32, torch.bool):
                raise Refused(f"got a cast to {found.dtype}, expected float32 values throughout")
            if before is not None and (cast := self._cast(first, before, found.dtype)) is not first:
                return cast
            seen = view(self.emitter, target, first, a, sizes)
            if isinstance(seen, Strided):
                self._integers.follow(target, a, [seen])
                return replace(seen, boolean=found.dtype == torch.bool)
            if seen is not None:
                return seen
        given = {v.meta["val"].dtype for v in node.all_input_nodes if isinstance(v.meta["val"], torch.Tensor)}
        wanted = a.get("dtype")
        if (wanted in INTEGERS and torch.float32 in given) or (wanted == torch.bool and given != {torch.bool}):
            raise Refused(f"got {target} with dtype={wanted}, expected a cast ahead of it")
        made: Strided | Const | list[Strided] | None = self._copied(node, target, a, sizes, found)
        if made is None:
            try:
                made = operation(self.emitter, target, as_its_type(target, a, getattr(found, "dtype", torch.float32)))
            except _UNTHOUGHT as error:
                what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise Refused(f"got {target} of such operands ({what}), expected another spelling") from error
        if isinstance(made, Const):
            return made
        if made is None:
            raise Refused(f"got {target}, expected an operation that docs/compile.md lists")
        if isinstance(found, tuple | list) or found.dtype in INTEGERS:
            self._integers.follow(target, a, made if isinstance(made, list) else [made])
        if isinstance(made, list):
            return [replace(one, boolean=f.dtype == torch.bool) for one, f in zip(made, found, strict=False)]
        if isinstance(found, tuple | list):
            return made, None, None
        if found.dtype == torch.bool and target.split(".")[1] in _COUNTING:
            made = self.emitter.elementwise("aten.ne.Scalar", [made], [0])
        return replace(made, boolean=found.dtype == torch.bool)  # also of masks side by side

    def _cast(self, value: Strided, before: torch.dtype, after: torch.dtype) -> Strided:
        if after in INTEGERS and before is torch.float32:
            made = self.emitter.elementwise("aten.trunc", [value])
            self._integers.add([made])
            return made
        if after is torch.bool and not value.boolean:
            return self.emitter.elementwise("aten.ne.Scalar", [value], [0])
        return value

    def _copied(
        self, node: fx.Node, target: str, a: Mapping[str, Any], sizes: Sequence[Size], found: Any
    ) -> Strided | Const | None:
        """What a call writes over a value, none of which is left."""
        if target == "aten.zero.default":
            return filled(target, {}, sizes, found.dtype)
        if target != "aten.copy.default":
            return None
        if isinstance(a["src"], Strided):
            before = node.args[1].meta["val"].dtype  # type: ignore[union-attr]
            return expanded(self._cast(a["src"], before, found.dtype), sizes)
        return Const(a["src"].tensor.to(found.dtype).expand([s.count for s in sizes]), None, batch_of(sizes))


def _numbered(target: str, a: Mapping[str, Any], inside: Sequence[Any], sizes: Sequence[Size]) -> RowStarts:
    """The numbers of the rows, under other sizes; they are good as an index alone."""
    whole = target == "aten.slice.Tensor" and a["start"] in (None, 0) and a["step"] == 1 and endless(a["end"])
    if not whole and target not in {*SAME, *RESHAPES, "aten.unsqueeze.default", "aten.expand.default"}:
        raise Refused(f"got {target} of the numbers of the rows, expected each row to be computed from itself")
    return RowStarts(next(v.step for v in inside if isinstance(v, RowStarts)), tuple(sizes))


def _check_sizes(made: Any, node: fx.Node) -> None:
    """A value must have the sizes that torch saw, the batch among them: what mixed rows in broadcasting had others."""
    found = node.meta.get("val")
    if isinstance(made, Strided) and isinstance(found, torch.Tensor):
        sizes = [size_of(s) for s in found.shape]
        if made.sizes != sizes:
            got = [("rows" if s.count == 1 else f"{s.count} * rows") if s.batch else s.count for s in sizes]
            raise Refused(f"got a result of sizes {got}, expected each row to be computed from itself")


def _module(node: fx.Node) -> str:
    """The part of the model that a call belongs to: the first submodule on its way, for people."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    names = [str(path).removeprefix("module").removeprefix(".").split(".")[0] for path, _ in stack]
    return next((name for name in names if name), "model")
