"""A FuxiCTR run of any model class, the user's own: made from the run's configuration, compiled, with FuxiCTR's features.

What the class reads of each feature is seen in the checkpoint: FuxiCTR's layers keep a table at `embedding_layers.NAME`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpiframe_core.compiler.compiled import compile_module
from dpiframe_core.errors import InputError, listed
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.fuxictr.features import Field, build_vocabularies, fields_of
from dpiframe_core.importers.fuxictr.files import FuxiFiles, FuxiRun, read_run
from dpiframe_core.importers.fuxictr.inputs import schema_of, unpooled
from dpiframe_core.importers.networks.inputs import encoded_values, sample_values
from dpiframe_core.importers.own_class import own_class, with_weights
from dpiframe_core.importers.source_model import Inputs, SourceModel, required
from dpiframe_core.importers.state_dict import read_checkpoint


def fuxictr_own(files: FuxiFiles, source: str, context: Sequence[str] = ()) -> SourceModel:
    """As `fuxictr` of `run.py`, by the class that `source` names ("FILE.py:CLASS"), which is run.

    Raises:
        InputError: also: FuxiCTR is not installed, no such class, its constructor refuses, the checkpoint does not fit it, or
            `compile` cannot take it over; each named.
    """
    run = _steps(read_run(files))
    weights = read_checkpoint(files.checkpoint)
    kind = own_class(source)
    module = with_weights(lambda: _made(kind, run), weights, f"--source {kind.__name__}")
    schema = schema_of(run, weights.remaining(), weights.where, context)
    _ordered(module, fields_of(run, 1, unpooled(run)))
    values = sample_values(schema)
    output, tasks = _outputs(module, values, run, f"--source {kind.__name__}")
    compiled = compile_module(module, schema, values, output=output)

    def own(i: Inputs) -> Tensor:
        with torch.no_grad():
            found = module(encoded_values(schema, i))
        return torch.cat([found[key].reshape(found[key].shape[0], -1) for key in output], 1).double()

    return SourceModel(
        library="FuxiCTR", model=kind.__name__, architecture=GraphFile(), schema=schema, dense=compiled.dense,
        tables=compiled.tables, vocabularies=build_vocabularies(run, schema), logit=lambda i: torch.logit(own(i)),
        label=run.labels[0] if len(run.labels) == 1 else None, own=own, graph=compiled.graph, tasks=tasks,
    )  # fmt: skip


def _made(kind: type[nn.Module], run: FuxiRun) -> nn.Module:
    """As FuxiCTR's run_expid.py does: the feature map from its file, every parameter of the configuration as a keyword."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of theirs, at import
            from fuxictr.features import FeatureMap
    except ImportError:
        raise InputError("--source", "no FuxiCTR here", "FuxiCTR installed: pip install fuxictr") from None
    settings: dict[str, Any] = dict(run.config) | {"gpu": -1, "verbose": 0}
    feature_map = FeatureMap(required(run.config, "dataset_id", f"{run.files.config}: dataset_id", (str,)), "")
    feature_map.load(str(run.files.feature_map), settings)
    return kind(feature_map, **settings)


def _steps(run: FuxiRun) -> FuxiRun:
    """The run with sequences step by step: the class pools them itself, by whatever `feature_encoder` its layers have."""
    return replace(run, features={name: {**spec, "feature_encoder": None} for name, spec in run.features.items()})


def _ordered(module: nn.Module, fields: Sequence[Field]) -> None:
    """Tables of numbers that FuxiCTR cut into buckets, in the order of their buckets, as the schema's ids are."""
    for f in fields:
        for name, layer in module.named_modules():
            if f.buckets is not None and name.endswith(f"embedding_layers.{f.name}") and isinstance(layer, nn.Embedding):
                rows = layer.weight.detach()[list(f.buckets.rows)]
                layer.weight, layer.num_embeddings, layer.padding_idx = nn.Parameter(rows), len(rows), None


def _outputs(module: nn.Module, values: dict[str, Tensor], run: FuxiRun, where: str) -> tuple[list[str], tuple[str, ...]]:
    """Keys of the scores in what `forward` returns, and the tasks' names."""
    try:
        with torch.no_grad():
            found = module(values)
    except Exception as e:  # the user's code
        raise InputError(f"{where}, its forward", f"{type(e).__name__}: {e}", "scores of the run's features") from None
    several = [f"{label}_pred" for label in run.labels]
    if isinstance(found, dict) and several and all(key in found for key in several):
        return several, run.labels
    if isinstance(found, dict) and "y_pred" in found:
        return ["y_pred"], ("click",)
    got = listed(map(str, found)) if isinstance(found, dict) else type(found).__name__
    raise InputError(f"{where}, its forward", got, f"y_pred, or {listed(several)}, as FuxiCTR's models return")
