"""Vocabularies: raw value -> id, their Parquet files, and the check that their ids are rows of the tables that use them.

Knows the schema; knows nothing of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpiframe_core.errors import BundleError, shown
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric, Vocabulary
from kernels.runtime import c_build


class TextLookup:
    """Text, or None, to ids. `native` is the vocabulary in C, for who looks up several columns at once; None without C."""

    def __init__(self, table: pa.Table, unknown: int, missing: int) -> None:
        self.unknown, self.missing = unknown, missing
        functions = c_build.request_extension()
        values, ids = table["value"].cast(pa.large_string()).combine_chunks(), table["id"].to_numpy()
        self.native: object | None = None
        self._id_of: dict[str | None, int] = {}
        if functions is None:
            self._id_of = dict(zip(values.to_pylist(), ids.tolist(), strict=True)) | {None: missing}
        else:
            _, bounds, data = values.buffers()
            offsets = (
                np.frombuffer(bounds, np.int64)[values.offset : values.offset + len(values) + 1] if len(values) else _EMPTY
            )
            self.native = functions.vocabulary(memoryview(data or b""), offsets, np.ascontiguousarray(ids))

    def __call__(self, texts: Sequence[str | None]) -> npt.NDArray[np.int64]:
        functions = c_build.request_extension()
        if self.native is None or functions is None:
            return np.fromiter(map(self._id_of.get, texts, repeat(self.unknown)), np.int64, len(texts))
        ids = np.empty(len(texts), np.int64)
        if functions.column_ids([list(texts)], (self.native,), self.unknown, self.missing, ids, _FIRST):
            return ids
        # One has no form in UTF-8, so no vocabulary has it; or is of a class of its own.
        sound = np.fromiter(map(_is_sound, texts), np.bool_, len(texts))
        ids[:] = self.unknown
        ids[sound] = self([None if text is None else str.__str__(text) for text in compress(texts, sound)])
        return ids


_EMPTY = _FIRST = np.zeros(1, np.int64)


def _is_sound(text: str | None) -> bool:
    return text is None or not any("\ud800" <= c <= "\udfff" for c in text)


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyTable:
    """The ids of the raw values that one or more features know.

    Attributes:
        table: columns `value` (string or int64, distinct) and `id` (int64, >= 0; two values may share one), no nulls.
    """

    table: pa.Table

    def __post_init__(self) -> None:
        if self.table.column_names != ["value", "id"]:
            raise BundleError(f"vocabulary: got columns {shown(self.table.column_names)}, expected ['value', 'id']")
        value, ident = self.table["value"], self.table["id"]
        if value.type not in (pa.string(), pa.large_string(), pa.int64()):
            raise BundleError(f"vocabulary: got value of type {value.type}, expected string or int64")
        if ident.type != pa.int64():
            raise BundleError(f"vocabulary: got id of type {ident.type}, expected int64")
        if nulls := value.null_count + ident.null_count:
            raise BundleError(f"vocabulary: got {nulls} nulls, expected none")
        if len(ident) and (lowest := pc.min(ident).as_py()) < 0:
            raise BundleError(f"vocabulary: got id {lowest}, expected ids from 0")
        if pc.count_distinct(value).as_py() != len(value):
            counts = pc.value_counts(value)
            twice = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
            raise BundleError(f"vocabulary: got {shown(twice)} twice, expected distinct values")

    @classmethod
    def of(cls, id_of: Mapping[str, int] | Mapping[int, int]) -> Self:
        """A vocabulary of all text or all integers (of text, if it is empty)."""
        kind = int if type(next(iter(id_of), "")) is int else str
        for what, found, expected in (("value", set(map(type, id_of)), kind), ("id", set(map(type, id_of.values())), int)):
            for other in found - {expected}:
                raise BundleError(f"vocabulary: got a {what} of type {other.__name__}, expected {expected.__name__}")
        try:
            value = pa.array(list(id_of), pa.int64() if kind is int else pa.string())
            ident = pa.array(list(id_of.values()), pa.int64())
        except (pa.ArrowException, OverflowError, UnicodeError) as e:
            raise BundleError(f"vocabulary: got {shown(str(e))}, expected UTF-8 text or integers of 64 bits") from e
        return cls(pa.table({"value": value, "id": ident}))

    @property
    def values(self) -> Literal["string", "int"]:
        return "int" if self.table["value"].type == pa.int64() else "string"

    def lookup(self, unknown: int, missing: int) -> Callable[[Any], npt.NDArray[np.int64]]:
        """A function from raw values to int64[n] ids, `unknown` where there is no entry.

        It takes int64[n], or a list of str and None; None gives `missing`.
        """
        if self.values == "string":
            return TextLookup(self.table, unknown, missing)
        # Sorted arrays, since a dict of integers takes ten times their memory and, out of cache, twice the time.
        ordered = self.table.sort_by("value")
        values, ids = np.append(ordered["value"].to_numpy(), 0), np.append(ordered["id"].to_numpy(), unknown)
        size = len(ordered)

        def find(integers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            at = np.searchsorted(values[:size], integers)
            return np.where(values[at] == integers, ids[at], unknown)

        return find


def vocabulary_name(feature: Categorical) -> str | None:
    """The name of the vocabulary file that a feature reads, if it reads one."""
    return (feature.encoder.file or feature.name) if isinstance(feature.encoder, Vocabulary) else None


def id_bound(schema: FeatureSchema, feature: Categorical | Numeric) -> int:
    """Every id of the feature is below this: the rows of its table, or of its first-order table if that has fewer."""
    names = (feature.table, feature.first_order_table)
    return min(schema.table(name).rows for name in names if name is not None)


def check_vocabularies(schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable]) -> None:
    """Checks every feature's vocabulary, by file name.

    Raises:
        BundleError: one lacks, holds the wrong kind of values, or gives an id that is no row of the feature's tables.
    """
    for f in schema.features:
        name = vocabulary_name(f) if isinstance(f, Categorical) else None
        if name is None or not isinstance(f, Categorical):
            continue
        where = f"vocab/{name}.parquet"
        if name not in vocabularies:
            raise BundleError(f"{where}: got nothing, expected the vocabulary of feature {f.name}")
        vocabulary, bound = vocabularies[name], id_bound(schema, f)
        if vocabulary.values != f.values:
            raise BundleError(f"{where}: got {vocabulary.values} values, expected {f.values} for feature {f.name}")
        beyond = vocabulary.table.filter(pc.greater_equal(vocabulary.table["id"], bound)).slice(0, 1).to_pylist()
        for row in beyond:
            got = f"id {row['id']} for {shown(row['value'])}"
            raise BundleError(f"{where}: got {got}, expected ids below {bound} for feature {f.name}")


def read_vocabulary(path: Path) -> VocabularyTable:
    """Reads a Parquet file. Its errors do not name the file: the caller does."""
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
        table.validate(full=True)  # else text that is no UTF-8 shows only when it is used
    except (pa.ArrowException, OSError, ValueError, TypeError) as e:  # PyArrow lets the last two through on damaged metadata
        raise BundleError(f"vocabulary: got {shown(str(e))}, expected a readable Parquet file") from e
    return VocabularyTable(table)


def write_vocabulary(vocabulary: VocabularyTable, path: Path) -> None:
    """Writes the rows in the order of their ids, so that equal vocabularies give equal bytes."""
    path.parent.mkdir(exist_ok=True)
    table = vocabulary.table.sort_by([("id", "ascending"), ("value", "ascending")])
    pq.write_table(table.replace_schema_metadata(None), path, compression="zstd")
