"""Raw values of one request -> `RowBlock`: ids by vocabulary, hash, identity or bucket, and transformed numbers.

Whole columns at a time, exactly as `schema` documents each encoder. Knows nothing of HTTP, weights or devices.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, TypeAlias

import mmh3
import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import InputError
from dpiframe_core.schema import (
    Bucketize,
    Categorical,
    Column,
    FeatureSchema,
    Hash,
    Identity,
    Log,
    MinMax,
    Numeric,
    Standardize,
)  # fmt: skip
from dpiframe_core.types import RowBlock
from dpiframe_core.values import (
    Float64s,
    Int64s,
    Place,
    Values,
    column_length,
    read_bags,
    read_integers,
    read_numbers,
    read_texts,
)  # fmt: skip
from dpiframe_core.vocabulary import VocabularyTable, check_vocabularies, id_bound, vocabulary_name

# Marks among ids until the field's own rows replace them; real ids are >= 0 and -1 is padding.
_UNKNOWN, _MISSING = -2, -3
_NO_CONTEXT: Mapping[str, object] = MappingProxyType({})

_Lookup: TypeAlias = Callable[[Any], Int64s]
Encoded: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float32]


class Encoder:
    """Encodes requests of one schema. Immutable, so that threads may share it."""

    def __init__(self, schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable]) -> None:
        """`vocabularies` by file name, as in `Bundle.vocabularies`.

        Raises:
            BundleError: a vocabulary lacks or does not fit the schema.
        """
        self.schema = schema
        check_vocabularies(schema, vocabularies)
        lookups: dict[str | None, _Lookup] = {name: table.lookup(_UNKNOWN) for name, table in vocabularies.items()}
        self._fields: dict[str, _Categories | _Numbers] = {
            f.name: _Categories(f, id_bound(schema, f), lookups.get(vocabulary_name(f)))
            if isinstance(f, Categorical)
            else _Numbers(f, np.array(f.buckets.boundaries if f.buckets else (), np.float64))
            for f in schema.features
        }
        self._context_names = frozenset(f.name for f in schema.features if f.scope == "context")
        self._targets = [(f.name, schema.columns[f.name]) for f in schema.features]

    def encode(self, candidates: Mapping[str, Values], context: Mapping[str, object] = _NO_CONTEXT) -> RowBlock:
        """Encodes one request of n >= 1 candidates.

        Each feature of the schema is given exactly once, whatever its scope: as a column of n values in `candidates`, or as
        one value for the whole request in `context`. If a context feature comes as a column, every row gets its own context.

        Raises:
            InputError: a feature is unknown, lacks or is given twice, or a value breaks its feature's rule.
        """
        rows = self._check_names(candidates, context)
        own_context = not self._context_names.isdisjoint(candidates)
        parts: list[tuple[Column, Encoded]] = []
        unknown = 0
        with np.errstate(all="ignore"):  # an overflow is found, and refused by name, in the result
            for name, column in self._targets:
                indexed = name in candidates
                place = Place(f"candidates.{name}" if indexed else f"context.{name}", indexed)
                encoded, count = self._fields[name].encode(candidates[name] if indexed else [context[name]], place)
                parts.append((column, encoded))
                unknown += count
        block = RowBlock.allocate(self.schema.block_layout, rows, rows if own_context else 1, unknown)
        if own_context:
            block.request_of_row[:] = np.arange(rows)
        sections: dict[str, npt.NDArray[Any]] = {
            "context_ids": block.context_ids, "candidate_ids": block.candidate_ids,
            "context_dense": block.context_dense, "candidate_dense": block.candidate_dense,
        }  # fmt: skip
        for column, encoded in parts:
            sections[column.section][:, column.start : column.start + column.width] = encoded
        return block

    def _check_names(self, candidates: Mapping[str, Values], context: Mapping[str, object]) -> int:
        """The number of rows, once every feature is there exactly once and all columns are equally long."""
        for where, given in (("candidates", candidates), ("context", context)):
            if not isinstance(given, Mapping):
                raise InputError(where, given, "a mapping from feature names to values")
            for name in given:
                if name not in self._fields:
                    raise InputError(where, name, "a feature of the model")
        for name in self._fields:
            if name in candidates and name in context:
                raise InputError(f"context.{name}", context[name], "nothing, as candidates has a column of it")
            if name not in candidates and name not in context:
                scope = "context" if name in self._context_names else "candidates"
                raise InputError(f"{scope}.{name}", None, "the feature, as a column in candidates or as one value in context")
        if not candidates:
            raise InputError("candidates", {}, "at least one column")
        lengths = {name: column_length(values, Place(f"candidates.{name}", True)) for name, values in candidates.items()}
        first, rows = next(iter(lengths.items()))
        for name, length in lengths.items():
            if length == 0:
                raise InputError(f"candidates.{name}", length, "at least 1 value")
            if length != rows:
                raise InputError(f"candidates.{name}", length, f"{rows} values, as many as candidates.{first}")
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Categories:
    """Encodes one categorical feature; `bound` is above every id, `lookup` is that of its vocabulary, if it has one."""

    feature: Categorical
    bound: int
    lookup: _Lookup | None

    def encode(self, values: Values, place: Place) -> tuple[Int64s, int]:
        """int64[n, max_values] and how many values met no entry."""
        f = self.feature
        if f.max_values == 1:
            ids = self._ids(values, place)[:, None]
        else:
            flat, lengths, inside = read_bags(values, place)
            ids = self._padded(self._ids(flat, inside), lengths, place)
        if ids.min() >= 0:
            return ids, 0
        unknown, missing = ids == _UNKNOWN, ids == _MISSING
        return np.where(unknown, f.oov_id, np.where(missing, f.missing_id, ids)), int(np.count_nonzero(unknown))

    def _ids(self, values: Values, place: Place) -> Int64s:
        """int64[m]: ids, `_UNKNOWN` or `_MISSING`."""
        encoder = self.feature.encoder
        raw: list[str | None] | Int64s
        if self.feature.values == "int" or isinstance(encoder, Identity):
            raw, missing = read_integers(values, place)
        else:
            raw, missing = read_texts(values, place)
        if isinstance(encoder, Hash):
            ids = _hashed(raw, encoder, place)
        elif self.lookup is not None:
            ids = self.lookup(raw)
        else:
            ids = self._in_bounds(np.asarray(raw, np.int64), place)
        return ids if missing is None else np.where(missing, _MISSING, ids)

    def _in_bounds(self, ids: Int64s, place: Place) -> Int64s:
        outside = (ids < 0) | (ids >= self.bound)
        if not outside.any():
            return ids
        if isinstance(self.feature.encoder, Identity) and self.feature.encoder.out_of_range == "error":
            i = int(np.argmax(outside))
            raise InputError(place.value(i), int(ids[i]), f"an id from 0 to {self.bound - 1}")
        return np.where(outside, _UNKNOWN, ids)

    def _padded(self, ids: Int64s, lengths: Int64s, place: Place) -> Int64s:
        """int64[n, max_values]: bags cut to `max_values` by the feature's rule and filled up with -1."""
        width, rule = self.feature.max_values, self.feature.too_many
        excess = np.maximum(lengths - width, 0)
        if rule == "error" and excess.any():
            i = int(np.argmax(excess > 0))
            raise InputError(place.row(i), int(lengths[i]), f"at most {width} values")
        rows = np.repeat(np.arange(lengths.size), lengths)
        starts = np.cumsum(lengths) - lengths + (excess if rule == "keep_last" else 0)
        at = np.arange(ids.size) - starts[rows]
        kept = (at >= 0) & (at < width)
        out = np.full((lengths.size, width), -1, np.int64)
        out[rows[kept], at[kept]] = ids[kept]
        out[lengths == 0, 0] = _MISSING
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """Encodes one numeric feature; `boundaries` are those of its bucketize, if it has one."""

    feature: Numeric
    boundaries: Float64s

    def encode(self, values: Values, place: Place) -> tuple[Encoded, int]:
        """float32[n, 1], or the buckets' ids int64[n, 1]; no value of it can be unknown."""
        numbers, missing = read_numbers(values, place)
        buckets = self.feature.buckets
        out = numbers
        for transform in self.feature.transforms:
            match transform:
                case Log(offset=offset, minimum=minimum):
                    out = np.log(np.maximum(out, minimum) + offset)
                case Standardize(mean=mean, std=std):
                    out = (out - mean) / std
                case MinMax(minimum=low, maximum=high, clip=clip):
                    out = (out - low) / (high - low)
                    out = np.clip(out, 0.0, 1.0) if clip else out
                case Bucketize():
                    pass  # comes last, below
        if missing is not None:
            out = np.where(missing, 0.0 if buckets else self.feature.missing_value, out)
        encoded = out.astype(np.float32)
        finite = np.isfinite(out if buckets else encoded)
        if not finite.all():
            i = int(np.argmin(finite))
            raise InputError(place.value(i), float(numbers[i]), "a number that stays finite in float32 after its transforms")
        if buckets is None:
            return encoded[:, None], 0
        ids = np.searchsorted(self.boundaries, out, side="right").astype(np.int64) + buckets.first_id
        return (ids if missing is None else np.where(missing, self.feature.missing_id, ids))[:, None], 0


def _hashed(raw: list[str | None] | Int64s, encoder: Hash, place: Place) -> Int64s:
    # Bytes, never text: mmh3 5.3 crashes the process on text that has no UTF-8 form (a lone surrogate).
    texts = [text or "" for text in raw] if isinstance(raw, list) else []
    as_bytes: Iterator[bytes] = map(str.encode, texts) if isinstance(raw, list) else map(b"%d".__mod__, raw.tolist())
    try:
        hashes = np.fromiter(map(mmh3.mmh3_32_uintdigest, as_bytes, repeat(encoder.seed)), np.int64, len(raw))
    except UnicodeEncodeError:
        i = next(i for i, text in enumerate(texts) if any("\ud800" <= c <= "\udfff" for c in text))
        raise InputError(place.value(i), texts[i], "text that UTF-8 can hold") from None
    return hashes % encoder.buckets + encoder.first_id
