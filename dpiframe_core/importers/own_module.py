"""A module of the user's own, of a library that keeps features in code alone: made by a file of Python, features by a spec."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpiframe_core.compiler.compiled import compile_module, table_sizes
from dpiframe_core.compiler.examples import Call, Scored
from dpiframe_core.features.sample import sample_columns
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.model_spec import SparseFeature, SpecFile, build_schema, read_spec
from dpiframe_core.importers.own_class import own_maker, with_weights
from dpiframe_core.importers.source_model import Inputs, SourceModel
from dpiframe_core.importers.state_dict import read_checkpoint

_ROWS, _WIDEST = 64, 4096


def own_of_spec(library: str, checkpoint: Path, spec: Path, source: str, call: Call) -> SourceModel:
    """The module that `source` names ("FILE.py:NAME": a class or function that is called without arguments), which is run.

    Args:
        call: how the library's models take features, as `dpiframe_core.compile` says it.

    Raises:
        InputError: no such name, it refuses, the checkpoint does not fit it, or `compile` cannot take it over; each named.
    """
    file, weights = read_spec(spec), read_checkpoint(checkpoint)
    make, name = own_maker(source), source.rpartition(":")[2]
    return own_model(library, name, with_weights(make, weights, f"--source {name}"), file, call)


def own_model(library: str, name: str, module: nn.Module, file: SpecFile, call: Call) -> SourceModel:
    """A module with its weights, of the features of a spec. Raises as `compile_module`."""
    schema = _schema(file, module, call)
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


def _schema(file: SpecFile, module: nn.Module, call: Call) -> FeatureSchema:
    """Tables as large as what the module reads for a feature: all its embeddings side by side, but those of one column, where
    there are wider ones, which are first-order weights.

    A list stays one, which the module pools as it will, unless the spec says otherwise.
    """
    sparse = {f.name: f for f in file.spec.features if isinstance(f, SparseFeature)}
    lists = {name for name, f in sparse.items() if f.max_values > 1 and f.pooling is None}
    features = [f.model_copy(update={"pooling": "none"}) if f.name in lists else f for f in file.spec.features]

    def of(sizes: Mapping[str, tuple[int, int]]) -> FeatureSchema:
        first = {name: f"{f.table or name}.w" for name, f in sparse.items() if f"{f.table or name}.w" in sizes}
        return build_schema(file, features, sizes, first)

    tables = {f.table or name for name, f in sparse.items()}
    rows = 1 + max([f.oov_id or 0 for f in sparse.values()] + [f.missing_id or 0 for f in sparse.values()], default=0)
    largest = of(dict.fromkeys(tables, (rows, _WIDEST)) | {f"{table}.w": (rows, 1) for table in tables})
    zeros = {f.name: _value(f, np.zeros((2, f.max_values), np.float32)) for f in largest.features}
    found = table_sizes(module, largest, zeros, call)
    narrow = {table: found.pop(f"{table}.w") for table in tables if table not in found and f"{table}.w" in found}
    return of(found | narrow)


def _value(f: Categorical | Numeric, column: "np.ndarray[tuple[int, int], np.dtype[Any]]") -> Tensor:
    """int64[n] or [n, max_values] ids, lists padded; float32[n] numbers."""
    if not isinstance(f, Categorical):
        return torch.from_numpy(column[:, 0].astype(np.float32))
    ids = torch.from_numpy(column.astype(np.int64))
    padding = f.padding_value if isinstance(f.padding_value, int) else 0
    return torch.where(ids < 0, padding, ids) if f.max_values > 1 else ids[:, 0]
