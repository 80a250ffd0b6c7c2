"""What a compiled FuxiCTR model reads: the schema that fits the tables of its checkpoint. FuxiCTR's layers keep a table at
`embedding_layers.NAME`, whatever model they are part of.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.importers.fuxictr.features import Field, build_schema, fields_of
from dpiframe_core.importers.fuxictr.files import FuxiRun
from dpiframe_core.importers.networks.net import table_of


def unpooled(run: FuxiRun) -> list[str]:
    """Sequences without an encoder: the model reads them step by step."""
    return [n for n, spec in run.features.items() if spec.get("type") == "sequence" and spec.get("feature_encoder") is None]


def schema_of(
    run: FuxiRun,
    weights: Mapping[str, Tensor],
    where: str,
    context: Sequence[str],
    only: Collection[str] | None = None,
    summed: Collection[str] = (),
) -> FeatureSchema:
    """Tables as wide as all embeddings of a feature together; those of width 1 beside wider ones are first-order weights.

    Args:
        weights: of the checkpoint, by name; `where`: its file. only: the features that the model reads; by default all.
        summed: those of which it reads the first-order weight alone, which FuxiCTR sums over a sequence in any case.

    Raises:
        InputError: a feature has no table in the checkpoint, or cannot be expressed; by name.
    """
    fields, first, numbers = [], False, False
    for f in fields_of(run, 1, unpooled(run)):
        if only is not None and f.name not in only:
            continue
        found = [tuple(t.shape) for name, t in weights.items() if table_of(name) == (f.shares or f.name)]
        widths = [shape[0] if f.kind == "numeric" else shape[1] for shape in found]
        if not widths and f.kind != "numeric":
            expected = f"*.embedding_layers.{f.name}.weight, as FuxiCTR's layers name it"
            raise InputError(where, f"no embedding of {f.name}", expected)
        wide = [w for w in widths if w > 1] or widths[:1]
        first = first or len(widths) > len(wide)
        numbers = numbers or (f.kind == "numeric" and bool(widths))
        pooling = "sum" if f.name in summed and f.pooling is not None else f.pooling
        fields.append(replace(f, dim=sum(wide) or 1, pooling=pooling))
    return build_schema(run, fields, context, first, embedded_numbers=numbers, aligned=True)


def in_bucket_order(fields: Sequence[Field], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tables of numbers that FuxiCTR cut into buckets get the order of their buckets, as the schema's ids are."""
    rows = {f.name: list(f.buckets.rows) for f in fields if f.buckets is not None}
    out = dict(weights)
    for name, weight in weights.items():
        feature = table_of(name)
        if feature is not None and feature in rows:
            out[name] = weight[rows[feature]]
    return out
