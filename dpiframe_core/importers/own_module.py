"""A module of the user's own, of a library that keeps features in code alone: made by a file of Python, features by a spec."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpiframe_core.compiler.compiled import compile_module, table_sizes
from dpiframe_core.compiler.examples import Call, Scored
from dpiframe_core.compiler.trace import Trace
from dpiframe_core.errors import InputError, listed
from dpiframe_core.features.examples import sample_columns
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Numeric
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.model_spec import SparseFeature, SpecFile, build_schema, read_spec
from dpiframe_core.importers.own_class import own_maker, with_weights
from dpiframe_core.importers.source_model import Inputs, SourceModel
from dpiframe_core.importers.state_dict import read_checkpoint

_ROWS, _WIDEST = 64, 4096


def deepctr_torch_own(checkpoint: Path, spec: Path, source: str) -> SourceModel:
    """The module that `source` names ("FILE.py:NAME": a class or function that is called without arguments), which is run.

    Raises:
        InputError: no such name, it refuses, the checkpoint does not fit it, or `compile` cannot take it over; each named.
    """
    file, module = _made(checkpoint, spec, source)
    return own_model("DeepCTR-Torch", type(module).__name__, module, _in_columns(module, file), "matrix")


def torch_rechub_own(checkpoint: Path, spec: Path, source: str) -> SourceModel:
    """As `deepctr_torch_own`."""
    file, module = _made(checkpoint, spec, source)
    return own_model("torch-rechub", type(module).__name__, module, file, "mapping")


def _made(checkpoint: Path, spec: Path, source: str) -> tuple[SpecFile, nn.Module]:
    file, weights = read_spec(spec), read_checkpoint(checkpoint)
    return file, with_weights(own_maker(source), weights, f"--source {source.rpartition(':')[2]}")


def own_model(library: str, name: str, module: nn.Module, file: SpecFile, call: Call) -> SourceModel:
    """A module with its weights, of the features of a spec. Raises as `compile_module`."""
    schema, traced = _schema(file, module, call)
    columns = sample_columns(schema, _ROWS)
    values = {f.name: _value(f, columns[f.name]) for f in schema.features}
    compiled = compile_module(module, schema, values, call=call, absent=_absent(schema), traced=traced)
    tasks = file.spec.tasks or compiled.tasks
    count = len(compiled.tasks)
    if not count == len(tasks) == len(set(tasks)):
        raise InputError(f"{file.where}: tasks", list(tasks), f"{count} different names, one for each score that {name} gives")
    scored = Scored(module, list(values), call, None, False)

    def own(i: Inputs) -> Tensor:
        with torch.no_grad():
            found: Tensor = scored(*(_value(f, i.column(f.name)) for f in schema.features))
        return found.reshape(len(found), -1).double()

    return SourceModel(
        library=library, model=name, architecture=GraphFile(), schema=schema, dense=compiled.dense, tables=compiled.tables,
        vocabularies=file.vocabularies, logit=lambda i: torch.logit(own(i)), own=own, graph=compiled.graph,
        tasks=tasks,
    )  # fmt: skip


def _in_columns(module: nn.Module, file: SpecFile) -> SpecFile:
    """The spec with its features in the order of the columns of the module's matrix, as DeepCTR-Torch's models know them.

    Raises:
        InputError: the module has other columns than the spec has features, or of other widths.
    """
    index: Mapping[str, tuple[int, int]] | None = getattr(module, "feature_index", None)
    if index is None:
        return file
    features = {f.name: f for f in file.spec.features}
    lengths = {c.length_name: c.name for c in module.dnn_feature_columns if getattr(c, "length_name", None)}  # type: ignore[union-attr]
    for name in lengths.keys() & (index.keys() - features.keys()):
        expected = "none: 0 behind a list says its length, too, and the checkpoint is the same"
        raise InputError(f"--source: length_name of {lengths[name]!r}", name, expected)
    if index.keys() != features.keys():
        lacking, more = sorted(index.keys() - features.keys()), sorted(features.keys() - index.keys())
        got = f"none of {listed(lacking)}" if lacking else listed(more)
        raise InputError(f"{file.where}: features", got, f"the columns of the model that --source makes: {listed(index)}")
    for name, (start, end) in index.items():
        f = features[name]
        if end - start != (width := f.max_values if isinstance(f, SparseFeature) else 1):
            raise InputError(f"{file.where}: {name}.max_values", width, f"{end - start}, as many as the model's column has")
    own = tuple(f.model_copy(update={"pooling": None}) if isinstance(f := features[n], SparseFeature) else f for n in index)
    return replace(file, spec=file.spec.model_copy(update={"features": own}))  # the module pools, whatever the spec says


def _schema(file: SpecFile, module: nn.Module, call: Call) -> tuple[FeatureSchema, Iterator[Trace]]:
    """Tables as large as what the module reads for a feature: all its embeddings side by side, but those of one column, where
    there are wider ones, which are first-order weights. And the trace that says so.

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
    found, traced = table_sizes(module, largest, zeros, call, _absent(largest))
    narrow = {table: found.pop(f"{table}.w") for table in tables if table not in found and f"{table}.w" in found}
    return of(found | narrow), traced


def _value(f: Categorical | Numeric, column: "np.ndarray[tuple[int, int], np.dtype[Any]]") -> Tensor:
    """int64[n] or [n, max_values] ids, lists padded; float32[n] numbers."""
    if not isinstance(f, Categorical):
        return torch.from_numpy(column[:, 0].astype(np.float32))
    ids = torch.from_numpy(column.astype(np.int64))
    return torch.where(ids < 0, _padding(f), ids) if f.max_values > 1 else ids[:, 0]


def _padding(f: Categorical) -> int:
    """The id that the module gets behind the end of a list: 0, as the libraries pad, unless ids are given that are padded."""
    return f.padding_value if isinstance(f.padding_value, int) and isinstance(f.encoder, Identity) else 0


def _absent(schema: FeatureSchema) -> dict[str, int]:
    return {f.name: _padding(f) for f in schema.features if isinstance(f, Categorical) and f.max_values > 1}
