"""A module of the user's own, of a library that keeps features in code alone: made by a file of Python, features by a spec."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpiframe_core.compiler.compiled import compile_module
from dpiframe_core.compiler.trace import Call, Scored
from dpiframe_core.errors import InputError
from dpiframe_core.features.sample import sample_columns
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, build_schema, read_spec
from dpiframe_core.importers.own_class import own_maker, with_weights
from dpiframe_core.importers.source_model import Inputs, SourceModel
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint

_ROWS = 64


def own_of_spec(library: str, checkpoint: Path, spec: Path, source: str, call: Call) -> SourceModel:
    """The module that `source` names ("FILE.py:NAME": a class or function that is called without arguments), which is run.

    Args:
        call: how the library's models take features, as `dpiframe_core.compile` says it.

    Raises:
        InputError: no such name, it refuses, the checkpoint does not fit it, or `compile` cannot take it over; each named.
    """
    file, weights = read_spec(spec), read_checkpoint(checkpoint)
    make = own_maker(source)
    name = source.rpartition(":")[2]
    module = with_weights(make, weights, f"--source {name}")
    schema = _schema(file, weights)
    columns = sample_columns(schema, _ROWS)
    values = {f.name: _value(f, columns[f.name]) for f in schema.features}
    compiled = compile_module(module, schema, values, call=call)
    scored = Scored(module, list(values), call, None, False)

    def own(i: Inputs) -> Tensor:
        with torch.no_grad():
            found: Tensor = scored(*(_value(f, i.column(f.name)) for f in schema.features))
        return found.reshape(len(found), -1).double()

    scores = compiled.golden.scores.shape[1]
    tasks = ("click",) if scores == 1 else tuple(f"task{i}" for i in range(scores))
    return SourceModel(
        library=library, model=name, architecture=GraphFile(), schema=schema, dense=compiled.dense, tables=compiled.tables,
        vocabularies=file.vocabularies, logit=lambda i: torch.logit(own(i)), own=own, graph=compiled.graph, tasks=tasks,
    )  # fmt: skip


def _schema(file: SpecFile, weights: StateDict) -> FeatureSchema:
    """Tables as wide as all embeddings of a name together; one of width 1 beside wider ones has first-order weights.

    A list stays one, which the module pools as it will, unless the spec says otherwise.
    """
    sizes: dict[str, tuple[int, int]] = {}
    first: dict[str, str] = {}
    for f in file.spec.features:
        if isinstance(f, DenseFeature):
            continue
        table = f.table or f.name
        shapes = [tuple(t.shape) for n, t in weights.remaining().items() if n.endswith(f".{table}.weight") and "embed" in n]
        if not shapes:
            raise InputError(f"{file.where}: {f.name}", f"no embedding of {table}", f"*.{table}.weight in {weights.where}")
        wide = [shape for shape in shapes if shape[1] > 1] or shapes[:1]
        sizes[table] = (wide[0][0], sum(shape[1] for shape in wide))
        if len(shapes) > len(wide):
            sizes[f"{table}.w"] = (wide[0][0], 1)
            first[f.name] = f"{table}.w"
    lists = {f.name for f in file.spec.features if isinstance(f, SparseFeature) and f.max_values > 1 and f.pooling is None}
    features = [f.model_copy(update={"pooling": "none"}) if f.name in lists else f for f in file.spec.features]
    return build_schema(file, features, sizes, first)


def _value(f: Categorical | Numeric, column: "np.ndarray[tuple[int, int], np.dtype[Any]]") -> Tensor:
    """int64[n] or [n, max_values] ids, lists padded; float32[n] numbers."""
    if not isinstance(f, Categorical):
        return torch.from_numpy(column[:, 0].astype(np.float32))
    ids = torch.from_numpy(column.astype(np.int64))
    padding = f.padding_value if isinstance(f.padding_value, int) else 0
    return torch.where(ids < 0, padding, ids) if f.max_values > 1 else ids[:, 0]
