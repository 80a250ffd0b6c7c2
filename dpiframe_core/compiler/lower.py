"""Goes through a module's ATen calls once, in order, and gives each a meaning: a constant worked out now, raw inputs on
their way to a lookup, a view that costs nothing, or nodes of the graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from dpiframe_core.compiler.lookups import Bags, Indices, Lookups, Raw
from dpiframe_core.compiler.operations.arguments import endless, is_number, number
from dpiframe_core.compiler.operations.emit import Const, Emitter
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
_COUNTING = (
    "add",
    "sum",
    "cumsum",
    "scatter_add",
    "scatter_reduce",
    "index_put",
)  # of truths, which torch gives as truths, too
# Their result has the sizes they are told and one value throughout, so a batch of them may be one row.
_FILLED = {
    f"aten.{n}" for n in (
        "zeros.default", "ones.default", "full.default", "new_zeros.default", "new_ones.default", "new_full.default",
        "zeros_like.default", "ones_like.default", "full_like.default", "scalar_tensor.default",
    )
}  # fmt: skip


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
        return result

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
        if target == "aten.dropout.default" and not (a := self._arguments(node))["train"]:
            return a["input"]
        seeded = torch.Tag.nondeterministic_seeded in node.target.tags
        if seeded and "attention" not in target and target not in RECURRENT:  # the dropout of these is looked at there
            raise Refused(f"got {target}, expected nothing random")
        a = self._arguments(node)
        sizes = [size_of(s) for s in found.shape] if isinstance(found, torch.Tensor) else []
        # Of the other it takes sizes and type alone.
        if found is not None and target.endswith("_as.default") and isinstance(a["self"], Const):
            a["other"] = Const(torch.empty([s.count for s in sizes], dtype=found.dtype))
        inside = _flat(a)
        if target in _FILLED and isinstance(found, torch.Tensor):
            return self._filled(target, a, sizes, found)
        indexing = target in ("aten.index.Tensor", "aten.index_put.default") or "embedding_bag" in target
        if any(isinstance(v, RowStarts) for v in inside) and not indexing:
            return _numbered(target, a, inside)
        if any(isinstance(v, Bags) for v in inside):
            return self._inputs.bags(target, a)
        if any(isinstance(v, Raw) for v in inside):
            made = self._inputs.value(target, a, sizes, found)
            if made is not None:
                return made
            a = {name: self._inputs.as_numbers(value) for name, value in a.items()}
            inside = _flat(a)
        if any(isinstance(v, Strided) for v in inside):
            if target == ATTENTIVE:
                return attentive(self.emitter, a)
            if target in RECURRENT:
                read = {result.args[1] for result in node.users if result.users}
                return recurrence(self.emitter, target, a, read)  # type: ignore[arg-type]
            return self._of_values(node, target, a, sizes, found)
        return self._constant(node, target, a, sizes)

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
                return replace(seen, boolean=found.dtype == torch.bool)
            if seen is not None:
                return seen
        given, wanted = (
            {v.meta["val"].dtype for v in node.all_input_nodes if isinstance(v.meta["val"], torch.Tensor)},
            a.get("dtype"),
        )
        if (wanted in INTEGERS and torch.float32 in given) or (wanted == torch.bool and given != {torch.bool}):
            raise Refused(f"got {target} with dtype={wanted}, expected a cast ahead of it")
        a = _as_its_type(target, a, getattr(found, "dtype", torch.float32))
        if target == "aten.index_put.default" and isinstance(a["indices"][0], RowStarts):
            _check_rows(node)
        made: Strided | Const | list[Strided] | None = self._copied(node, target, a, sizes, found)
        if made is None:
            try:
                made = operation(self.emitter, target, a)
            except (
                AttributeError,
                KeyError,
                IndexError,
                TypeError,
                RuntimeError,
            ) as error:  # of operands that nobody thought of
                what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                raise Refused(f"got {target} of such operands ({what}), expected another spelling") from error
        if isinstance(made, Const):
            return made
        if made is None:
            raise Refused(f"got {target}, expected an operation that docs/compile.md lists")
        if isinstance(made, list):
            return [replace(one, boolean=f.dtype == torch.bool) for one, f in zip(made, found, strict=False)]
        if isinstance(found, tuple | list):
            return made, None, None
        if found.dtype == torch.bool and target.split(".")[1] in _COUNTING:
            made = self.emitter.elementwise("aten.ne.Scalar", [made], [0])
        return replace(made, boolean=found.dtype == torch.bool)  # also of masks side by side

    def _cast(self, value: Strided, before: torch.dtype, after: torch.dtype) -> Strided:
        if after in INTEGERS and before is torch.float32:
            return self.emitter.elementwise("aten.trunc", [value])
        if after is torch.bool and not value.boolean:
            return self.emitter.elementwise("aten.ne.Scalar", [value], [0])
        return value

    def _copied(
        self, node: fx.Node, target: str, a: Mapping[str, Any], sizes: Sequence[Size], found: Any
    ) -> Strided | Const | None:
        """What a call writes over a value, none of which is left."""
        if target == "aten.zero.default":
            return self._filled(target, {}, sizes, found)
        if target != "aten.copy.default":
            return None
        if isinstance(a["src"], Strided):
            before = node.args[1].meta["val"].dtype  # type: ignore[union-attr]
            return expanded(self._cast(a["src"], before, found.dtype), sizes)
        counts = [s.count for s in sizes]
        return Const(
            a["src"].tensor.to(found.dtype).expand(counts), None, next((i for i, s in enumerate(sizes) if s.batch), None)
        )

    def _filled(self, target: str, a: Mapping[str, Any], sizes: Sequence[Size], found: torch.Tensor) -> Const:
        value = a.get("fill_value", a.get("s"))
        value = value if value is not None else float("ones" in target)
        batch = next((i for i, s in enumerate(sizes) if s.batch), None)
        return Const(torch.full([s.count for s in sizes], value, dtype=found.dtype), None, batch)

    def _constant(self, node: fx.Node, target: str, a: dict[str, Any], sizes: Sequence[Size]) -> Any:
        """Worked out now, for a batch of one row where a batch is asked for."""
        sized = any(isinstance(v, Size | RowStarts) for v in _flat(a))
        if target.startswith("aten.arange.") and isinstance(a["end"], Size) and a.get("start", 0) == 0:
            return RowStarts(a.get("step", 1))
        if sized and target not in ("aten.expand.default", "aten.repeat.default", "aten.view.default", "aten.reshape.default"):
            raise Refused(f"got {target} with the rows of the batch, expected each row to be computed from itself")
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        positional = [_real(a[s.name]) for s in arguments if not s.kwarg_only]
        named = {s.name: _real(a[s.name]) for s in arguments if s.kwarg_only}
        with torch.no_grad():
            made = node.target(*positional, **named)  # type: ignore[operator]
        batch = next((i for i, s in enumerate(sizes) if s.batch), None)
        if not sized and isinstance(made, torch.Tensor) and not _alike(node, a, made, batch):
            raise Refused(f"got {target} over the rows of a constant, expected each row to be computed from itself")
        name = next((v.name for v in a.values() if isinstance(v, Const)), None) if target in SAME else None
        if isinstance(made, list | tuple):
            return [Const(m) for m in made]
        return Const(made, name, batch)


def _alike(node: fx.Node, a: Mapping[str, Any], made: torch.Tensor, batch: int | None) -> bool:
    """Whether constants of two rows give what those of one gave, row by row."""
    if all(not isinstance(v, Const) or v.batch_dim is None for v in _flat(a)):
        return True
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    positional = [_real(a[s.name], 2) for s in arguments if not s.kwarg_only]
    named = {s.name: _real(a[s.name], 2) for s in arguments if s.kwarg_only}
    with torch.no_grad():
        two = node.target(*positional, **named)  # type: ignore[operator]
    wanted = made if batch is None else made.repeat_interleave(2, batch)
    return bool(two.shape == wanted.shape and torch.allclose(two.float(), wanted.float(), equal_nan=True))


def _as_its_type(target: str, a: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A number that is put into integers or truths is one itself. Powers of integers are whole where they are no fractions."""
    whole = dtype in INTEGERS
    if (whole or dtype is torch.bool) and is_number(a.get("value")):
        value = number(a["value"])
        return {**a, "value": int(value) if whole else bool(value)}
    if whole and target.startswith("aten.pow."):
        exponent = a["exponent"].tensor if isinstance(a["exponent"], Const) else a["exponent"]
        if isinstance(exponent, Strided) or bool(torch.as_tensor(exponent < 0).any()):
            raise Refused("got a power of integers by what may be below 0, expected numbers: .float() ahead of it")
    return a


