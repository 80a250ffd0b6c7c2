"""A FuxiCTR run of the zoo, by its model's name alone: our function of its parameters, compiled, with FuxiCTR's features."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dpiframe_core.compiler.compiled import compile_module
from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.fuxictr.features import build_vocabularies, fields_of
from dpiframe_core.importers.fuxictr.files import FuxiRun
from dpiframe_core.importers.fuxictr.inputs import in_bucket_order, schema_of, unpooled
from dpiframe_core.importers.fuxictr.zoo.models import OF_TASKS
from dpiframe_core.importers.networks.inputs import exact_logits, sample_values
from dpiframe_core.importers.networks.module import NetModule
from dpiframe_core.importers.networks.net import Embedded, Logit, table_of
from dpiframe_core.importers.source_model import SourceModel, in_words
from dpiframe_core.importers.state_dict import StateDict


def zoo_model(name: str, logit: Logit, run: FuxiRun, checkpoint: StateDict, context: Sequence[str] = ()) -> SourceModel:
    """The model `name` of a run whose scores `logit` gives.

    Raises:
        InputError: a setting or a parameter lacks, is unknown or left over; a feature cannot be expressed; each by name.
    """
    fields = fields_of(run, 1, unpooled(run))
    weights = in_bucket_order(fields, checkpoint.remaining())
    tied = {f.name: f.shares for f in fields if f.shares is not None}
    _check_shared(weights, tied, checkpoint.where)
    sources = {n: str(spec.get("source", "")) for n, spec in run.features.items()}
    features = [Embedded(f.name, f.kind, f.shares, f.pooling, sources[f.name]) for f in fields]
    module = NetModule(logit, weights, checkpoint.where, run.config, str(run.files.config), features)
    everything = schema_of(run, weights, checkpoint.where, context)
    scores = _first_scores(module, sample_values(everything), name, run)
    tasks = run.labels if name in OF_TASKS else ("click",)
    if scores.shape[1] != len(tasks):
        raise InputError(f"{run.files.feature_map}: labels", list(tasks), f"{scores.shape[1]}, one for each tower of {name}")
    used, summed = module.features_read | module.first_order_read, module.first_order_read - module.features_read
    given = [name for name in context if name in used or name not in everything.columns]
    read = {name: w for name, w in weights.items() if name not in module.skipped}
    schema = schema_of(run, read, checkpoint.where, given, used, summed)
    compiled = compile_module(module, schema, sample_values(schema), logits=True)
    return SourceModel(
        library="FuxiCTR", model=name, architecture=GraphFile(), schema=schema, dense=compiled.dense, tables=compiled.tables,
        vocabularies=build_vocabularies(run, schema), logit=partial(exact_logits, module, schema),
        label=run.labels[0] if len(run.labels) == 1 else None,
        graph=compiled.graph, tasks=tasks, defaults=module.defaults,
    )  # fmt: skip


def _first_scores(module: NetModule, values: dict[str, Tensor], name: str, run: FuxiRun) -> Tensor:
    """A first call, outside of any trace, so that what does not fit is said in the run's own words."""
    try:
        with torch.no_grad():
            found: Tensor = module(values)
        module.check_read(f"FuxiCTR's {name}")
    except (InputError, RuntimeError, ValueError, IndexError) as e:  # shapes that do not meet, lists of other lengths
        expected = f"settings and parameters of one run of FuxiCTR 2.3's {name}; of a changed class: --source FILE.py:CLASS"
        got = str(e).splitlines()[0] if str(e) else repr(e)
        error = e if isinstance(e, InputError) else InputError(f"{run.files.config}: model {name}", got, expected)
        tell_defaults(error, run, module.defaults)
        raise error from None
    return found


def tell_defaults(error: InputError, run: FuxiRun, defaults: Mapping[str, object]) -> None:
    """With an error of a run: the settings that its configuration does not name, and what was taken."""
    if defaults:
        error.add_note(f"{run.files.config} does not name {in_words(defaults)}: taken as the library's class has it")


def _check_shared(weights: dict[str, Tensor], tied: dict[str, str], where: str) -> None:
    """A feature that shares an embedding has the other's values in the checkpoint, too."""
    for name, weight in weights.items():
        feature = table_of(name)
        if feature is not None and feature in tied and weight.shape[1] > 1:
            other = f"{name.removesuffix(f'{feature}.weight')}{tied[feature]}.weight"
            if other in weights and not torch.equal(weight, weights[other]):
                raise InputError(f"{where}: {name}", "other values", f"those of {tied[feature]}, which it shares")
