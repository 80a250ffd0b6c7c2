"""RecBole 1.2 state dicts -> source models: its context-aware models, of tokens, lists of tokens and numbers.

The library stacks the tables of all tokens in the order of the fields. Id 0 of each, `[PAD]`, is read for what is missing. It
has no id for tokens that its data set did not have: here they read `[PAD]`, too, and in a list a row of zeros.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpiframe_core.compiler.compiled import compile_module
from dpiframe_core.errors import InputError, shown
from dpiframe_core.features.sample import sample_block
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, build_schema, read_spec
from dpiframe_core.importers.networks.module import NetModule
from dpiframe_core.importers.networks.net import PADDING, Embedded
from dpiframe_core.importers.recbole.models import FIRST_ORDER, MODELS, SETTINGS, STAYS_OUT
from dpiframe_core.importers.source_model import Inputs, SourceModel, required
from dpiframe_core.importers.state_dict import StateDict, read_checkpoint

Feature = SparseFeature | DenseFeature
_ROWS = 64


def recbole(checkpoint: Path, spec: Path) -> SourceModel:
    """A state dict of a context-aware model of RecBole.

    Raises:
        InputError: a file is damaged, they do not fit each other, or hold what a bundle cannot express; by name.
    """
    return read_recbole(read_spec(spec), read_checkpoint(checkpoint))


def read_recbole(file: SpecFile, weights: StateDict) -> SourceModel:
    """As `recbole`, of what it reads."""
    name = file.spec.model
    if name in STAYS_OUT:
        raise InputError(f"{file.where}: model", name, f"another model: {STAYS_OUT[name]}")
    if name not in MODELS:
        raise InputError(f"{file.where}: model", name, f"one of {', '.join(MODELS)}; others by dpiframe_core.compile")
    for key in SETTINGS.get(name, ()):
        required(file.spec.settings, key, f"{file.where}: settings.{key}", (int, bool))
    unread = [key for key in file.spec.settings if key not in SETTINGS.get(name, ())]
    if unread:
        raise InputError(f"{file.where}: settings", ", ".join(unread), f"only what {name} does not keep in its checkpoint")
    features = in_order(file.spec.features)
    named = by_feature(file, features, weights)
    embedded = [_embedded(f) for f in features]
    module = NetModule(MODELS[name], named, weights.where, file.spec.settings, file.where, embedded)
    has_first_order = name not in ("DCN",)
    schema = schema_of(file, features, named, has_first_order)
    try:
        with torch.no_grad():
            module(sample_values(schema))
    except (RuntimeError, ValueError) as e:
        expected = f"settings and parameters of one RecBole 1.2 {name}; a changed class goes through dpiframe_core.compile"
        raise InputError(f"{file.where}: model {name}", shown(str(e).splitlines()[0]), expected) from e
    module.check_read(f"RecBole's {name}")
    compiled = compile_module(module, schema, sample_values(schema), logits=True)
    doubled = {n: w.double() for n, w in named.items()}
    exact = NetModule(MODELS[name], doubled, weights.where, file.spec.settings, file.where, embedded)

    def logits(i: Inputs) -> Tensor:
        values = {f.name: _value(i.column(f.name), f.is_id, f.max_values) for f in schema.features}
        found: Tensor = exact({n: v.double() if v.is_floating_point() else v for n, v in values.items()})
        return found

    return SourceModel(
        library="RecBole", model=name, architecture=GraphFile(), schema=schema, dense=compiled.dense, tables=compiled.tables,
        vocabularies=file.vocabularies, logit=logits, graph=compiled.graph,
    )  # fmt: skip


def in_order(features: Sequence[Feature]) -> list[Feature]:
    """As the library joins them: lists, tokens, numbers, each in the data set's order."""
    return sorted(features, key=_kind)


def _kind(f: Feature) -> int:
    return 2 if isinstance(f, DenseFeature) else int(f.max_values == 1)


