"""RecBole 1.2 state dicts -> source models: context-aware models, DIN and DIEN, of tokens, lists of tokens and numbers.

The library stacks the tables of all tokens in the order of the fields. Id 0 of each, `[PAD]`, is read for what is missing. It
has no id for tokens that its data set did not have: here they read `[PAD]`, too, and in a list that is pooled a row of zeros.
"""

from functools import partial
from pathlib import Path

import torch

from dpiframe_core.compiler.compiled import compile_module
from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.model_spec import SpecFile, read_spec
from dpiframe_core.importers.networks.inputs import exact_logits, sample_values
from dpiframe_core.importers.networks.module import NetModule
from dpiframe_core.importers.recbole.features import read_fields, read_histories
from dpiframe_core.importers.recbole.models import MODELS, SETTINGS, STAYS_OUT
from dpiframe_core.importers.recbole.sequential import SEQUENTIAL
from dpiframe_core.importers.source_model import SourceModel
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint


def recbole(checkpoint: Path, spec: Path) -> SourceModel:
    """A state dict of a model of RecBole.

    Raises:
        InputError: a file is damaged, they do not fit each other, or hold what a bundle cannot express; by name.
    """
    return read_recbole(read_spec(spec), read_checkpoint(checkpoint))


def read_recbole(file: SpecFile, weights: StateDict) -> SourceModel:
    """As `recbole`, of what it reads."""
    name, models = file.spec.model, {**MODELS, **SEQUENTIAL}
    if name in STAYS_OUT:
        raise InputError(f"{file.where}: model", name, f"another model: {STAYS_OUT[name]}")
    if name not in models:
        known = ", ".join(sorted(models, key=str.lower))
        raise InputError(f"{file.where}: model", name or None, f"one of {known}; others by --source FILE.py:NAME")
    settings = file.settings
    for key in SETTINGS.get(name, ()):
        settings.take(key, int, bool, str)
    settings.finish(name)
    read = (read_histories if name in SEQUENTIAL else read_fields)(file, weights)
    module = NetModule(models[name], read.named, weights.where, file.spec.settings, file.where, read.features)
    schema = read.schema
    try:
        with torch.no_grad():
            module(sample_values(schema))
    except (RuntimeError, ValueError) as e:
        expected = f"settings and parameters of one RecBole 1.2 {name}; a changed class goes by --source FILE.py:NAME"
        raise InputError(f"{file.where}: model {name}", str(e).splitlines()[0], expected) from e
    module.check_read(f"RecBole's {name}")
    compiled = compile_module(module, schema, sample_values(schema), logits=True)
    return SourceModel(
        library="RecBole", model=name, architecture=GraphFile(), schema=schema, dense=compiled.dense, tables=compiled.tables,
        vocabularies=read.file.vocabularies, logit=partial(exact_logits, module, schema), graph=compiled.graph,
        defaults=module.defaults,
    )  # fmt: skip
