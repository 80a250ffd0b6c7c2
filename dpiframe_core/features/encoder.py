"""Raw values of one request -> `RowBlock`, exactly as `schema` documents each of its encoders.

Owns the request as a whole: which features it must hold, where each goes. Knows nothing of HTTP, weights or devices.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import InputError
from dpiframe_core.features.arrow_columns import IN_PLACE
from dpiframe_core.features.block_layout import BlockLayout, Column, IdSection, Section
from dpiframe_core.features.feature_readers import STAYS_FINITE, CategoryReader, NumberReader, no_lookup
from dpiframe_core.features.multi_column_readers import QUIET, multi_column_readers, rows_of
from dpiframe_core.features.packed_column import PackedColumn
from dpiframe_core.features.raw_columns import ColumnValues, Float64s, Int64s, Place, as_list, column_length, read_numbers
from dpiframe_core.features.row_block import MISSING, UNKNOWN, RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema
from dpiframe_core.features.vocabulary import VocabularyTable, check_vocabularies, id_bound, vocabulary_name
from kernels.lookup.batch_header import HeaderWord

_QUICK = {list, PackedColumn, np.ndarray}
_NO_CARE = nullcontext()
_NO_CONTEXT: Mapping[str, object] = MappingProxyType({})


class Encoder:
    """Encodes requests of one schema. Immutable, so that threads may share it."""

    def __init__(self, schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable]) -> None:
        """`vocabularies` by file name, as in `Bundle.vocabularies`.

        Raises:
            BundleError: a vocabulary lacks or does not fit the schema.
        """
        self.schema = schema
        check_vocabularies(schema, vocabularies)
        lookups = {name: table.lookup(UNKNOWN, MISSING) for name, table in vocabularies.items()}
        self._fields: dict[str, _Field] = {}
        for f in schema.features:
            reader: CategoryReader | NumberReader
            if isinstance(f, Categorical):
                reader = CategoryReader(f, id_bound(schema, f), lookups.get(vocabulary_name(f) or "", no_lookup))
            else:
                reader = NumberReader(f, np.array(f.buckets.boundaries if f.buckets else (), np.float64))
            place = Place(f"candidates.{f.name}", True), Place(f"context.{f.name}", False)
            self._fields[f.name] = _Field(f.name, schema.columns[f.name], reader, *place)
        self._multi_column = multi_column_readers(schema, lookups)
        together = {name for reader in self._multi_column for name in reader.names}
        self._alone = [field for name, field in self._fields.items() if name not in together]
        self._context_names = frozenset(f.name for f in schema.features if f.scope == "context")
        self._candidate_names = self._fields.keys() - self._context_names
        ids: tuple[IdSection, ...] = ("context_ids", "candidate_ids")
        self._stand_ins = {section: own for section in ids if (own := _stand_ins(schema, section)).size}
        numbers: tuple[Section, ...] = ("context_dense", "candidate_dense")
        self._numbers = tuple(section for section in numbers if getattr(schema.block_layout, section))

    def encode(
        self,
        candidates: Mapping[str, ColumnValues],
        context: Mapping[str, object] = _NO_CONTEXT,
        allocate: Callable[[BlockLayout, int, int], RowBlock] = RowBlock.allocate,
        context_rows: Int64s | None = None,
    ) -> RowBlock:
        """Encodes one request of n >= 1 candidates.

        Each feature of the schema is given exactly once, whatever its scope: as a column of n values in `candidates`, or as
        one value for the whole request in `context`. If a context feature comes as a column, every row gets its own context.
        `allocate` makes the block of zeros, of a layout, rows and contexts, that is filled. With `context_rows`, which
        `check_context_rows` has found sound, there are several contexts: `context` has columns of one value for each, and they
        say how many candidates each is for, in their order.

        Raises:
            InputError: a feature is unknown, lacks or is given twice, or a value breaks its feature's rule.
        """
        rows = self._check_names(candidates, context)
        own_context = not self._context_names.isdisjoint(candidates)
        contexts = rows if own_context else 1 if context_rows is None else len(context_rows)
        block = allocate(self.schema.block_layout, rows, contexts)
        if own_context:
            block.request_of_row[:] = np.arange(rows)
        elif context_rows is not None:
            block.request_of_row[:] = np.repeat(np.arange(contexts), context_rows)
        sections: dict[Section, npt.NDArray[Any]] = {section: getattr(block, section) for section in self._numbers}
        for section, stand_ins in self._stand_ins.items():  # wide ids, with room for marks; a column is written at once
            n = contexts if section == "context_ids" else rows
            sections[section] = np.empty((n, stand_ins.shape[1]), np.int64, order="F")
        alone = self._left_over(self._read_together(candidates, context, sections, context_rows is not None))
        with QUIET() if alone else _NO_CARE:
            for field in alone:
                column, into = field.column, sections[field.column.section]
                values: npt.NDArray[Any] = field.encode(candidates, context, context_rows is not None)
                if context_rows is not None and len(values) != len(into):
                    values = np.repeat(values, context_rows, axis=0)
                into[:, column.start : column.start + column.width] = values
        for section, stand_ins in self._stand_ins.items():
            if count := block.settle_ids(section, sections[section], stand_ins):
                block.header[HeaderWord.OOV_COUNT] += count
        if alone and self._numbers and not np.isfinite(block.dense).all():  # what is read together is finite
            for field in self._fields.values():
                column = field.column
                field.refuse_overflow(candidates, context, sections[column.section][:, column.start], context_rows)
        return block

    def _read_together(
        self,
        candidates: Mapping[str, ColumnValues],
        context: Mapping[str, object],
        sections: dict[Section, npt.NDArray[Any]],
        several: bool,
    ) -> set[str]:
        """Fills the columns of the features that can be read together; returns the names of those that could not."""
        left: set[str] = set()
        for reader in self._multi_column:
            columns = reader.columns(candidates, context, several)
            if columns and reader.scope == "context" and rows_of(columns) != len(sections[reader.section]):
                columns = None  # one value stands for several contexts
            if columns is None or not reader.read(columns, sections[reader.section].T):
                left |= reader.name_set
        return left

    def _left_over(self, left: set[str]) -> "list[_Field]":
        """The features that no reader has read with others, as the schema has them in order."""
        return [field for field in self._fields.values() if field.name in left or field in self._alone] if left else self._alone

    def _check_names(self, candidates: Mapping[str, ColumnValues], context: Mapping[str, object]) -> int:
        """The number of rows, once every feature is there exactly once and all columns are equally long."""
        given_once = isinstance(candidates, Mapping) and isinstance(context, Mapping)
        given_once = given_once and candidates.keys() == self._candidate_names and context.keys() == self._context_names
        for where, given in () if given_once else (("candidates", candidates), ("context", context)):
            if not isinstance(given, Mapping):
                raise InputError(where, given, "a mapping from feature names to values")
            if not given.keys() <= self._fields.keys():
                raise InputError(where, next(n for n in given if n not in self._fields), "a feature of the model")
        for name in () if given_once else self._fields:
            if name in candidates and name in context:
                raise InputError(f"context.{name}", context[name], "nothing, as candidates has a column of it")
            if name not in candidates and name not in context:
                scope = "context" if name in self._context_names else "candidates"
                rule = "the feature: of every candidate in candidates, or once in context"
                raise InputError.worded(f"{scope}.{name}", "nothing", rule)
        if not candidates:
            raise InputError("candidates", {}, "at least one column")
        if type(candidates) in IN_PLACE and (rows := candidates.rows):  # type: ignore[attr-defined]
            return int(rows)
        if set(map(type, candidates.values())) <= _QUICK:  # as JSON has them, all of one length: in one look
            with suppress(TypeError):  # an array of no dimension
                known = set(map(len, candidates.values()))
                if len(known) == 1 and 0 not in known:
                    return known.pop()
        lengths = {name: column_length(values, self._fields[name].in_candidates) for name, values in candidates.items()}
        first, rows = next(iter(lengths.items()))
        for name, length in lengths.items():
            if length == 0:
                raise InputError(f"candidates.{name}", length, "at least 1 value")
            if length != rows:
                raise InputError(f"candidates.{name}", length, f"{rows} values, as many as candidates.{first}")
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Field:
    """A feature's reader, its columns in a block, and the names of its two possible places in a request."""

    name: str
    column: Column
    reader: CategoryReader | NumberReader
    in_candidates: Place
    in_context: Place

    def encode(self, candidates: Mapping[str, ColumnValues], context: Mapping[str, object], several: bool) -> Int64s | Float64s:
        """[n, or a row a context, width]: ids, marks and padding, or numbers. `several`: the context has columns."""
        return self.reader.encode(*self._given(candidates, context, several))

    def _given(
        self, candidates: Mapping[str, ColumnValues], context: Mapping[str, object], several: bool
    ) -> tuple[ColumnValues, Place]:
        if self.name in candidates:
            return _unpacked(candidates[self.name]), self.in_candidates
        if several:
            return _unpacked(context[self.name]), replace(self.in_context, indexed=True)
        return [context[self.name]], self.in_context

    def refuse_overflow(
        self,
        candidates: Mapping[str, ColumnValues],
        context: Mapping[str, object],
        encoded: npt.NDArray[Any],
        context_rows: Int64s | None,
    ) -> None:
        """Names the first value whose encoded form is not finite, if there is one."""
        if not np.isfinite(encoded).all():
            values, place = self._given(candidates, context, context_rows is not None)
            numbers, _ = read_numbers(values, place)
            i = int(np.argmin(np.isfinite(encoded)))
            if context_rows is not None and len(numbers) != len(encoded):
                i = int(np.searchsorted(np.cumsum(context_rows), i, side="right"))
            raise InputError(place.value(i), float(numbers[min(i, len(numbers) - 1)]), STAYS_FINITE)


def _unpacked(values: ColumnValues) -> ColumnValues:
    return as_list(values) if isinstance(values, PackedColumn) else values


def _stand_ins(schema: FeatureSchema, section: str) -> Int64s:
    """[2, columns] of an id section: the ids of an unknown and of a missing value."""
    unknown: list[int] = []
    missing: list[int] = []
    for f in schema.features:
        if schema.columns[f.name].section == section:
            unknown += [f.oov_id or 0] * f.max_values  # without a row of their own, the readers refuse them
            missing += [f.missing_id or 0] * f.max_values
    return np.array([unknown, missing], np.int64)
