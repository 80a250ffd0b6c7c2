"""Readers of one feature: ids by vocabulary, hash, identity or bucket, and transformed numbers, a whole column at a time.

They leave marks for unknown and missing values, which `encoder` replaces for all features at once.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import mmh3
import numpy as np

from dpiframe_core.errors import InputError
from dpiframe_core.features.raw_columns import (
    ColumnValues,
    Float64s,
    Int64s,
    Place,
    as_list,
    distinct,
    null_mask,
    read_bags,
    read_integers,
    read_numbers,
    read_texts,
    split_text,
)
from dpiframe_core.features.row_block import MISSING, UNKNOWN
from dpiframe_core.features.schema import Categorical, Hash, Identity, Numeric, Vocabulary
from dpiframe_core.features.transforms import Bucketize, Log, MinMax, Standardize

NO_MISSING = "a value, as the schema gives no missing_id for null"
NO_MISSING_LIST = "at least one value, as the schema gives no missing_id for an empty list"
NO_UNKNOWN = "a value of the vocabulary, as the schema gives no oov_id for others"
NO_NULL_NUMBER = "a number, as the schema does not say what null means"
STAYS_FINITE = "a number that stays finite in float32 after its transforms"

Lookup: TypeAlias = Callable[[Any], Int64s]


def no_lookup(values: object) -> Int64s:
    """Stands where a feature has no vocabulary."""
    raise TypeError(f"no_lookup: got {type(values).__name__}, expected no call")


@dataclass(frozen=True, slots=True, eq=False)
class CategoryReader:
    """Encodes one categorical feature; `bound` is above every id, `lookup` is that of its vocabulary, unused without."""

    feature: Categorical
    bound: int
    lookup: Lookup

    def encode(self, values: ColumnValues, place: Place) -> Int64s:
        """int64[n, max_values]: ids, marks and padding."""
        if self.feature.max_values == 1:
            return self._known(self._ids(values, place), values, place)[:, None]
        splitter = self.feature.splitter
        rows = values if splitter is None else [split_text(v, splitter, self.feature.values) for v in as_list(values)]
        flat, lengths, inside = read_bags(rows, place)
        if self.feature.missing_id is None and (lengths == 0).any():
            i = int(np.argmin(lengths))
            raise InputError(place.row(i), as_list(values)[i], NO_MISSING_LIST)
        return self._padded(self._known(self._ids(flat, inside), flat, inside), lengths, place)

    def _ids(self, values: ColumnValues, place: Place) -> Int64s:
        """int64[m]: ids and marks."""
        if self._by_object and (found := distinct(values)) is not None:
            with suppress(InputError):  # told below, of the row
                return self._ids_of(found[0], place)[found[1]]
        return self._ids_of(values, place)

    def _known(self, ids: Int64s, values: ColumnValues, place: Place) -> Int64s:
        """The ids, once none stands for a null or an unknown value that the schema gives no row for."""
        f = self.feature
        for mark, row, rule in ((MISSING, f.missing_id, NO_MISSING), (UNKNOWN, f.oov_id, NO_UNKNOWN)):
            if row is None and (marked := ids == mark).any():
                i = int(np.argmax(marked))
                raise InputError(place.value(i), as_list(values)[i], rule)
        return ids

    @property
    def _by_object(self) -> bool:
        """Whether every value becomes a Python object: text does, and what is hashed."""
        return isinstance(self.feature.encoder, Hash) or self.feature.values == "string"

    def _ids_of(self, values: ColumnValues, place: Place) -> Int64s:
        encoder = self.feature.encoder
        if self.feature.values == "string" and not isinstance(encoder, Identity):
            texts, null = read_texts(values, place)
            if self.feature.padding_value is not None:
                texts, null = [None if text == self.feature.padding_value else text for text in texts], True
            if not isinstance(encoder, Hash):
                return self.lookup(texts)  # which knows null
            ids = _hashed_texts([text or "" for text in texts] if null else texts, encoder, place)
            return np.where(null_mask(texts), MISSING, ids) if null else ids
        integers, missing = read_integers(values, place)
        if self.feature.padding_value is not None:
            padding = integers == self.feature.padding_value
            missing = padding if missing is None else missing | padding
            integers = np.where(missing, 0, integers)
        match encoder:
            case Identity():
                ids = self._in_bounds(integers, encoder, place)
            case Hash():
                ids = _hashed(map(b"%d".__mod__, integers.tolist()), len(integers), encoder)
            case Vocabulary():
                ids = self.lookup(integers)
        return ids if missing is None else np.where(missing, MISSING, ids)

    def _in_bounds(self, ids: Int64s, encoder: Identity, place: Place) -> Int64s:
        outside = (ids < 0) | (ids >= self.bound)
        if not outside.any():
            return ids
        if encoder.out_of_range == "error":
            i = int(np.argmax(outside))
            raise InputError(place.value(i), int(ids[i]), f"an id from 0 to {self.bound - 1}")
        return np.where(outside, UNKNOWN, ids)

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
        last = self.feature.align == "last"
        if last:
            at += (width - np.minimum(lengths, width))[rows]
        out = np.full((lengths.size, width), -1, np.int64)
        out[rows[kept], at[kept]] = ids[kept]
        out[lengths == 0, -1 if last else 0] = MISSING
        return out


@dataclass(frozen=True, slots=True, eq=False)
class NumberReader:
    """Encodes one numeric feature; `boundaries` are those of its bucketize, if it has one."""

    feature: Numeric
    boundaries: Float64s

    def encode(self, values: ColumnValues, place: Place) -> Float64s | Int64s:
        """float64[n, 1], or the buckets' ids int64[n, 1]."""
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
        stand_in = self.feature.missing_value if buckets is None else self.feature.missing_id
        if stand_in is None and missing is not None and missing.any():
            raise InputError(place.value(int(np.argmax(missing))), None, NO_NULL_NUMBER)
        if buckets is None:
            return (out if missing is None else np.where(missing, self.feature.missing_value or 0.0, out))[:, None]
        if not np.isfinite(out).all():
            i = int(np.argmin(np.isfinite(out)))
            raise InputError(place.value(i), float(numbers[i]), STAYS_FINITE)
        ids = np.searchsorted(self.boundaries, out, side="right") + np.int64(buckets.first_id or 0)
        return (ids if missing is None else np.where(missing, MISSING, ids))[:, None]


def _hashed(values: Iterator[bytes], count: int, encoder: Hash) -> Int64s:
    hashes = np.fromiter(map(mmh3.mmh3_32_uintdigest, values, repeat(encoder.seed)), np.int64, count)
    return hashes % encoder.buckets + (encoder.first_id or 0)


def _hashed_texts(texts: list[Any], encoder: Hash, place: Place) -> Int64s:
    try:
        # Bytes, never text: mmh3 5.3 crashes the process on text that has no UTF-8 form (a lone surrogate).
        return _hashed(map(str.encode, texts), len(texts), encoder)
    except UnicodeEncodeError:
        i = next(i for i, text in enumerate(texts) if any("\ud800" <= c <= "\udfff" for c in text))
        raise InputError(place.value(i), texts[i], "text that UTF-8 can hold") from None