def _check_rows(node: fx.Node) -> None:
    """x[arange(n), i] writes into each row what is its own, if the numbers of the rows line up with the positions."""
    rows, *others = [[] if i is None else list(i.meta["val"].shape) for i in node.args[1]]  # type: ignore[union-attr]
    if any(len(o) != len(rows) for o in others) or not size_of(rows[0]).batch:
        raise Refused("got an assignment by an index of rows of another rank, expected arange(n)[:, None] for i[n, k]")


def _numbered(target: str, a: Mapping[str, Any], inside: Sequence[Any]) -> Any:
    """The numbers of the rows, under other sizes; they are good as an index alone."""
    whole = target == "aten.slice.Tensor" and a["start"] in (None, 0) and a["step"] == 1 and endless(a["end"])
    if not whole and target not in {*SAME, *RESHAPES, "aten.unsqueeze.default", "aten.expand.default"}:
        raise Refused(f"got {target} of the numbers of the rows, expected each row to be computed from itself")
    return next(v for v in inside if isinstance(v, RowStarts))


def _check_sizes(made: Any, node: fx.Node) -> None:
    """A value must have the sizes that torch saw, the batch among them: what mixed rows in broadcasting had others."""
    found = node.meta.get("val")
    if isinstance(made, Strided) and isinstance(found, torch.Tensor):
        sizes = [size_of(s) for s in found.shape]
        if made.sizes != sizes:
            got = [("rows" if s.count == 1 else f"{s.count} * rows") if s.batch else s.count for s in sizes]
            raise Refused(f"got a result of sizes {got}, expected each row to be computed from itself")


def _flat(a: Mapping[str, Any]) -> list[Any]:
    """The arguments, and what lists among them hold."""
    return [v for value in a.values() for v in (value if isinstance(value, list | tuple) else [value])]


def _real(value: Any, rows: int = 1) -> Any:
    if isinstance(value, list | tuple):
        return [_real(v, rows) for v in value]
    if isinstance(value, Size):
        return value.count
    if isinstance(value, Const) and value.batch_dim is not None and rows > 1:
        return value.tensor.repeat_interleave(rows, value.batch_dim)
    return value.tensor if isinstance(value, Const) else value


def _module(node: fx.Node) -> str:
    """The part of the model that a call belongs to: the first submodule on its way, for people."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    names = [str(path).removeprefix("module").removeprefix(".").split(".")[0] for path, _ in stack]
    return next((name for name in names if name), "model")
