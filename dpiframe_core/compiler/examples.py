"""What a module is called with: an example, feature -> tensor, held against the schema, and as encoded golden rows. And the
module as a function of it, whose scores are to be a row's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from dpiframe_core.compiler.lookups import Indices
from dpiframe_core.errors import InputError
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema

Call = Literal["mapping", "keywords", "matrix"]
Output = str | int | Sequence[str | int] | None
TOLERANCE = 1e-5  # on the probability, of float32 against float32
_LEAST_ROWS = 2  # torch.export takes a batch of one for a constant


@dataclass(frozen=True, slots=True, eq=False)
class RawColumns:
    """columns: (feature, position) of each raw column. at: for each input which columns a row of it has, in its sizes."""

    columns: Sequence[tuple[str, int]]
    at: Sequence[Indices]


def raw_columns(schema: FeatureSchema, example: Mapping[str, torch.Tensor]) -> RawColumns:
    """Checks an example: every feature of the schema once, [rows], [rows, 1] or, of several values, [rows, values].

    Raises:
        InputError: a feature lacks or is unknown, or a tensor is of a wrong shape or dtype.
    """
    names = {f.name for f in schema.features}
    if example.keys() != names:
        more, less = sorted(example.keys() - names), sorted(names - example.keys())
        got = f"{', '.join(more)} beside the features" if more else f"no {', '.join(less)}"
        raise InputError.worded("example", got, "exactly the features of the schema")
    for name, tensor in example.items():
        if not isinstance(tensor, torch.Tensor):
            raise InputError.worded(f"example.{name}", type(tensor).__name__, "a torch.Tensor")
    rows = {len(t) for t in example.values() if t.ndim}
    if len(rows) != 1 or min(rows) < _LEAST_ROWS:
        raise InputError("example", f"{sorted(rows)} rows", f"{_LEAST_ROWS} rows or more, as many of each feature")
    columns: list[tuple[str, int]] = []
    at = []
    for name, tensor in example.items():
        f = schema.feature(name)
        shapes = ((f.max_values,),) if f.max_values > 1 else ((), (1,))
        if tuple(tensor.shape[1:]) not in shapes:
            raise InputError(
                f"example.{name}", tuple(tensor.shape), f"[rows, {f.max_values}]" if f.max_values > 1 else "[rows]"
            )
        integer = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
        if integer != f.is_id or (not f.is_id and tensor.dtype != torch.float32):
            raise InputError(f"example.{name}", str(tensor.dtype), "integers, as its feature has ids" if f.is_id else "float32")
        at.append(np.arange(len(columns), len(columns) + f.max_values).reshape(tensor.shape[1:]))
        columns += [(name, i) for i in range(f.max_values)]
    return RawColumns(columns, at)


def example_block(schema: FeatureSchema, example: Mapping[str, torch.Tensor], padding: Mapping[str, int]) -> RowBlock:
    """The example as encoded rows, each with a context of its own; `padding`: the id of an absent value of a feature.

    Raises:
        InputError: an id that is no row of its feature's table.
    """
    rows = len(next(iter(example.values())))
    block = RowBlock.allocate(schema.block_layout, rows, rows)
    block.request_of_row[:] = np.arange(rows)
    for f in schema.features:
        values = example[f.name].detach().reshape(rows, -1).numpy().copy()
        if f.is_id:
            bound = min(schema.table(name).rows for name in (f.table, f.first_order_table) if name is not None)
            outside = values[(values < 0) | (values >= bound)]
            if outside.size:
                raise InputError(f"example.{f.name}", int(outside.flat[0]), f"ids from 0 to {bound - 1}")
            if f.max_values > 1 and f.name in padding:
                values[values == padding[f.name]] = -1
        block.column(schema.columns[f.name])[:] = values
    return block


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
            parts = [_scores(_named(found, key), f"module output {key!r}") for key in self._output]
            return torch.cat([part.reshape(part.shape[0], -1) for part in parts], 1)
        if self._output is not None:
            found = _named(found, self._output)
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


def _named(found: Any, key: str | int) -> Any:
    if not isinstance(found, Mapping | tuple | list):
        raise InputError("output", key, "none: the module gives one value")
    if isinstance(key, str) and key in getattr(found, "_fields", ()):
        return getattr(found, key)
    names: list[Any] = list(found) if isinstance(found, Mapping) else list(range(len(found)))
    try:
        return found[key]  # type: ignore[index, unused-ignore]  # which of a tuple is an integer
    except (LookupError, TypeError) as error:
        raise InputError("output", key, f"one of {names}") from error


def _scores(found: Any, where: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or not found.ndim:
        got = type(found).__name__ if not isinstance(found, torch.Tensor) else "one number for all rows"
        raise InputError(where, got, "one tensor of scores; name it by `output`")
    return found


def source_scores(scored: Scored, example: Mapping[str, torch.Tensor]) -> Floats:
    """float32[rows, tasks] of the module itself.

    Raises:
        InputError: they are no probabilities.
    """
    with torch.no_grad():
        found = scored(*example.values())
    rows = len(next(iter(example.values())))
    if found.ndim == 0 or len(found) != rows:
        raise InputError("module output", list(found.shape), f"scores of each of the {rows} rows: [rows] or [rows, tasks]")
    scores: Floats = found.detach().reshape(len(found), -1).float().numpy()
    if not (np.isfinite(scores).all() and (scores >= 0).all() and (scores <= 1).all()):
        bad = scores[~((scores >= 0) & (scores <= 1))]
        if np.isnan(bad[0]):
            raise InputError.worded("module output", "NaN on the example", "a forward that is finite there, in eval mode")
        expected = "probabilities from 0 to 1: a forward that ends in a sigmoid, or logits=True of dpiframe_core.compile"
        raise InputError("module output", float(bad[0]), expected)
    return scores


def check_rows(scored: Scored, example: Mapping[str, torch.Tensor], scores: Floats) -> float:
    """Other batches of the same rows must score the same: the graph cannot mix rows, so a module that does is refused."""
    rows = len(scores)
    worst = 0.0
    for order in (torch.arange(rows - 1, -1, -1), torch.arange(rows).repeat(2), torch.arange(1)):
        try:
            with torch.no_grad():
                found = scored(*(v[order] for v in example.values())).reshape(len(order), -1).float().numpy()
        except Exception:  # a `squeeze()` too many: the module takes no single row, which says nothing of rows that meet
            if len(order) > 1:
                raise
            continue
        worst = max(worst, float(np.abs(found - scores[order.numpy()]).max()))
    if not worst <= TOLERANCE:
        raise InputError(
            "module", f"scores that change by {worst:.3g} with the other rows of a batch", "each row's score by itself"
        )
    return worst


def check_padded_steps(
    scored: Scored, schema: FeatureSchema, example: Mapping[str, torch.Tensor], padding: Mapping[str, int]
) -> None:
    """A TransformerEncoder that is told of padded steps leaves them out in eval mode, if every list of a batch begins with its
    values, and answers zeros there: so a row's score may depend on other rows, and on what training did not do. Looked for
    in the example's lists, cut short.

    Raises:
        InputError: such scores differ by it.
    """
    encoders = [m for m in scored.modules() if isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor]
    if not encoders:
        return
    cut = dict(example)
    for f in schema.features:
        if isinstance(f, Categorical) and f.max_values > 1 and f.name in padding:
            steps = torch.arange(f.max_values).flip(0) if f.align == "last" else torch.arange(f.max_values)
            lengths = torch.arange(len(example[f.name])) % f.max_values + 1
            cut[f.name] = torch.where(steps < lengths[:, None], example[f.name], padding[f.name])
    try:
        with torch.no_grad():
            found = scored(*cut.values())
            for encoder in encoders:
                encoder.use_nested_tensor = False
            whole = scored(*cut.values())
    except Exception:  # the module does not take such lists, which says nothing of its scores
        return
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True
    if not torch.allclose(found, whole, rtol=0, atol=TOLERANCE, equal_nan=True):
        got = "a TransformerEncoder that answers zeros for padded steps, in eval mode alone"
        rule = "enable_nested_tensor=False (later: encoder.use_nested_tensor = False), or a mask on what it gives"
        raise InputError.worded("module", got, rule)
