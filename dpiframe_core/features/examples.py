"""Example requests: made-up ids and numbers, for timing; and raw values for people, what the encoders would have been given."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Identity, Numeric
from dpiframe_core.features.transforms import Bucketize, Log, MinMax, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable, vocabulary_name

_ABSENT = object()
_ROWS = 5


def sample_block(schema: FeatureSchema, rows: int, seed: int = 0) -> RowBlock:
    """`rows` candidates of one context, drawn uniformly from whole tables, so that no cache helps.

    Equal arguments give equal bytes.
    """
    rng = np.random.default_rng(seed)
    block = RowBlock.allocate(schema.block_layout, rows)
    for f in schema.features:
        values = block.column(schema.columns[f.name])
        if f.is_id:
            names = [name for name in (f.table, f.first_order_table) if name is not None]
            values[:] = rng.integers(0, min(schema.table(name).rows for name in names), values.shape)
        else:
            values[:] = rng.standard_normal(values.shape)
    return block


def sample_columns(schema: FeatureSchema, rows: int) -> dict[str, npt.NDArray[Any]]:
    """The same by feature, [rows, width] each: those of the context stand in every row."""
    block = sample_block(schema, rows)
    return {n: np.broadcast_to(c := block.column(place), (rows, c.shape[1])) for n, place in schema.columns.items()}


def raw_example(schema: FeatureSchema, block: RowBlock, vocabularies: Mapping[str, VocabularyTable]) -> dict[str, Any] | None:
    """The first rows as a request body, `context` of the first; None where a feature has no raw value (an empty vocabulary).

    Ids become the values that encode to them, or, where none does (a hash, an id outside the vocabulary), another legal value.
    Numbers are rounded to six digits.
    """
    rows = min(_ROWS, block.rows)
    context: dict[str, object] = {}
    candidates: dict[str, list[object]] = {}
    for f in schema.features:
        place = schema.columns[f.name]
        if place.section == "context_ids" or place.section == "candidate_ids":
            encoded = block.wide_ids(place.section)[:, place.start : place.start + place.width]
        else:
            encoded = block.column(place)
        if place.section.startswith("context"):
            encoded = encoded[block.request_of_row]
        values = [_raw(f, row, vocabularies) for row in encoded[: 1 if f.scope == "context" else rows].tolist()]
        if _ABSENT in values:
            return None
        if f.scope == "context":
            context[f.name] = values[0]
        else:
            candidates[f.name] = values
    return {"context": context, "candidates": candidates} if candidates else None


def _raw(f: Categorical | Numeric, encoded: list[Any], vocabularies: Mapping[str, VocabularyTable]) -> object:
    if isinstance(f, Numeric):
        return _number(f, encoded[0])
    kept = [id_ for id_ in encoded if id_ >= 0]
    if f.max_values > 1:
        values = [_category(f, id_, vocabularies) for id_ in kept]
        if f.missing_id is None and not values:
            values = [_category(f, 0, vocabularies)]
        return _ABSENT if _ABSENT in values else values
    return _category(f, kept[0], vocabularies)


def _category(f: Categorical, id_: int, vocabularies: Mapping[str, VocabularyTable]) -> object:
    match f.encoder:
        case Identity():
            value: object = id_
        case Hash():
            value = f"{f.name} {id_}" if f.values == "string" else id_
        case _:
            table = vocabularies[vocabulary_name(f) or ""].table
            found = table.filter(pc.equal(table["id"], id_))["value"]
            if not len(found) and id_ == f.missing_id:
                return None
            if not len(table):
                return _ABSENT
            value = (found if len(found) else table["value"])[0].as_py()
    return None if value == f.padding_value and f.padding_value is not None and f.missing_id is not None else value


def _number(f: Numeric, encoded: float) -> object:
    """A number that the transforms make the encoded one of, or as near as they can."""
    value = float(encoded)
    for transform in reversed(f.transforms):
        match transform:
            case Bucketize(boundaries=boundaries, first_id=first):
                at = int(np.clip(int(encoded) - (first or 0), 0, len(boundaries)))
                value = boundaries[at - 1] if at else boundaries[0] - 1
            case Standardize(mean=mean, std=std):
                value = value * std + mean
            case MinMax(minimum=low, maximum=high):
                value = value * (high - low) + low
            case Log(offset=offset, minimum=minimum):
                value = max(math.exp(min(value, 80.0)) - offset, minimum)
    return float(f"{value:.6g}")
