"""A made-up request for timing: one user, many candidates, ids drawn uniformly from whole tables, so that no cache helps."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema


def sample_block(schema: FeatureSchema, rows: int, seed: int = 0) -> RowBlock:
    """`rows` candidates of one context, for any model of the schema. Equal arguments give equal bytes."""
    rng = np.random.default_rng(seed)
    block = RowBlock.allocate(schema.block_layout, rows)
    for f in schema.features:
        values = block.column(schema.columns[f.name])
        if f.is_id:
            names = [name for name in (f.table, f.first_order_table) if name is not None]
            values[:] = rng.integers(0, min(schema.table(name).rows for name in names), values.shape)
        else:
            values[:] = rng.standard_normal(values.shape)
    return block


def sample_columns(schema: FeatureSchema, rows: int) -> dict[str, npt.NDArray[Any]]:
    """The same by feature, [rows, width] each: those of the context stand in every row."""
    block = sample_block(schema, rows)
    return {n: np.broadcast_to(c := block.column(place), (rows, c.shape[1])) for n, place in schema.columns.items()}
