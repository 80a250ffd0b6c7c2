"""Takes a module through torch.export: a flat, functional list of ATen calls with a dynamic number of rows, its parameters and
the source line behind each call. Knows no graph of ours.
"""

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx

from dpiframe_core.compiler.constant_masks import known_masks
from dpiframe_core.compiler.examples import Scored
from dpiframe_core.compiler.torch_modules import exportable, fixing_rows, spelled_out
from dpiframe_core.errors import InputError

_TORCH = f"{Path(torch.__file__).parent}/"  # torch_rechub lies beside it
_HERE = f"{Path(__file__).parent}/"
# Their results are tensors of their own, which a reshape's or a dropout's may or may not be.
_FRESH = {
    f"aten.{name}" for name in (
        "linear.default", "matmul.default", "mm.default", "bmm.default", "batch_norm.default", "add.Tensor", "sub.Tensor",
        "mul.Tensor", "div.Tensor", "sum.dim_IntList", "mean.dim", "cat.default", "stack.default", "clone.default",
        "lift_fresh_copy.default", "new_zeros.default", "zeros_like.default",
    )
}  # fmt: skip
_UNCHANGED = "nothing that the module changes (an embedding with max_norm: scale its rows, then set max_norm to None)"


class Verbatim(str):
    """Text that an error repeats as it stands, without quotes."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a module computes.

    Attributes:
        nodes: the calls that the scores need, in order; `result` is the one whose value holds the scores.
        tensors: placeholder -> parameter, buffer or constant, under its name in the module.
        inputs: placeholders of the features, in order. batch: the symbol for the number of rows.
    """

    nodes: tuple[fx.Node, ...]
    result: fx.Node
    tensors: dict[fx.Node, tuple[str, torch.Tensor]]
    inputs: tuple[fx.Node, ...]
    batch: Any


def traces(scored: Scored, values: Sequence[torch.Tensor]) -> Iterator[Trace]:
    """A module in eval mode, traced on example values (dimension 0 is the batch): as torch.export has it, unless a call there
    changes a value. Then, for who cannot take that over, of fewer operators.

    Raises:
        InputError: the module does not run; control flow that depends on values, a fixed number of rows, or changed buffers;
            with the source line.
    """
    exported = _exported(scored, values)
    functional = made_functional(exported.graph)
    if functional:
        yield _read(scored, exported, exported.graph)
    with _explained(scored, values):
        graph = _in_fewer(exported.graph_module) if functional else None
        if graph is None or not made_functional(graph):
            exported = exported.run_decompositions(spelled_out())  # takes longer than all before
            graph = exported.graph
    yield _read(scored, exported, graph)


def _exported(scored: Scored, values: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    """By values of the module's buffers, if it branches on a number that it keeps there."""
    try:
        with _explained(scored, values):
            return _export(scored, values)
    except _Branch:
        if all(buffer.numel() != 1 for buffer in scored.buffers()):
            raise
    with _explained(scored, values, numbers=True):
        return _export(scored, values)


def _export(scored: Scored, values: Sequence[torch.Tensor]) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=1)
    return torch.export.export(scored, tuple(values), dynamic_shapes=(tuple({0: rows} for _ in values),))


def _in_fewer(module: fx.GraphModule) -> fx.Graph:
    """The same calls of fewer operators, placeholders in the same order. No call changes a value."""
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with fx.traceback.preserve_node_meta():  # source lines
        return make_fx(fx.Interpreter(module).run, spelled_out(), "fake", pre_dispatch=True)(*values).graph


class _Branch(InputError):
    """A branch on a value that the trace does not know."""


@contextmanager
def _tracing(scored: Scored, numbers: bool = False) -> Iterator[None]:
    with _quiet(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch about itself
        with exportable(), known_masks(scored, numbers):
            yield


@contextmanager
def _explained(scored: Scored, values: Sequence[torch.Tensor], numbers: bool = False) -> Iterator[None]:
    """Where torch's tracing runs, its errors as what is to be changed in the module. numbers: see `known_masks`."""
    try:
        with _tracing(scored, numbers):
            yield
    except InputError:
        raise
    except Exception as error:  # whatever the module's code raised, too
        _try(scored, values)
        if "data-dependent" in str(error):
            got = Verbatim("a branch that depends on values of the batch")
            raise _Branch(f"module: {_origin(error)}", got, "the same operations for every batch") from error
        if "FakeTensor" in str(error) and _is_in(error, "nn/modules/rnn.py", "nn/utils/rnn.py"):
            got = Verbatim("a packed sequence, whose sizes are values of the batch")
            raise InputError(f"module: {_origin(error)}", got, "the recurrence over the padded sequence") from error
        if "assigned during export" in str(error):
            what = re.search(r"attributes? (.*) (?:was|were) assigned", str(error))
            raise InputError("module", what and what[1], _UNCHANGED) from error
        if "specialized it to be a constant" in str(error):
            rule = "any number: x.shape[0] for len(x), and no recurrence over rows"
            raise InputError(f"module: {_fixed_at(scored, values)}", Verbatim("a fixed number of rows"), rule) from error
        if "Constraints violated" in str(error):
            bound = re.search(r"guard (\d+) <= L\[", str(error))
            got = Verbatim("operations that hold for some numbers of rows alone" + (f", from {bound[1]} on" if bound else ""))
            expected = "any number: squeeze(dim) for squeeze(), x[:, i, j] for masked_select, no convolution over rows, "
            expected += "cdist(.., compute_mode='donot_use_mm_for_euclid_dist')"
            raise InputError("module", got, expected) from error
        raise InputError(
            f"module: {_origin(error)}", Verbatim(_first_line(error)), "a module that torch.export takes"
        ) from error


def _fixed_at(scored: Scored, values: Sequence[torch.Tensor]) -> str:
    """The user's line at which a trace takes the number of rows for a constant. torch does not say: it is traced once more."""
    stacks: list[traceback.StackSummary] = []
    with contextlib.suppress(Exception), _tracing(scored), fixing_rows(stacks):
        _export(scored, values)
    return _last_line(stacks[0]) if stacks else "no source line"


def made_functional(graph: fx.Graph) -> bool:
    """Whether no call of a graph changes a value; those that change one which they alone read are replaced first."""
    settled = set[fx.Node]()  # calls replaced, whose results are as good as fresh
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return False  # it has graphs of its own
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            continue
        changed, functional = node.args[0], _functional(node)
        alone = isinstance(changed, fx.Node) and set(changed.users) == {node}
        alone = alone and (str(changed.target) in _FRESH or changed in settled)
        if functional is None or not (alone or functional is torch.ops.aten.detach.default):
            return False
        node.target = functional
        settled |= {node} if alone else set()
    return True


def _functional(node: fx.Node) -> Any:
    """The operator that gives what a call changes its first argument to; None: there is none, or of another dtype."""
    name, _, overload = str(node.target).removeprefix("aten.").partition("_.")
    packet = getattr(torch.ops.aten, name, None)
    kinds = {n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)} - {torch.bool}
    return getattr(packet, overload, None) if len(kinds) == 1 else None


