"""Which ids a section of an encoded request may hold: rows of its columns' tables, padding, what is read in an id's place."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpiframe_core.errors import InputError
from dpiframe_core.features.block_layout import IdSection, Section
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity
from dpiframe_core.features.vocabulary import id_bound
from kernels.lookup.id_record import IdRecord


@dataclass(frozen=True, slots=True, eq=False)
class IdRule:
    """What the ids of a section's columns may be.

    Attributes:
        lowest: int64[C], -1 where a bag may be padded, else 0; above: int64[C], the first id that is no row.
        stand_in: int64[C], the id read instead of one out of range; -1 where that is refused.
        names: of the columns' features. record: how they lie in a block; legal: all of this for C (kernels/cpu/blocks.c).
    """

    lowest: npt.NDArray[np.int64]
    above: npt.NDArray[np.int64]
    stand_in: npt.NDArray[np.int64]
    names: tuple[str, ...]
    record: IdRecord
    legal: bytes

    def settled(self, ids: npt.NDArray[Any], where: str) -> tuple[npt.NDArray[Any], int]:
        """(ids that are all legal, how many were replaced)."""
        legal = (ids >= self.lowest) & (ids < self.above)
        refused = ~legal & (self.stand_in < 0)
        if refused.any():
            row, column = np.unravel_index(int(np.argmax(refused)), refused.shape)
            rule = f"an id of {self.names[column]} from {self.lowest[column]} to {self.above[column] - 1}"
            raise InputError(f"{where}[{row}, {column}]", int(ids[row, column]), rule)
        return np.where(legal, ids, self.stand_in), int(legal.size - np.count_nonzero(legal))


def id_rule(schema: FeatureSchema, section: IdSection) -> IdRule:
    """Of a section of a schema."""
    lowest: list[int] = []
    above: list[int] = []
    stand_in: list[int] = []
    for f in schema.features:
        if schema.columns[f.name].section == section:
            lenient = isinstance(f, Categorical) and isinstance(f.encoder, Identity) and f.encoder.out_of_range == "oov"
            instead_of = f.oov_id if lenient and f.oov_id is not None else -1
            lowest += [-1 if f.max_values > 1 else 0] * f.max_values
            above += [id_bound(schema, f)] * f.max_values
            stand_in += [instead_of] * f.max_values
    record: IdRecord = getattr(schema.block_layout, section)
    low, high, instead = (np.array(each, np.int64) for each in (lowest, above, stand_in))
    return IdRule(low, high, instead, names_of(schema, section), record, record.legal(lowest, above))


def names_of(schema: FeatureSchema, section: Section) -> tuple[str, ...]:
    """The feature of each column of a section."""
    features = (f for f in schema.features if schema.columns[f.name].section == section)
    return tuple(f.name for f in features for _ in range(f.max_values))
