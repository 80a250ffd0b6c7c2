"""The fast way through the encoders: all text features, all ready ids, or all numbers, of one side of a request in one pass.

`feature_readers` says what each value becomes; here many plain columns become it together, bit for bit the same, because a
request of 100 candidates spends its time on 40 small columns rather than on 4,000 values. What is not plain (another type, a
wrong value, not a list) makes a reader answer None, and the request goes the careful way, which also words the error; so
does everything where C could not be built.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpiframe_core.features.arrow_columns import IN_PLACE, arrow_parts
from dpiframe_core.features.block_layout import Section
from dpiframe_core.features.feature_readers import Lookup
from dpiframe_core.features.packed_column import Form, PackedColumn
from dpiframe_core.features.raw_columns import Float64s, Int64s
from dpiframe_core.features.row_block import MISSING, UNKNOWN
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema, Hash, Identity, Numeric, Scope
from dpiframe_core.features.transforms import Log, MinMax, Standardize
from dpiframe_core.features.vocabulary import TextLookup, id_bound, vocabulary_name
from kernels.runtime import c_build
from kernels.runtime.c_build import RequestExtension

Columns: TypeAlias = Sequence[list[Any] | tuple[Any, ...] | npt.NDArray[Any]]  # of a packed column its parts
_DIMENSIONS = attrgetter("ndim")
QUIET = partial(np.errstate, all="ignore")  # an overflow is found, and refused by name, in the result
# Reads columns into rows `at` of the array given, [columns of the section, n]; whether it could.
Read: TypeAlias = Callable[[Columns, npt.NDArray[Any]], bool]


@dataclass(frozen=True, slots=True, eq=False)
class MultiColumnReader:
    """Reads features of one scope and kind together, into their columns of the block's section."""

    names: tuple[str, ...]
    name_set: frozenset[str]
    scope: Scope
    section: Section
    read: Read

    def columns(self, candidates: Mapping[str, Any], context: Mapping[str, Any], several: bool) -> Columns | None:
        """The features' columns, if the request has them all on the side that the schema puts them on.

        `several`: the context has columns too.
        """
        if self.scope == "context" and not several:
            return [[context[name]] for name in self.names] if context.keys() >= self.name_set else None
        side = context if self.scope == "context" else candidates
        if type(side) in IN_PLACE:  # isinstance takes half a microsecond, as they are abstract
            parts = list(map(side.parts.get, self.names))  # type: ignore[attr-defined]
            return None if None in parts else parts
        columns: list[Any] = [side.get(name) for name in self.names]
        kinds = set(map(type, columns))
        if kinds == {list}:
            return columns
        if kinds == {np.ndarray} and set(map(_DIMENSIONS, columns)) == {1}:
            return [c.tolist() if c.dtype.kind == "U" else c for c in columns]
        columns = list(map(_as_c_takes_it, columns))
        return None if any(c is None for c in columns) else columns  # `in` asks arrays whether they are equal


def _as_c_takes_it(values: Any) -> list[Any] | tuple[Any, ...] | npt.NDArray[Any] | None:
    """A list, or the parts of a packed column; an array becomes one of these. None: it is left to the careful way."""
    if isinstance(values, PackedColumn):
        return values.parts
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return arrow_parts(values)
    if type(values) is np.ndarray and values.ndim == 1:  # none that is masked
        return values.tolist() if values.dtype.kind == "U" else values
    return values if type(values) is list else None


def rows_of(columns: Columns) -> int:
    first = columns[0]
    return int(first[1]) if isinstance(first, tuple) else len(first)


_ALL, _MARKED = 1, 2  # outcomes of texts.c: all have ids, or marks among them


def multi_column_readers(schema: FeatureSchema, lookups: Mapping[str, Lookup]) -> list[MultiColumnReader]:
    """A reader for every group of features of one scope that can be read together; none without C. `lookups`: by vocabulary
    name.
    """
    groups: dict[tuple[Any, ...], list[Feature]] = {}
    for f in schema.features:
        if isinstance(f, Numeric) and f.buckets is None:
            groups.setdefault((f.scope, *(type(t) for t in f.transforms)), []).append(f)
        elif isinstance(f, Categorical) and f.max_values == 1 and _is_plain(f):
            groups.setdefault((f.scope, f.encoder.type), []).append(f)
        elif isinstance(f, Categorical) and _is_bag(f):
            groups[f.scope, f.name] = [f]
    functions = c_build.request_extension()
    return [] if functions is None else [_reader(functions, schema, lookups, members) for members in groups.values()]


def _is_plain(f: Categorical) -> bool:
    if isinstance(f.encoder, Identity):
        return f.padding_value is None
    return f.values == "string"


def _is_bag(f: Categorical) -> bool:
    """Whether it is lists of ready ids; of padding only where null has a row to read."""
    padded = f.padding_value is None or (isinstance(f.padding_value, int) and 0 <= f.padding_value < 2**63)
    stands = f.padding_value is None or f.missing_id is not None
    return f.max_values > 1 and isinstance(f.encoder, Identity) and f.splitter is None and padded and stands