def by_feature(file: SpecFile, features: Sequence[Feature], weights: StateDict) -> dict[str, Tensor]:
    """The parameters with a table for each feature, as `Net` names them, in place of the library's stacked ones.

    Raises:
        InputError: a table has other rows than the vocabularies together.
    """
    out = weights.remaining()
    tokens = {f.name: _rows(file, f) for f in features if isinstance(f, SparseFeature) and f.max_values == 1}
    lists = [f.name for f in features if isinstance(f, SparseFeature) and f.max_values > 1]
    numbers = {f.name: 2 for f in features if isinstance(f, DenseFeature)}
    for prefix, layer in (("", "embedding_layer"), (f"{FIRST_ORDER}.", FIRST_ORDER)):
        parts: dict[str, Tensor] = {}
        for i, name in enumerate(lists):
            rows = _taken(out, f"{prefix}token_seq_embedding_table.{i}.weight", weights.where)
            parts[name] = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])  # the last one of unknown tokens
        parts |= _split(out, f"{prefix}token_embedding_table.embedding.weight", tokens, weights.where, file.where)
        of_numbers = _split(out, f"{prefix}float_embedding_table.embedding.weight", numbers, weights.where, file.where)
        parts |= {name: rows[1:].T.contiguous() for name, rows in of_numbers.items()}  # a number scales its second row
        out |= {f"{layer}.embedding_layer.embedding_layers.{name}.weight": t for name, t in parts.items()}
    return out


def _split(out: dict[str, Tensor], full: str, rows: Mapping[str, int], where: str, spec: str) -> dict[str, Tensor]:
    """Takes a stacked table apart, `rows` of each field."""
    if not rows:
        return {}
    table = _taken(out, full, where)
    if len(table) != sum(rows.values()):
        parts = " + ".join(f"{n} of {name}" for name, n in rows.items())
        raise InputError(f"{where}: {full}", f"{len(table)} rows", f"{sum(rows.values())}, {parts}, as {spec} says")
    return dict(zip(rows, torch.split(table, list(rows.values())), strict=True))


def _taken(out: dict[str, Tensor], name: str, where: str) -> Tensor:
    if name not in out:
        raise InputError(f"{where}: {name}", "no such parameter", "it, as RecBole's ContextRecommender has it")
    return out.pop(name)


def schema_of(file: SpecFile, features: Sequence[Feature], named: Mapping[str, Tensor], first_order: bool) -> FeatureSchema:
    sizes: dict[str, tuple[int, int]] = {}
    made: list[Feature] = []
    for f in features:
        weight = named[f"embedding_layer.embedding_layer.embedding_layers.{f.name}.weight"]
        rows, dim = (1, len(weight)) if isinstance(f, DenseFeature) else tuple(weight.shape)
        sizes[f.name] = (rows, dim)
        sizes[f"{f.name}.w"] = (rows, 1)
        if isinstance(f, SparseFeature):
            many = f.max_values > 1
            made.append(f.model_copy(update={"oov_id": rows - 1 if many else 0, "missing_id": -1 if many else 0}))
        else:
            made.append(f)
    first = {f.name: f"{f.name}.w" for f in features} if first_order else {}
    numbers = {f.name: f.name for f in features if isinstance(f, DenseFeature)}
    return build_schema(file, made, sizes, first, "mean", numbers, "sum")


def sample_values(schema: FeatureSchema) -> dict[str, Tensor]:
    """Random rows, to trace a model on."""
    block = sample_block(schema, _ROWS)
    return {f.name: _value(block.column(schema.columns[f.name]), f.is_id, f.max_values) for f in schema.features}


def _value(column: "np.ndarray[tuple[int, int], np.dtype[Any]]", is_id: bool, longest: int) -> Tensor:
    if not is_id:
        return torch.from_numpy(column[:, 0].astype(np.float32))
    ids = torch.from_numpy(column.astype(np.int64))
    return torch.where(ids < 0, PADDING, ids) if longest > 1 else ids[:, 0]


def _embedded(f: Feature) -> Embedded:
    kind = "numeric" if isinstance(f, DenseFeature) else "sequence" if f.max_values > 1 else "categorical"
    return Embedded(f.name, kind, None, "mean" if kind == "sequence" else None, "")


def _rows(file: SpecFile, f: SparseFeature) -> int:
    """Of a field: its tokens, and `[PAD]`."""
    if f.name not in file.vocabularies:
        raise InputError(
            f"{file.where}: {f.name}.vocabulary", "nothing", "a JSON file of tokens and ids, as RecBole's data set has"
        )
    return 1 + int(max(file.vocabularies[f.name].table["id"].to_pylist(), default=0))
