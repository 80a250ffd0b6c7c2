"""Candidates in the forms that callers of the client have, as columns by feature. Imports none of the libraries they are of."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from deployments.client.columns import Column

Candidates: TypeAlias = "Mapping[str, Column] | Sequence[Mapping[str, object]] | Any"
_FORMS = "columns by feature, a list of dicts, or a table of pandas, polars or Arrow"


def columns_of(candidates: Candidates, where: str = "candidates") -> Mapping[str, Column]:
    """Feature -> column of n values.

    Args:
        candidates: columns by feature; a list of n dicts, all of the same features; or a table. In one of pandas NaN, NaT and
            NA are missing, and its index is left out.

    Raises:
        ValueError: another form, names that are no text or stand twice, a row of other features than the first.
    """
    if isinstance(candidates, Mapping):
        return candidates
    if isinstance(candidates, list | tuple):
        return _of_rows(candidates, where)
    table: Any = candidates
    if hasattr(table, "iloc") and hasattr(table, "columns"):
        return {name: _of_series(table[name]) for name in _names(table.columns, where)}
    if hasattr(table, "to_pydict") and hasattr(table, "schema"):
        return dict(zip(_names(table.schema.names, where), (column.to_pylist() for column in table.columns), strict=True))
    if hasattr(table, "get_columns"):
        return {column.name: column.to_list() for column in table.get_columns()}
    raise ValueError(f"{where}: got {type(candidates).__name__}, expected {_FORMS}")


def _of_rows(rows: Sequence[Any], where: str) -> Mapping[str, Column]:
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{where}[{i}]: got {type(row).__name__}, expected a dict of feature values")
        if row.keys() != rows[0].keys():
            raise ValueError(f"{where}[{i}]: got other features than {where}[0], expected the same in every candidate")
    if not rows:
        raise ValueError(f"{where}: got none, expected at least one")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _names(given: Any, where: str) -> Sequence[str]:
    names = list(given)
    seen: set[object] = set()
    for name in names:
        if not isinstance(name, str) or name in seen:
            raise ValueError(f"{where}: got the column {name!r}, expected names of features, each once")
        seen.add(name)
    return names


def _of_series(values: Any) -> Column:
    """A column of pandas. Integers with gaps are floats there: where all are whole, and each stands for one, they are those."""
    gone, kind = values.isna(), values.dtype.kind
    if kind in "biu" and not gone.any():
        return values.to_numpy()  # type: ignore[no-any-return]
    found = [None if missing else value for value, missing in zip(values.tolist(), gone.tolist(), strict=True)]
    most = 2**24 if kind == "f" and values.dtype.itemsize == 4 else 2**53
    if kind == "f" and all(v is None or (v.is_integer() and abs(v) < most) for v in found):
        return [None if v is None else int(v) for v in found]
    return values.to_numpy() if kind == "f" and not gone.any() else found
