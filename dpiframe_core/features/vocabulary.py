"""Vocabularies: raw value -> id, their Parquet files, and the check that their ids are rows of the tables that use them.

Knows the schema; knows nothing of requests.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise, repeat
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpiframe_core.errors import BundleError, shown
from dpiframe_core.features.repeats import PIECE, bytes_of, may_repeat, overlapping
from dpiframe_core.features.schema import Categorical, FeatureSchema, Numeric, Vocabulary
from kernels.runtime import c_build


class TextLookup:
    """Text, or None, to ids. `native` is the vocabulary in C, for who looks up several columns at once; None without C."""

    def __init__(self, table: pa.Table, unknown: int, missing: int) -> None:
        self.unknown, self.missing = unknown, missing
        values, ids = table["value"], table["id"].to_numpy()
        self.native = _in_c(values, ids)
        self._id_of: dict[str | None, int] = {}
        if self.native is None:
            self._id_of = dict(zip(values.to_pylist(), ids.tolist(), strict=True)) | {None: missing}

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


_FIRST = np.zeros(1, np.int64)
_SORTED_PARTS = 32


def _in_c(texts: pa.ChunkedArray, ids: npt.NDArray[np.int64]) -> object | None:
    """The vocabulary in C, None without C. Raises ValueError where a text is there twice."""
    functions = c_build.request_extension()
    if functions is None:
        return None
    large = texts.cast(pa.large_string())
    values = large.chunk(0) if large.num_chunks == 1 else large.combine_chunks()  # which copies one, too
    return functions.vocabulary(*bytes_of(values), np.ascontiguousarray(ids))


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
        # Arrow's counts take several times the memory of the values, and the time.
        repeats = may_repeat(lambda: [value], len(value))
        pa.default_memory_pool().release_unused()  # what it took, and who read the table: Arrow would keep it
        if repeats:
            counts = pc.value_counts(value)
            for twice in counts.filter(pc.greater(counts.field("counts"), 1))[:1]:
                got = shown(twice["values"].as_py())
                raise BundleError(f"vocabulary: got {got} twice, expected distinct values")

    @classmethod
    def of(cls, id_of: Mapping[str, int] | Mapping[int, int]) -> Self:
        """A vocabulary of all text or all integers (of text, if it is empty). Raises BundleError: it is none."""
        if not isinstance(id_of, Mapping):
            raise BundleError(f"vocabulary: got a {type(id_of).__name__}, expected a mapping of values to ids")
        return cls.of_pairs(list(id_of), list(id_of.values()))

    @classmethod
    def of_pairs(cls, values: Sequence[object], ids: Sequence[object]) -> Self:
        """The same of values and their ids, which may not be distinct yet."""
        kind = int if type(next(iter(values), "")) is int else str
        for what, found, expected in (("value", set(map(type, values)), kind), ("id", set(map(type, ids)), int)):
            for other in found - {expected}:
                raise BundleError(f"vocabulary: got a {what} of type {other.__name__}, expected {expected.__name__}")
        try:
            value = pa.array(values, pa.int64() if kind is int else pa.string())
            ident = pa.array(ids, pa.int64())
        except (pa.ArrowException, OverflowError, UnicodeError) as e:
            raise BundleError(f"vocabulary: got {shown(str(e))}, expected UTF-8 text or integers of 64 bits") from e
        return cls(pa.table({"value": value, "id": ident}))

    def id_of(self, value: str | int) -> int | None:
        at = pc.index(self.table["value"], value).as_py()
        return None if at < 0 else self.table["id"][at].as_py()

    def without(self, values: Sequence[str]) -> Self:
        """The other entries, in the same memory."""
        at = sorted({-1, *(pc.index(self.table["value"], value).as_py() for value in values)})
        parts = pairwise([*at, len(self.table)])
        return type(self)(pa.concat_tables([self.table.slice(start + 1, end - start - 1) for start, end in parts]))

    def of_integers(self) -> Self | None:
        """The integers that the texts say; None where one says none, or as no program would write it."""
        texts = self.table["value"]
        if not pc.all(pc.match_substring_regex(texts, "^(0|-?[1-9][0-9]{0,17})$"), min_count=0).as_py():
            return None
        return type(self)(self.table.set_column(0, "value", texts.cast(pa.int64())))

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


def check_vocabularies(
    schema: FeatureSchema, vocabularies: Mapping[str, VocabularyTable], names: Collection[str] | None = None
) -> None:
    """Checks every feature's vocabulary, by file name; of `names`, those alone.

    Raises:
        BundleError: one lacks, holds the wrong kind of values, or gives an id that is no row of the feature's tables.
    """
    for f in schema.features:
        name = vocabulary_name(f) if isinstance(f, Categorical) else None
        if name is None or not isinstance(f, Categorical) or (names is not None and name not in names):
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
        table = pa.concat_tables(_row_groups(path))
        table.validate(full=True)  # else text that is no UTF-8 shows only when it is used
    except _UNREADABLE as e:
        raise BundleError(f"vocabulary: got {shown(str(e))}, expected a readable Parquet file") from e
    return VocabularyTable(table)


def is_vocabulary(path: Path, check: Callable[[VocabularyTable], None]) -> bool:
    """Whether `read_vocabulary` takes it and `check` its entries, with one row group and a few bytes an entry in memory.

    False too where that cannot tell: without C, or where two texts have one hash.
    """

    checked = False

    def values() -> Iterator[pa.ChunkedArray]:
        nonlocal checked
        for group in _row_groups(path):
            if not checked:
                group.validate(full=True)
                check(VocabularyTable(group))
            yield group["value"]
        checked = True

    try:
        return not may_repeat(values, pq.read_metadata(path).num_rows)
    except (*_UNREADABLE, BundleError):
        return False


_UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError)  # PyArrow lets the last two through on damaged metadata


def _row_groups(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        if not file.num_row_groups:
            yield file.schema_arrow.empty_table()
        for i in range(file.num_row_groups):
            yield file.read_row_group(i, use_threads=False)  # each thread would keep memory of its own
            pa.default_memory_pool().release_unused()


def write_vocabulary(vocabulary: VocabularyTable, path: Path) -> None:
    """Writes the rows in the order of their ids, so that equal vocabularies give equal bytes."""
    path.parent.mkdir(exist_ok=True)
    table = vocabulary.table.replace_schema_metadata(None)
    with pq.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=False) as out:  # nothing comes twice
        rest = table.slice(0, 0)
        for part in _in_order(table):
            rest = pa.concat_tables([rest, part])
            while len(rest) > PIECE:
                rest = _written(out, rest)
        while len(rest):
            rest = _written(out, rest)


def _written(out: pq.ParquetWriter, table: pa.Table) -> pa.Table:
    """What is left when a row group of it is written."""
    out.write_table(table.slice(0, PIECE).combine_chunks())
    pa.default_memory_pool().release_unused()
    return table.slice(PIECE)


def _in_order(table: pa.Table) -> Iterator[pa.Table]:
    """Its entries by id, then value: as they are, or in parts, as a sorted copy takes 50 bytes an entry."""
    ids = table["id"]
    if all((part[1:] > part[:-1]).all() for part in overlapping(ids)):
        yield table
        return
    last = pc.max(ids).as_py()
    step = last // _SORTED_PARTS + 1
    for low in range(0, last + 1, step):
        is_in = pc.and_(pc.greater_equal(ids, low), pc.less_equal(ids, min(low + step - 1, last)))
        yield table.filter(is_in).sort_by([("id", "ascending"), ("value", "ascending")])
