"""Takes a module through torch.export: a flat, functional list of ATen calls with a dynamic number of rows, its parameters and
the source line behind each call. Knows no graph of ours.
"""

import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch.export.graph_signature import InputKind
from torch.nn import functional

from dpiframe_core.errors import InputError

Call = Literal["mapping", "keywords", "matrix"]
Output = str | int | Sequence[str | int] | None
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


class Verbatim(str):
    """Text that an error repeats as it stands, without quotes."""

    def __repr__(self) -> str:
        return str(self)


class Scored(nn.Module):
    """A module as a function from features to scores: takes them as it wants them, picks the scores, adds the sigmoid."""

    def __init__(self, module: nn.Module, names: Sequence[str], call: Call, output: Output, logits: bool) -> None:
        super().__init__()
        self.module = module
        self.names, self._call, self._output, self._logits = tuple(names), call, output, logits

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        if self._call == "matrix":
            columns = [v.to(torch.float32).reshape(v.shape[0], -1) for v in values]
            found = self.module(torch.cat(columns, 1))
        elif self._call == "keywords":
            found = self.module(**dict(zip(self.names, values, strict=True)))
        else:
            found = self.module(dict(zip(self.names, values, strict=True)))
        found = self._picked(found)
        return torch.sigmoid(found) if self._logits else found

    def _picked(self, found: Any) -> torch.Tensor:
        if isinstance(self._output, Sequence) and not isinstance(self._output, str):
            parts = [_scores(found[key], f"module output {key!r}") for key in self._output]
            return torch.cat([part.reshape(part.shape[0], -1) for part in parts], 1)
        if self._output is not None:
            found = found[self._output]
        elif isinstance(found, Mapping) and len(found) == 1:
            (found,) = found.values()
        elif isinstance(found, tuple | list) and len(found) == 1:
            (found,) = found
        elif isinstance(found, Mapping | tuple | list):
            keys = list(found) if isinstance(found, Mapping) else list(range(len(found)))
            raise InputError(
                "module output", f"{len(found)} values", f"`output`: one of {keys}, or a list of one for each task"
            )
        return _scores(found, "module output")


def _scores(found: Any, where: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise InputError(where, type(found).__name__, "one tensor of scores; name it by `output`")
    return found


@dataclass(frozen=True, slots=True)
class Trace:
    """What a module computes.

    Attributes:
        nodes: the calls, in order; `result` is the one whose value holds the scores.
        tensors: placeholder -> parameter, buffer or constant, under its name in the module.
        inputs: placeholders of the features, in order. batch: the symbol for the number of rows.
    """

    nodes: tuple[fx.Node, ...]
    result: fx.Node
    tensors: dict[fx.Node, tuple[str, torch.Tensor]]
    inputs: tuple[fx.Node, ...]
    batch: Any


def trace(scored: Scored, values: Sequence[torch.Tensor]) -> Trace:
    """Traces a module in eval mode on example values (dimension 0 is the batch).

    Raises:
        InputError: the module does not run; control flow that depends on values, a fixed number of rows, or changed buffers;
            with the source line.
    """
    rows = torch.export.Dim("rows", min=1)
    try:
        with _quiet(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about itself
            with _states_of_lstm():
                exported = torch.export.export(scored, tuple(values), dynamic_shapes=(tuple({0: rows} for _ in values),))
                exported = exported.run_decompositions({torch.ops.aten.gru_cell.default: _gru_cell})
    except InputError:
        raise
    except Exception as error:  # whatever the module's code raised, too
        _try(scored, values)
        if "data-dependent" in str(error):
            got = Verbatim("a branch that depends on values of the batch")
            raise InputError(f"module: {_origin(error)}", got, "the same operations for every batch") from error
        if "FakeTensor" in str(error) and _is_in(error, "nn/modules/rnn.py", "nn/utils/rnn.py"):
            got = Verbatim("a packed sequence, whose sizes are values of the batch")
            raise InputError(f"module: {_origin(error)}", got, "the recurrence over the padded sequence") from error
        if "specialized it to be a constant" in str(error):
            raise InputError(
                "module",
                Verbatim("a fixed number of rows"),
                "any number: x.shape[0] for len(x), and no recurrence over rows",
            ) from error
        raise InputError(
            f"module: {_origin(error)}", Verbatim(_first_line(error)), "a module that torch.export takes"
        ) from error
    signature = exported.graph_signature
    changed = sorted({*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()})
    if changed:
        raise InputError("module", [_plain(name) for name in changed], "no buffer or input that the module changes")
    nodes = {n.name: n for n in exported.graph.nodes}
    stored: dict[str, Any] = dict(exported.constants)
    stored |= dict([*scored.named_buffers(remove_duplicate=False), *scored.named_parameters(remove_duplicate=False)])
    first_name = {id(t): name for name, t in reversed(stored.items())}  # tied weights are one table or parameter
    tensors, inputs = {}, []
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        else:
            assert spec.target is not None
            tensor = stored[spec.target]
            tensors[node] = (_plain(first_name[id(tensor)]), tensor.detach())
    (result,) = nodes["output"].args[0]
    batch = inputs[0].meta["val"].shape[0]
    if isinstance(batch, int):
        raise InputError("module", f"{batch} rows", "a module that takes any number of rows")
    calls = tuple(n for n in exported.graph.nodes if n.op == "call_function")
    return Trace(calls, result, tensors, tuple(inputs), batch.node.expr)


def source_line(node: fx.Node) -> str:
    """Where in the user's code a call comes from: "model.py:12, `scores = a @ b`"."""
    frames = [f for f in _frames(node.meta.get("stack_trace") or "") if not _ours(f[0])]
    if not frames:
        return "no source line"
    file, line, text = frames[-1]
    return f"{Path(file).name}:{line}" + (f", `{text}`" if text else "")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, and as it was before afterwards."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training


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


def _gru_cell(
    x: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """nn.GRUCell by what the table of operators has."""
    own, before = functional.linear(x, w, b).chunk(3, 1), functional.linear(h, u, c).chunk(3, 1)
    r, z = torch.sigmoid(own[0] + before[0]), torch.sigmoid(own[1] + before[1])
    n = torch.tanh(own[2] + r * before[2])
    return n + z * (h - n)


@contextmanager
def _states_of_lstm() -> Iterator[None]:
    """torch before 2.13 exports an LSTM's last states as [layers, 1, n, hidden] (its issue 151200). Here without the one."""
    kept: Any = decompositions.one_layer_lstm

    def layer(*arguments: Any, **named: Any) -> Any:
        out, states = kept(*arguments, **named)
        return out, tuple(state.flatten(0, -2) for state in states)

    decompositions.one_layer_lstm = layer
    try:
        yield
    finally:
        decompositions.one_layer_lstm = kept


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
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename) and "/torch/" not in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}, `{frames[-1].line}`" if frames else "no source line"


def _is_in(error: BaseException, *files: str) -> bool:
    """Whether one of torch's files is on the way to an error."""
    return any(f.filename.endswith(files) for f in traceback.extract_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _plain(name: str) -> str:
    return name.removeprefix("module.")