def _read(scored: Scored, exported: torch.export.ExportedProgram, graph: fx.Graph) -> Trace:
    signature = exported.graph_signature
    buffers, parameters = signature.buffers_to_mutate, getattr(signature, "parameters_to_mutate", {})  # torch 2.9 on
    changed = sorted({*buffers.values(), *parameters.values(), *signature.user_inputs_to_mutate.values()})
    if changed:
        raise InputError("module", [_plain(name) for name in changed], _UNCHANGED)
    *calls, output = (n for n in graph.nodes if n.op != "placeholder")
    stored: dict[str, Any] = dict(exported.constants)
    stored |= dict([*scored.named_buffers(remove_duplicate=False), *scored.named_parameters(remove_duplicate=False)])
    first_name = {id(t): name for name, t in reversed(stored.items())}  # tied weights are one table or parameter
    tensors, inputs = {}, []
    for spec, node in zip(signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        else:
            assert spec.target is not None
            tensor = stored[spec.target]
            tensors[node] = (_plain(first_name[id(tensor)]), tensor.detach())
    (result,) = output.args[0]
    batch = inputs[0].meta["val"].shape[0]
    if isinstance(batch, int):
        raise InputError("module", f"{batch} rows", "a module that takes any number of rows")
    used = {result}
    for node in reversed(calls):
        used |= {*node.all_input_nodes} if node in used else set()
    return Trace(tuple(n for n in calls if n in used), result, tensors, tuple(inputs), batch.node.expr)


def source_line(node: fx.Node) -> str:
    """Where in the user's code a call comes from: "model.py:12, `scores = a @ b`"."""
    frames = [f for f in _frames(node.meta.get("stack_trace") or "") if not _ours(f[0])]
    if not frames:
        return "no source line"
    file, line, text = frames[-1]
    return f"{Path(file).name}:{line}" + (f", `{text}`" if text else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and prints, whole graphs beside the error that says it all. Its loggers come into being late and
    write by handlers of their own, so nothing short of the level of all of them keeps it quiet.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def _try(scored: Scored, values: Sequence[torch.Tensor]) -> None:
    """A plain call on the example, where a trace failed: what fails here, too, is said in the module's own words.

    Raises:
        InputError: the call fails; with the module's line, and the features where it asks for another one.
    """
    try:
        with torch.no_grad():
            scored(*values)
    except InputError:
        raise
    except KeyError as error:
        got = Verbatim(f"a forward that asks for {error.args[0]!r}") if error.args else error
        raise InputError(f"module: {_origin(error)}", got, f"one of the features, {', '.join(scored.names)}") from error
    except Exception as error:  # whatever the module's code raised
        if isinstance(error, IndexError) and "index out of range in self" in str(error):
            return  # an id of the example, which is held against the schema with its feature's name
        said = Verbatim(f"{type(error).__name__}: {_first_line(error)}")
        raise InputError(f"module: {_origin(error)}", said, "a forward that runs on the example") from error


def _frames(text: str) -> list[tuple[str, str, str]]:
    """(file, line, code) of each frame of a formatted stack."""
    frames: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith('File "'):
            file, _, rest = stripped.removeprefix('File "').partition('", line ')
            frames.append((file, rest.partition(",")[0], ""))
        elif frames and not frames[-1][2] and stripped:
            frames[-1] = (*frames[-1][:2], stripped)
    return frames


def _ours(file: str) -> bool:
    return file.startswith((_TORCH, _HERE))


def _origin(error: BaseException) -> str:
    """The last line of the user's code on the way to an error."""
    return _last_line(traceback.extract_tb(error.__traceback__))


def _last_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """Of the user's code in a stack."""
    frames = [f for f in stack if not _ours(f.filename) and "/torch/" not in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else "no source line"


def _is_in(error: BaseException, *files: str) -> bool:
    """Whether one of torch's files is on the way to an error."""
    return any(f.filename.endswith(files) for f in traceback.extract_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _plain(name: str) -> str:
    return name.removeprefix("module.")
