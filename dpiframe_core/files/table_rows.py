"""Arrow tables of rows -> `RowBlock`: raw values through the encoder, or ids and numbers that were encoded before.

Names rows and columns of a file in errors; knows no file format.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.feature_readers import NO_MISSING_LIST
from dpiframe_core.features.raw_columns import Place, read_bags, read_integers, read_numbers
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema
from dpiframe_core.features.vocabulary import id_bound

_PATH = re.compile(r"(?:candidates|context)\.([^\[]+)(?:\[(\d+)\])?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class TableEncoder:
    """Encodes tables whose columns are named as the features. Immutable, so that threads may share it.

    Args:
        encoded: the columns hold ids (integers; lists of them for features of several values, with -1 or nothing for
            padding) and numbers that are already transformed, neither with nulls; else raw values, null where missing.
    """

    encoder: Encoder
    encoded: bool = False

    def encode(self, table: pa.Table, place: Callable[[str, int], str]) -> RowBlock:
        """One block of all rows; each has its own context, if the model has context features.

        Args:
            place: names the cell of (column, row from 0) for errors.

        Raises:
            InputError: a column lacks, or a value breaks its feature's rule.
        """
        features = self.encoder.schema.features
        if lacking := missing_features(self.encoder.schema, table.column_names):
            raise InputError(place(lacking[0], 0), None, f"columns for the features {', '.join(lacking)}")
        columns = {f.name: table[f.name].combine_chunks() for f in features}
        try:
            if not self.encoded:
                return self.encoder.encode(columns)
            return _block(self.encoder.schema, columns)
        except InputError as error:
            match = _PATH.fullmatch(error.where)
            if match is None:
                raise
            name, row, rest = match.groups()
            raise error.at(place(name, int(row or 0)) + rest) from error


def missing_features(schema: FeatureSchema, names: Iterable[str]) -> list[str]:
    """The features that have no column."""
    given = set(names)
    return [f.name for f in schema.features if f.name not in given]


def column_types(schema: FeatureSchema) -> dict[str, pa.DataType]:
    """The Arrow type of each feature's raw values."""
    return {f.name: _list_of(f, _value_type(f)) for f in schema.features}


def splitters(schema: FeatureSchema) -> dict[str, str]:
    """What joins the values of each feature that the schema has a splitter for."""
    return {f.name: f.splitter for f in schema.features if isinstance(f, Categorical) and f.splitter is not None}


def _value_type(f: Feature) -> pa.DataType:
    if not isinstance(f, Categorical):
        return pa.float64()
    return pa.string() if f.values == "string" else pa.int64()


def _list_of(f: Feature, kind: pa.DataType) -> pa.DataType:
    return pa.list_(kind) if f.max_values > 1 else kind


def _block(schema: FeatureSchema, columns: dict[str, Any]) -> RowBlock:
    """Ids and numbers as they are, checked."""
    rows = len(next(iter(columns.values())))
    own_context = any(f.scope == "context" for f in schema.features)
    block = RowBlock.allocate(schema.block_layout, rows, rows if own_context else 1)
    if own_context:
        block.request_of_row[:] = np.arange(rows)
    for f in schema.features:
        place, to = Place(f"candidates.{f.name}", True), block.column(schema.columns[f.name])
        if f.max_values > 1:
            to[:] = _bags(columns[f.name], f, id_bound(schema, f), place)
        elif f.is_id:
            to[:, 0] = _ids(columns[f.name], 0, id_bound(schema, f), place)
        else:
            numbers, missing = read_numbers(columns[f.name], place)
            _refuse_null(missing, place, "a number, already transformed")
            to[:, 0] = numbers
    return block


def _ids(column: Any, least: int, bound: int, place: Place) -> npt.NDArray[Any]:
    """int[n], all within [least, bound). Not to be written to."""
    ids, missing = read_integers(column, place)
    expected = f"an id from {least} to {bound - 1}"
    _refuse_null(missing, place, expected)
    if ids.size and not (int(ids.min()) >= least and int(ids.max()) < bound):
        i = int(np.argmax((ids < least) | (ids >= bound)))
        raise InputError(place.value(i), ids[i].item(), expected)
    return ids


def _bags(column: Any, feature: Feature, bound: int, place: Place) -> npt.NDArray[np.int64]:
    """int64[n, max_values]: each row's ids filled up with -1, or its feature's id of a missing value if there are none."""
    flat, lengths, inside = read_bags(column, place)
    ids, width = _ids(flat, -1, bound, inside), feature.max_values
    if lengths.size and int(lengths.max()) > width:
        i = int(np.argmax(lengths > width))
        raise InputError(place.row(i), int(lengths[i]), f"at most {width} ids")
    out = np.full((lengths.size, width), -1, np.int64)
    out[np.arange(width) < lengths[:, None]] = ids
    if not lengths.all() and isinstance(feature, Categorical):
        if feature.missing_id is None:
            raise InputError(place.row(int(np.argmin(lengths))), [], NO_MISSING_LIST)
        out[lengths == 0, 0] = feature.missing_id
    return out


def _refuse_null(missing: npt.NDArray[np.bool_] | None, place: Place, expected: str) -> None:
    if missing is not None and missing.any():
        raise InputError(place.value(int(np.argmax(missing))), None, expected)
