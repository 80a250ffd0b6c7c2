"""Which tables are read by the same ids, so that an id of one is an id of all: a feature's table and its first-order table, and
tables that several features share.
"""

from dataclasses import dataclass

from dpiframe_core.features.block_layout import Column
from dpiframe_core.features.schema import FeatureSchema
from kernels.lookup.id_record import id_bytes

_BEYOND = {1: 2**8 - 1, 2: 2**16 - 1, 4: 2**31, 8: 2**63}  # the first number that an id of so many bytes cannot be


@dataclass(frozen=True, slots=True)
class IdGroup:
    """Filled by `id_groups`.

    Attributes:
        tables: numbers in the schema's order. rows: of each.
        columns: where its ids lie in a `RowBlock`, and the row that each column's unknown values read.
        spare: how many ids beyond the rows all columns can carry; 0 if the tables have not the same rows.
    """

    tables: tuple[int, ...]
    rows: int
    columns: tuple[tuple[Column, int], ...]
    spare: int


def id_groups(schema: FeatureSchema) -> tuple[IdGroup, ...]:
    """All groups, in the order of their first tables. Tables of numbers, which no id reads, are in none."""
    number = {t.name: i for i, t in enumerate(schema.tables)}
    of_table = list(range(len(number)))
    readers = [f for f in schema.features if f.is_id and (f.table or f.first_order_table)]
    for f in readers:
        own = {of_table[number[name]] for name in (f.table, f.first_order_table) if name is not None}
        of_table = [min(own) if group in own else group for group in of_table]
    found = []
    for first in dict.fromkeys(of_table):
        tables = tuple(i for i, group in enumerate(of_table) if group == first)
        features = [f for f in readers if of_table[number[f.table or f.first_order_table or ""]] == first]
        if not features:
            continue
        rows = {schema.tables[i].rows for i in tables}
        most = max(rows)
        spare = _BEYOND[id_bytes(most)] - most if len(rows) == 1 else 0
        columns = tuple((schema.columns[f.name], f.oov_id or 0) for f in features)
        found.append(IdGroup(tables, most, columns, spare))
    return tuple(found)
