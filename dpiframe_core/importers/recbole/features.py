"""What a RecBole model reads: a table for each feature in the place of the library's stacked ones, and the schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.importers.mapped_rows import mapped_rows
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, SpecFile, build_schema
from dpiframe_core.importers.networks.net import Embedded
from dpiframe_core.importers.recbole.models import FIRST_ORDER
from dpiframe_core.importers.recbole.tables import Feature, take_tables
from dpiframe_core.importers.state_dict import StateDict

_POOLING: Mapping[str, Literal["mean", "sum", "max"]] = {"sum": "sum", "max": "max"}


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """named: the parameters as `Net` names them. features: in the order in which the library joins them."""

    file: SpecFile
    named: Mapping[str, Tensor]
    features: tuple[Embedded, ...]
    schema: FeatureSchema


def read_fields(file: SpecFile, weights: StateDict) -> Read:
    """Of a context-aware model, which joins lists, tokens, numbers, each in the data set's order.

    Raises:
        InputError: a table lacks, or has other rows than the vocabularies together; or a list is not averaged.
    """
    for f in file.spec.features:
        if isinstance(f, SparseFeature) and f.pooling not in (None, "mean"):
            rule = f"mean: whatever pooling_mode says, RecBole's {file.spec.model} takes the mean of a list"
            raise InputError(f"{file.where}: {f.name}.pooling", f.pooling, rule)
    features = sorted(file.spec.features, key=lambda f: 2 if isinstance(f, DenseFeature) else int(f.max_values == 1))
    named = weights.remaining()
    tables = take_tables(named, weights.where, file, features)
    first = take_tables(named, weights.where, file, features, f"{FIRST_ORDER}.")
    for layer, held in (("embedding_layer", tables), (FIRST_ORDER, first)):
        named |= {f"{layer}.embedding_layer.embedding_layers.{name}.weight": t for name, t in held.items()}
    schema = _schema(file, features, tables, {}, file.spec.model != "DCN")
    return Read(file, named, tuple(_embedded(f) for f in features), schema)


def read_histories(file: SpecFile, weights: StateDict) -> Read:
    """Of DIN and DIEN, which join tokens, lists, numbers, the item's and the user's for themselves.

    A feature that reads another one's table is the history of that one, which is one of the item. Row 0 of an item's tables is
    where a history has ended, so `[PAD]`'s goes to the end, which is read for what is missing or unknown.
    """
    sparse = [f for f in file.spec.features if isinstance(f, SparseFeature)]
    histories = {f.table: f for f in sparse if f.table not in (None, f.name)}
    items = [f for f in sparse if f.name in histories and f.max_values == 1]
    lengths = {h.max_values for h in histories.values()}
    if not items or len(items) != len(histories) or len(lengths) > 1 or 1 in lengths:
        got = [f"{h.name} of table {t}, {h.max_values} values" for t, h in histories.items()]
        raise InputError(f"{file.where}: features", got, "lists of one length, each with the name of an item's token as table")
    steps, known = [], dict(file.vocabularies)
    for f in items:
        step = histories[f.name]
        if step.vocabulary not in (None, f.vocabulary):
            raise InputError(
                f"{file.where}: {step.name}.vocabulary", step.vocabulary, f"none, or {f.vocabulary} as {f.name} has"
            )
        steps.append(step.model_copy(update={"values": f.values, "vocabulary": f.vocabulary}))
        known |= {step.name: known[f.name]} if f.name in known else {}
    users = [f for f in file.spec.features if f not in items and f not in histories.values()]
    users.sort(key=lambda f: 2 if isinstance(f, DenseFeature) else int(f.max_values > 1))
    named, layer = weights.remaining(), "embedding_layer"
    tables = take_tables(named, weights.where, file, items, f"{layer}.", "item.")
    tables = {name: mapped_rows([torch.zeros_like(t[:1]), t[1:], t[:1]]) for name, t in tables.items()}
    if file.spec.model == "DIN":  # has the user's tables, and does not read them
        users, named = [], {n: t for n, t in named.items() if not (n.startswith(layer) and "_table.user." in n)}
    tables |= take_tables(named, weights.where, file, users, f"{layer}.", "user.")
    named |= {f"{layer}.embedding_layers.{name}.weight": t for name, t in tables.items()}
    ids: dict[str, dict[str, Any]] = {}
    for item, step in zip(items, steps, strict=True):
        end = len(tables[item.name]) - 1
        ids |= {item.name: {"oov_id": end, "missing_id": end}, step.name: {"oov_id": end, "missing_id": -1, "pooling": "none"}}
    features = [*items, *steps, *users]
    file = replace(file, vocabularies={f.name: known[f.name] for f in features if f.name in known})
    return Read(file, named, tuple(_embedded(f) for f in features), _schema(file, features, tables, ids, False))


def _schema(
    file: SpecFile, features: Sequence[Feature], tables: Mapping[str, Tensor], ids: Mapping[str, Mapping[str, Any]], first: bool
) -> FeatureSchema:
    """ids: what a feature has for missing and unknown tokens; without, `[PAD]`'s row 0 or, of a list, the last one."""
    sizes: dict[str, tuple[int, int]] = {}
    made: list[Feature] = []
    for f in features:
        if isinstance(f, DenseFeature):
            sizes |= {f.name: (1, len(tables[f.name])), f"{f.name}.w": (1, 1)}
            made.append(f)
            continue
        table = f.table if f.table is not None and f.table in tables else f.name
        rows, dim = tables[table].shape
        sizes |= {table: (rows, dim), f"{f.name}.w": (rows, 1)}
        own = {"oov_id": rows - 1, "missing_id": -1} if f.max_values > 1 else {"oov_id": 0, "missing_id": 0}
        made.append(f.model_copy(update=ids.get(f.name, own)))
    linear = {f.name: f"{f.name}.w" for f in features} if first else {}
    numbers = {f.name: f.name for f in features if isinstance(f, DenseFeature)}
    return build_schema(file, made, sizes, linear, "mean", numbers, "sum")


def _embedded(f: Feature) -> Embedded:
    if isinstance(f, DenseFeature):
        return Embedded(f.name, "numeric", None, None, "")
    if f.max_values == 1:
        return Embedded(f.name, "categorical", None, None, "")
    shares = f.table if f.table != f.name else None
    return Embedded(f.name, "sequence", shares, None if shares else _POOLING.get(f.pooling or "", "mean"), "")
