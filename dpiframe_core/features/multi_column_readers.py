"""The fast way through the encoders: all text features, all ready ids, or all numbers, of one side of a request in one pass.

`feature_readers` says what each value becomes; here many plain columns become it together, bit for bit the same, because a
request of 100 candidates spends its time on 40 small columns rather than on 4,000 values. What is not plain (another type, a
wrong value, not a list) makes a reader answer None, and the request goes the careful way, which also words the error; so
do texts by vocabulary and numbers where C could not be built.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeAlias

import mmh3
import numpy as np
import numpy.typing as npt

from dpiframe_core.features.block_layout import Section
from dpiframe_core.features.feature_readers import MISSING, UNKNOWN, Lookup
from dpiframe_core.features.raw_columns import Float64s, Int64s
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema, Hash, Identity, Numeric, Scope
from dpiframe_core.features.transforms import Log, MinMax, Standardize
from dpiframe_core.features.vocabulary import TextLookup, id_bound, vocabulary_name
from kernels.runtime import c_build

Columns: TypeAlias = Sequence[list[Any]]
Read: TypeAlias = Callable[[Columns], npt.NDArray[Any] | None]


@dataclass(frozen=True, slots=True, eq=False)
class MultiColumnReader:
    """Reads features of one scope and kind together. `at`: their columns in the block's section; `read`: [k, n] or None."""

    names: tuple[str, ...]
    scope: Scope
    section: Section
    at: npt.NDArray[np.intp]
    read: Read

    def columns(self, candidates: Mapping[str, Any], context: Mapping[str, Any]) -> Columns | None:
        """The features' columns, if the request has them all on the side that the schema puts them on."""
        if self.scope == "context":
            return [[context[name]] for name in self.names] if context.keys() >= set(self.names) else None
        columns = [candidates.get(name) for name in self.names]
        return columns if set(map(type, columns)) == {list} else None  # type: ignore[return-value]


def multi_column_readers(schema: FeatureSchema, lookups: Mapping[str, Lookup]) -> list[MultiColumnReader]:
    """A reader for every group of features of one scope that can be read together. `lookups`: by vocabulary name."""
    groups: dict[tuple[Any, ...], list[Feature]] = {}
    for f in schema.features:
        if isinstance(f, Numeric) and f.buckets is None:
            groups.setdefault((f.scope, *(type(t) for t in f.transforms)), []).append(f)
        elif isinstance(f, Categorical) and f.max_values == 1 and _is_plain(f):
            groups.setdefault((f.scope, f.encoder.type), []).append(f)
    return [_reader(schema, lookups, members) for members in groups.values()]


def _is_plain(f: Categorical) -> bool:
    if isinstance(f.encoder, Identity):
        return f.padding_value is None
    return f.values == "string"


def _reader(schema: FeatureSchema, lookups: Mapping[str, Lookup], members: list[Feature]) -> MultiColumnReader:
    places = [schema.columns[f.name] for f in members]
    numbers = [f for f in members if isinstance(f, Numeric)]
    categories = [f for f in members if isinstance(f, Categorical)]
    hashes = [f.encoder for f in categories if isinstance(f.encoder, Hash)]
    read: Read
    if numbers:
        read = _numbers(numbers)
    elif hashes:
        read = _hashes(hashes)
    elif isinstance(categories[0].encoder, Identity):
        read = _identities(np.array([[id_bound(schema, f)] for f in categories]))
    else:
        found = [lookups[vocabulary_name(f) or ""] for f in categories]
        read = _vocabularies(categories, [table for table in found if isinstance(table, TextLookup)])
    return MultiColumnReader(
        tuple(f.name for f in members), members[0].scope, places[0].section, np.array([p.start for p in places]), read
    )


def _vocabularies(features: list[Categorical], tables: list[TextLookup]) -> Read:
    refused = {
        UNKNOWN: np.array([f.oov_id is None for f in features]),
        MISSING: np.array([f.missing_id is None for f in features]),
    }
    dicts, unknown = tuple(table.id_of for table in tables), tuple(table.unknown for table in tables)

    def read(columns: Columns) -> Int64s | None:
        functions = c_build.request_extension()
        if functions is None:
            return None
        out = np.empty((len(columns), len(columns[0])), np.int64)
        if not functions.column_ids(columns, dicts, unknown, out):
            return None
        if out.min() < 0 and any((out[by] == mark).any() for mark, by in refused.items()):
            return None
        return out

    return read


def _hashes(encoders: list[Hash]) -> Read:
    buckets = np.array([[e.buckets] for e in encoders])
    first = np.array([[e.first_id or 0] for e in encoders])

    def read(columns: Columns) -> Int64s | None:
        if set(map(type, chain.from_iterable(columns))) != {str}:
            return None
        texts = zip(encoders, columns, strict=True)
        digests = (map(mmh3.mmh3_32_uintdigest, map(str.encode, c), repeat(e.seed)) for e, c in texts)
        try:
            hashes = np.fromiter(chain.from_iterable(digests), np.int64, len(columns) * len(columns[0]))
        except UnicodeEncodeError:
            return None
        ids: Int64s = hashes.reshape(len(columns), -1) % buckets + first
        return ids

    return read


def _identities(bounds: Int64s) -> Read:
    def read(columns: Columns) -> Int64s | None:
        if set(map(type, chain.from_iterable(columns))) != {int}:
            return None
        try:
            ids = np.fromiter(chain.from_iterable(columns), np.int64, len(columns) * len(columns[0]))
        except OverflowError:
            return None
        ids = ids.reshape(len(columns), -1)
        return None if ids.min() < 0 or (ids >= bounds).any() else ids

    return read


def _numbers(features: list[Numeric]) -> Read:
    missing_value = np.array([[f.missing_value or 0.0] for f in features])
    refused = np.array([f.missing_value is None for f in features])
    steps = [_together(same) for same in zip(*(f.transforms for f in features), strict=True)]

    def read(columns: Columns) -> Float64s | None:
        functions = c_build.request_extension()
        if functions is None:
            return None
        out = np.empty((len(columns), len(columns[0])), np.float64)
        nulls = functions.column_numbers(columns, out)  # which become NaN
        if nulls < 0:
            return None
        missing = None
        if not np.isfinite(out).all():
            missing = np.isnan(out)
            if np.isinf(out).any() or np.count_nonzero(missing) != nulls or missing[refused].any():
                return None
            out[missing] = 0.0
        for step in steps:
            out = step(out)
        return out if missing is None else np.where(missing, missing_value, out)

    return read


def _together(same: Sequence[Any]) -> Callable[[Float64s], Float64s]:
    """One kind of transform, with each feature's own constants."""

    def column(field: str) -> Float64s:
        return np.array([[getattr(t, field)] for t in same], np.float64)

    match same[0]:
        case Log():
            offset, minimum = column("offset"), column("minimum")
            return lambda x: np.log(np.maximum(x, minimum) + offset)
        case Standardize():
            mean, std = column("mean"), column("std")
            return lambda x: (x - mean) / std
        case MinMax():
            low, span, clip = column("minimum"), column("maximum") - column("minimum"), column("clip") > 0

            def scaled(x: Float64s) -> Float64s:
                y = (x - low) / span
                return np.where(clip, np.clip(y, 0.0, 1.0), y)

            return scaled
    raise TypeError(f"transform: got {type(same[0]).__name__}, expected one that gives numbers")