def _reader(
    functions: RequestExtension, schema: FeatureSchema, lookups: Mapping[str, Lookup], members: list[Feature]
) -> MultiColumnReader:
    places = [schema.columns[f.name] for f in members]
    numbers = [f for f in members if isinstance(f, Numeric)]
    categories = [f for f in members if isinstance(f, Categorical)]
    hashes = [f.encoder for f in categories if isinstance(f.encoder, Hash)]
    at = np.array([c for p in places for c in range(p.start, p.start + p.width)], np.int64)
    read: Read
    if numbers:
        read = _numbers(functions, numbers, at)
    elif hashes:
        read = _hashes(functions, categories, hashes, at)
    elif not isinstance(categories[0].encoder, Identity):
        found = [lookups[vocabulary_name(f) or ""] for f in categories]
        read = _vocabularies(functions, categories, [table for table in found if isinstance(table, TextLookup)], at)
    elif categories[0].max_values > 1:
        read = _bags(functions, categories[0], id_bound(schema, categories[0]), at)
    else:
        read = _identities(functions, tuple(id_bound(schema, f) for f in categories), at)
    names = tuple(f.name for f in members)
    return MultiColumnReader(names, frozenset(names), members[0].scope, places[0].section, read)


def _vocabularies(functions: RequestExtension, features: list[Categorical], tables: list[TextLookup], at: Int64s) -> Read:
    refused = {UNKNOWN: at[[f.oov_id is None for f in features]], MISSING: at[[f.missing_id is None for f in features]]}
    refused = {mark: rows for mark, rows in refused.items() if rows.size}
    natives = tuple(table.native for table in tables)

    def read(columns: Columns, out: npt.NDArray[Any]) -> bool:
        found = functions.column_ids(columns, natives, UNKNOWN, MISSING, out, at)
        return found == _ALL or (found == _MARKED and not any((out[rows] == mark).any() for mark, rows in refused.items()))

    return read


def _hashes(functions: RequestExtension, features: list[Categorical], encoders: list[Hash], at: Int64s) -> Read:
    refused = at[[f.missing_id is None for f in features]]
    rules = np.array([[e.seed, e.buckets, e.first_id or 0] for e in encoders], np.int64)

    def read(columns: Columns, out: npt.NDArray[Any]) -> bool:
        found = functions.column_hashes(columns, rules, MISSING, out, at)
        return found == _ALL or (found == _MARKED and not (refused.size and (out[refused] == MISSING).any()))

    return read


def _identities(functions: RequestExtension, bounds: tuple[int, ...], at: Int64s) -> Read:
    limits = np.array(bounds, np.int64)
    return lambda columns, out: functions.column_integers(columns, limits, out, at)


def _bags(functions: RequestExtension, f: Categorical, bound: int, at: Int64s) -> Read:
    """Lists of at least one id, and no more than the feature keeps."""
    padding = f.padding_value if isinstance(f.padding_value, int) else -1
    numbers = f.max_values, bound, padding, MISSING, f.align == "last"

    def read(columns: Columns, out: npt.NDArray[Any]) -> bool:
        bags = columns[0].tolist() if isinstance(columns[0], np.ndarray) else columns[0]
        if not (isinstance(bags, list) or bags[0] == Form.ARROW):
            return False
        ids = np.empty((rows_of(columns), f.max_values), np.int64)
        if known := functions.column_bags(bags, numbers, ids):
            out[at] = ids.T
        return known

    return read


def _numbers(functions: RequestExtension, features: list[Numeric], at: Int64s) -> Read:
    refused = np.array([f.missing_value is None for f in features])
    steps = list(zip(*(f.transforms for f in features), strict=True))
    lifted: list[Float64s] = []  # C does what is beside the logarithm, which must give NumPy's bits
    if steps and isinstance(steps[0][0], Log):
        lifted = [np.array([(t.minimum, t.offset) for t in steps.pop(0)])]
    scales = [(0.0, 1.0)] * len(features)
    if steps and isinstance(steps[-1][0], Standardize):
        scales = [(t.mean, t.std) for t in steps.pop()]
    ends = np.array([(*scale, f.missing_value or 0.0) for scale, f in zip(scales, features, strict=True)])
    between = [_together(same) for same in steps]
    every, some_refused = np.arange(len(features)), bool(refused.any())

    def read(columns: Columns, out: npt.NDArray[Any]) -> bool:
        numbers = np.empty((len(columns), out.shape[1]), np.float64)
        missing = np.empty(numbers.shape, np.bool_)
        nulls = functions.column_numbers(columns, numbers, missing, every, *lifted)
        if nulls < 0 or (nulls and some_refused and missing[refused].any()):
            return False
        if lifted or between:
            with QUIET():
                numbers = np.log(numbers, out=numbers) if lifted else numbers
                for step in between:
                    numbers = step(numbers)
        return functions.scaled_numbers(numbers, missing, ends, out, at)

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
