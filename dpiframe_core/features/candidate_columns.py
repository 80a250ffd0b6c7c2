"""The candidates of a request in whatever form a Python caller has them, as columns by feature. Never imports pandas."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from dpiframe_core.errors import InputError
from dpiframe_core.features.arrow_columns import in_one_batch
from dpiframe_core.features.raw_columns import ColumnValues
from dpiframe_core.features.row_block import RowBlock

_FORMS = "columns by feature, a list of dicts, or an Arrow, pandas or polars table"
_SHOWN_KEY = 64
_PLACE = re.compile(r"^candidates\.([\w.\-]+)\[(\d+)\]")

Encode = Callable[[Mapping[str, ColumnValues], Mapping[str, object]], RowBlock]
Candidates: TypeAlias = "Mapping[str, ColumnValues] | Sequence[Mapping[str, object]] | pa.Table | pa.RecordBatch | Any"


def encoded_candidates(encode: Encode, candidates: Candidates, context: Mapping[str, object]) -> RowBlock:
    """What `encode` makes of candidates in whatever form. Raises as that and `candidate_columns`, by the caller's places."""
    if not isinstance(context, Mapping):
        raise InputError.worded("context", f"a {type(context).__name__}", "a mapping of features to values")
    columns = in_one_batch(candidate_columns(candidates))
    try:
        return encode(columns, context)
    except InputError as error:
        raise in_its_row(error) if isinstance(candidates, list | tuple) else error from None


def check_request(encode: Encode, body: Mapping[str, Any]) -> None:
    """Raises InputError: it is no request body, {"context": .., "candidates": ..}, that `encode` takes."""
    if not isinstance(body, Mapping) or not {"candidates"} <= body.keys() <= {"candidates", "context"}:
        got = list(body) if isinstance(body, Mapping) else type(body).__name__
        raise InputError("example", got, "candidates, and where there is one a context")
    try:
        encoded_candidates(encode, body["candidates"], body.get("context", {}))
    except InputError as error:
        raise error.at(f"example.{error.where}") from None


def candidate_columns(candidates: Candidates) -> Mapping[str, ColumnValues]:
    """Feature -> column of n values.

    Args:
        candidates: columns by feature; a list of n dicts, all of the same features; a pyarrow Table or RecordBatch; a pandas
            DataFrame, whose NaN, NaT and NA are null and whose index is left out; or what gives an Arrow stream
            (`__arrow_c_stream__`), as a DataFrame of polars.

    Raises:
        InputError: another form, names that are no text or stand twice, a row of other features than the first.
    """
    if isinstance(candidates, Mapping):
        return candidates
    if isinstance(candidates, pa.Table | pa.RecordBatch):
        return _table_columns(candidates)
    if isinstance(candidates, list | tuple):
        return columns_of_rows(candidates)
    if hasattr(candidates, "iloc") and hasattr(candidates, "columns"):
        return _frame_columns(candidates)
    if hasattr(candidates, "__arrow_c_stream__"):
        try:
            return _table_columns(pa.table(candidates))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InputError("candidates", str(error), "an Arrow stream of columns") from None
    raise InputError.worded("candidates", f"a {type(candidates).__name__}", _FORMS)


def columns_of_rows(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Rows of the same features -> columns.

    Raises:
        InputError: none, one is no dict, or has other features than the first; with its position.
    """
    if not rows:
        raise InputError("candidates", [], "at least one candidate")
    first = rows[0].keys() if isinstance(rows[0], Mapping) else {}.keys()
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(f"candidates[{i}]", row, "a dict of feature values")
        if row.keys() != first:
            name = min(first ^ row.keys(), key=str)
            got = "a value" if name in row else "nothing"
            where = f"candidates[{i}].{_key_shown(str(name))}"
            raise InputError.worded(where, got, "the features of candidates[0] in every candidate")
    return {name: [row[name] for row in rows] for name in first}


def in_its_row(error: InputError) -> InputError:
    """The fault of a value in a column, told by its place in the list of rows that the caller has."""
    return error.at(_PLACE.sub(r"candidates[\2].\1", error.where))


def _frame_columns(frame: Any) -> dict[str, ColumnValues]:
    names = list(frame.columns)
    for name in names:
        if not isinstance(name, str):
            raise InputError("candidates", name, "names of features as the columns' names")
    _refuse_twice(names)
    columns: dict[str, ColumnValues] = {}
    for name in names:
        try:
            columns[name] = pa.array(frame[name], from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"candidates.{_key_shown(name)}", str(error), "values of one kind") from None
    return columns


def _table_columns(table: pa.Table | pa.RecordBatch) -> dict[str, ColumnValues]:
    _refuse_twice(table.schema.names)
    return dict(zip(table.schema.names, table.columns, strict=True))


def _refuse_twice(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise InputError.worded("candidates", f"two columns {_key_shown(twice)}", "one for each feature")


def _key_shown(name: str) -> str:
    return name if len(name) <= _SHOWN_KEY else name[:_SHOWN_KEY] + "..."
