"""How often each row of each table is read: counted in encoded rows, or estimated where there are none. NumPy alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import IdSection
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema

Counts = npt.NDArray[np.int64]
Reads = tuple[str, Counts, Counts]

_SECTIONS: tuple[IdSection, ...] = ("context_ids", "candidate_ids")
ZIPF_ROWS = 10**12  # so many that the last of a billion rows still has a count, whose rounding says nothing
_MOST_ROWS = 10**15  # times the reads of a row they stay within int64
_MOST_EXPONENT = 4.0


@dataclass(frozen=True, slots=True, eq=False)
class RowCounts:
    """Reads of rows. Filled by `count_rows` and `zipf_counts`.

    Attributes:
        tables: by name, int64[rows]: how often each row was read.
        rows: the scored rows in which they were counted.
    """

    tables: Mapping[str, Counts]
    rows: int

    def check(self, schema: FeatureSchema) -> None:
        """Raises InputError unless there are counts, none below 0, for every row of every table, and no other."""
        names = [t.name for t in schema.tables]
        if self.rows < 1:
            raise InputError("counts.rows", self.rows, "at least one scored row")
        if sorted(self.tables) != sorted(names):
            raise InputError("counts.tables", sorted(self.tables), f"the model's, {sorted(names)}")
        for t in schema.tables:
            counts = self.tables[t.name]
            if counts.shape != (t.rows,) or counts.dtype != np.int64:
                raise InputError(f"counts.tables.{t.name}", f"{counts.dtype}{list(counts.shape)}", f"int64[{t.rows}]")
            if (least := int(counts.min())) < 0:
                raise InputError(f"counts.tables.{t.name}", least, "counts of 0 and more")


def count_rows(schema: FeatureSchema, blocks: Iterable[RowBlock]) -> RowCounts:
    """Counts what the lookup reads for encoded rows.

    A context's ids count once for each of its rows, as the lookup reads them for each. An id outside its table counts for the
    row that is read in its place; padding reads nothing. A numeric embedding's one row is read by every scored row.

    Raises:
        InputError: a block is not of this schema.
    """
    tables = {t.name: np.zeros(t.rows, np.int64) for t in schema.tables}
    rows = 0
    for block in blocks:
        rows += block.rows
        for name, ids, times in block_reads(schema, block):
            np.add.at(tables[name], ids, times)
    return RowCounts(tables, rows)


def block_reads(schema: FeatureSchema, block: RowBlock) -> Iterator[Reads]:
    """What the lookup reads for a block, a feature and a table of it at a time: the table, ids, and how often each is read.

    Raises:
        InputError: a block of another schema.
    """
    block.check(schema.block_layout)
    ids = {section: block.wide_ids(section) for section in _SECTIONS}
    contexts = [block.rows] if block.contexts == 1 else np.bincount(block.request_of_row, minlength=block.contexts)
    times = {"context_ids": np.asarray(contexts, np.int64), "candidate_ids": np.ones(block.rows, np.int64)}
    for f in schema.features:
        for name in _tables_of(f):
            if not f.is_id:
                yield name, np.zeros(1, np.int64), np.array([block.rows])
                continue
            place = schema.columns[f.name]
            own = ids[place.section][:, place.start : place.start + place.width]  # type: ignore[index]
            yield name, *_read(own, times[place.section], f, schema.table(name).rows)


def _read(ids: npt.NDArray[Any], times: Counts, feature: Feature, end: int) -> tuple[Counts, Counts]:
    """The ids below `end` that ids[n, width] read, each of which is read times[n] times, and how often."""
    each = np.broadcast_to(times[:, None], ids.shape).ravel()
    flat = ids.ravel()
    if isinstance(feature, Categorical) and feature.max_values > 1:
        read = flat != -1
        flat, each = flat[read], each[read]
    return np.where((flat >= 0) & (flat < end), flat, feature.oov_id or 0).astype(np.int64), each


def zipf_counts(schema: FeatureSchema, exponent: float, rows: int = ZIPF_ROWS) -> RowCounts:
    """What `rows` scored rows would read if nothing but a law is known: row r of a table is read proportional to
    (r + 1)^-exponent. Bags are taken to be full.

    Vocabularies that importers make are in the order of falling frequency, so that this is a row's rank. Take `rows` large:
    counts are rounded to integers, and of few scored rows a large table's last rows would get none.

    Raises:
        InputError: an exponent outside [0, 4], or scored rows outside [1, 10^15].
    """
    if not 0 <= exponent <= _MOST_EXPONENT:
        raise InputError("zipf exponent", exponent, f"a number from 0 to {_MOST_EXPONENT:g}")
    if not 1 <= rows <= _MOST_ROWS:
        raise InputError("zipf rows", rows, f"from 1 to {_MOST_ROWS}")
    weights = np.arange(1, 1 + max((t.rows for t in schema.tables), default=0), dtype=np.float64) ** -exponent
    made: dict[tuple[int, int], Counts] = {}  # tables of one size share their counts, which may be gigabytes
    tables = {}
    for t in schema.tables:
        reads = sum(f.max_values * _tables_of(f).count(t.name) for f in schema.features)
        if (t.rows, reads) not in made:
            own = weights[: t.rows]
            made[t.rows, reads] = np.rint(own * (rows * reads / own.sum())).astype(np.int64)
        tables[t.name] = made[t.rows, reads]
    return RowCounts(tables, rows)


def _tables_of(f: Feature) -> list[str]:
    """The tables that a feature's ids are read through."""
    return [name for name in (f.table, f.first_order_table) if name is not None]
