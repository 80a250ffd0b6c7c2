"""FuxiCTR's features as a schema and vocabularies: raw values become the ids and numbers that its feature processor gives.

What it does is in its `preprocess/{feature_processor,tokenizer,normalizer}.py`: missing values are filled before they are
encoded, an unknown or filled-in token has the id of __OOV__, 0 is padding, scalers compute in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpiframe_core.errors import InputError, shown
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric, Scope, Table, Vocabulary
from dpiframe_core.features.transforms import MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.importers.fuxictr.buckets import PREPROCESS, LogSquareBuckets, log_square_buckets
from dpiframe_core.importers.fuxictr.files import FuxiRun

_PAD, _OOV = "__PAD__", "__OOV__"
_POOLINGS: Mapping[str, Literal["mean", "sum"]] = {"layers.MaskedAveragePooling()": "mean", "layers.MaskedSumPooling()": "sum"}


@dataclass(frozen=True, slots=True)
class Field:
    """One feature as FuxiCTR's embedding layers see it.

    Attributes:
        kind: "numeric", "categorical" or "sequence". rows, dim: of its embedding (rows 1 for a number).
        shares: the feature whose embedding it reads, if it shares one. pooling: of a sequence; None: it stays one.
        buckets: of a number that FuxiCTR cut into categories.
    """

    name: str
    kind: str
    rows: int
    dim: int
    shares: str | None
    pooling: Literal["mean", "sum"] | None
    buckets: LogSquareBuckets | None = None


def fields_of(run: FuxiRun, dim: int, unpooled: Sequence[str] = ()) -> list[Field]:
    """The features in order. `dim`: the model's embedding_dim; `unpooled`: sequences that attention reads one by one.

    Raises:
        InputError: a feature of a kind that the bundle cannot express, by name.
    """
    out: list[Field] = []
    for name, spec in run.features.items():
        where = f"{run.files.feature_map}: {name}"
        kind, encoder = spec.get("type"), spec.get("feature_encoder")
        if kind not in ("numeric", "categorical", "sequence"):
            raise InputError(f"{where}: type", kind, "numeric, categorical or sequence")
        for key in ("category_processor", "pretrained_emb", "emb_output_dim"):
            if spec.get(key) is not None:
                rule = (
                    "none: its values cannot be carried over, but of pretrained embeddings made plain: docs/import-fuxictr.md"
                )
                raise InputError(f"{where}: {key}", spec[key], rule)
        pooling = None
        if kind == "sequence" and name not in unpooled:
            if not isinstance(encoder, str) or encoder not in _POOLINGS:
                raise InputError(f"{where}: feature_encoder", encoder, f"one of {', '.join(_POOLINGS)}")
            pooling = _POOLINGS[encoder]
        elif encoder is not None:
            raise InputError(f"{where}: feature_encoder", encoder, "none")
        shares = spec.get("share_embedding")
        # FuxiCTR shares only with a feature that comes earlier; else the feature gets a table of its own.
        # In a chain (c shares b's, which is a's) the table is the first one's.
        shares = next((f.shares or f.name for f in out if f.name == shares), None)
        rows = 1 if kind == "numeric" else spec["vocab_size"]
        if spec.get("padding_idx", 0) != 0:
            raise InputError(f"{where}: padding_idx", spec["padding_idx"], "0")
        own_dim = spec.get("embedding_dim", dim)
        if type(own_dim) is not int or own_dim < 1:
            raise InputError(f"{where}: embedding_dim", own_dim, "a positive integer")
        out.append(Field(name, kind, rows, own_dim, shares, pooling, _buckets(run, name, kind)))
        if out[-1].buckets is not None and shares is not None:
            raise InputError(f"{where}: share_embedding", shares, f"none for a feature with {PREPROCESS}")
    return out


def _buckets(run: FuxiRun, name: str, kind: str) -> LogSquareBuckets | None:
    column = run.columns[name]
    code = column.get("preprocess")
    if not code:
        return None
    if (
        code not in (PREPROCESS, f"{PREPROCESS}({name})")
        or kind != "categorical"
        or column.get("dtype") not in ("float", "int")
    ):
        raise InputError(f"columns.{name}.preprocess", code, f"none, or {PREPROCESS} of a number: other code stays behind")
    vocabulary = run.vocabularies[name]
    return log_square_buckets(_integers(name, vocabulary.without([_PAD, _OOV])), vocabulary.id_of(_OOV) or 0)


def build_schema(
    run: FuxiRun, fields: Sequence[Field], context: Sequence[str], first_order: bool, *, embedded_numbers: bool = True,
    aligned: bool = False,
) -> FeatureSchema:  # fmt: skip
    """The schema; `first_order`: every feature has a table of linear weights too, named NAME.w.

    Args:
        context: features that requests give once. embedded_numbers: False for models that read numbers as they are.
        aligned: whether steps of a history stand where FuxiCTR's padding puts them; models that only pool need not know.

    Raises:
        InputError: a column is transformed in a way that a schema cannot express, by name.
    """
    for name in context:
        if name not in {f.name for f in fields}:
            raise InputError("--context", name, f"features of the model: {shown([f.name for f in fields])}")
    features: list[Categorical | Numeric] = []
    tables: dict[str, Table] = {}
    for f in fields:
        scope: Scope = "context" if f.name in context else "candidate"
        column = run.columns[f.name]
        first = f"{f.name}.w" if first_order else None
        rows = f.rows if f.buckets is None else len(f.buckets.rows)
        table: str | None = f.shares or f.name
        try:
            if f.buckets is not None:
                features.append(_bucketed(f, f.buckets, column, scope, first))
            elif f.kind == "numeric":
                table = table if embedded_numbers else None
                features.append(_number(run, f, column, scope, table, first))
            else:
                assert table is not None
                features.append(_category(run, f, column, scope, table, first, aligned=aligned))
            if table is not None and table not in tables:
                tables[table] = Table(name=table, rows=rows, dim=f.dim)
            elif table is not None and (tables[table].rows, tables[table].dim) != (f.rows, f.dim):
                got = f"{f.rows} x {f.dim}, {f.shares} {tables[table].rows} x {tables[table].dim}"
                raise InputError(f"columns.{f.name}.share_embedding", got, "equal sizes")
        except InputError as e:
            raise e.at(e.where if e.where.startswith("columns.") else f"columns.{f.name}: {e.where}") from None
        if first is not None:
            tables[first] = Table(name=first, rows=rows, dim=1)
    return FeatureSchema(features=tuple(features), tables=tuple(tables.values()))


def build_vocabularies(run: FuxiRun, schema: FeatureSchema) -> dict[str, VocabularyTable]:
    """By feature name; without __OOV__, so that what is unknown is counted as such, and of lists without __PAD__, which is no
    value of theirs.
    """
    out = {}
    for f in schema.features:
        if isinstance(f, Categorical):
            dropped = [_OOV, _PAD] if f.values == "int" or f.max_values > 1 else [_OOV]
            out[f.name] = tokens = run.vocabularies[f.name].without(dropped)
            if f.values == "int":
                out[f.name] = tokens.of_integers() or VocabularyTable.of(_integers(f.name, tokens))
    return out


def _integers(feature: str, tokens: VocabularyTable) -> dict[int, int]:
    values, ids = tokens.table["value"].to_pylist(), tokens.table["id"].to_pylist()
    return {_integer(feature, token): i for token, i in zip(values, ids, strict=True)}


def _integer(feature: str, token: str) -> int:
    try:
        return int(token)
    except ValueError:
        raise InputError(f"vocabulary of {feature}", token, "integers, as its dtype says") from None


def _bucketed(f: Field, buckets: LogSquareBuckets, column: Mapping[str, Any], scope: Scope, first: str | None) -> Numeric:
    fill = column.get("fill_na", 0.0)
    if isinstance(fill, bool) or not isinstance(fill, int | float):
        raise InputError(f"columns.{f.name}.fill_na", fill, "a number")
    return Numeric(
        name=f.name, scope=scope, transforms=(buckets.transform,), missing_id=buckets.of(float(fill)), table=f.name,
        first_order_table=first,
    )  # fmt: skip


def _number(run: FuxiRun, f: Field, column: Mapping[str, Any], scope: Scope, table: str | None, first: str | None) -> Numeric:
    normalizer = run.normalizers.get(f.name)
    if column.get("dtype") not in ("float", "int"):
        raise InputError(f"columns.{f.name}.dtype", column.get("dtype"), "float or int for a number")
    if column.get("normalizer") and normalizer is None:
        raise InputError(f"columns.{f.name}.normalizer", column["normalizer"],
                         "its fitted values: --processor feature_processor.pkl, or --normalizers FILE.yaml")  # fmt: skip
    if normalizer is not None and not column.get("normalizer"):
        raise InputError(f"columns.{f.name}.normalizer", None, "the kind of its normaliser")
    fill = column.get("fill_na", 0.0)
    if isinstance(fill, bool) or not isinstance(fill, int | float):
        raise InputError(f"columns.{f.name}.fill_na", fill, "a number")
    return Numeric(
        name=f.name,
        scope=scope,
        transforms=() if normalizer is None else (normalizer,),
        missing_value=_normalized(float(fill), normalizer),
        table=table,
        first_order_table=first,
    )


def _category(
    run: FuxiRun, f: Field, column: Mapping[str, Any], scope: Scope, table: str, first: str | None, *, aligned: bool
) -> Categorical:
    vocabulary, dtype = run.vocabularies[f.name], column.get("dtype")
    if dtype not in ("str", "int"):
        raise InputError(f"columns.{f.name}.dtype", dtype, "str or int for categories")
    fill = column.get("fill_na", "" if dtype == "str" else 0)
    if type(fill) is not (str if dtype == "str" else int):
        raise InputError(f"columns.{f.name}.fill_na", fill, f"a value of dtype {dtype}")
    oov = vocabulary.id_of(_OOV)
    if f.kind == "categorical":
        filled = vocabulary.id_of(str(fill))
        return Categorical(
            name=f.name, scope=scope, values="string" if dtype == "str" else "int", encoder=Vocabulary(), table=table,
            first_order_table=first, missing_id=oov if filled is None else filled, oov_id=oov,
        )  # fmt: skip
    if dtype != "str":
        raise InputError(f"columns.{f.name}.dtype", dtype, "str for a sequence")
    if column.get("padding", "post") not in ("pre", "post"):
        raise InputError(f"columns.{f.name}.padding", column["padding"], "pre or post")
    longest = run.features[f.name].get("max_len")
    if type(longest) is not int or longest < 2:
        raise InputError(f"{run.files.feature_map}: {f.name}: max_len", longest, "at least 2")
    return Categorical(
        name=f.name, scope=scope, encoder=Vocabulary(), table=table, first_order_table=first,
        missing_id=-1, oov_id=oov, max_values=longest, splitter=column.get("splitter", "^"), padding_value=fill,
        too_many="keep_last" if column.get("padding", "post") == "pre" else "keep_first",
        align="last" if aligned and f.pooling is None and column.get("padding", "post") == "pre" else "first",
        pooling=f.pooling or "none", first_order_pooling=None if first is None else "sum",
    )  # fmt: skip


def _normalized(value: float, transform: Standardize | MinMax | None) -> float:
    match transform:
        case Standardize(mean=mean, std=std):
            value = (value - mean) / std
        case MinMax(minimum=low, maximum=high, clip=clip):
            value = (value - low) / (high - low)
            value = min(max(value, 0.0), 1.0) if clip else value
    return float(np.float64(value))
