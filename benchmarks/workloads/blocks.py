"""Batches of rows for a schema: ids by a power law or uniform, numbers from 0 to 1, lists always full."""

from functools import lru_cache

import numpy as np

from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema


def drawn_blocks(
    schema: FeatureSchema, rows: int, count: int, *, contexts: int = 1, skew: str = "zipf", exponent: float = 1.1, seed: int = 0
) -> list[RowBlock]:
    """`count` different batches, their rows spread evenly over the contexts.

    zipf: of that exponent over the vocabulary, ids by descending frequency; uniform: all alike. Lists are full: to skip
    padding, as we do and a plain product does not, would be a gain of the data.
    """
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(count):
        block = RowBlock.allocate(schema.block_layout, rows, contexts)
        block.request_of_row[:] = np.arange(rows) * contexts // rows
        for feature in schema.features:
            values = block.column(schema.columns[feature.name])
            if not feature.is_id:
                values[:] = rng.random(values.shape)
                continue
            size = schema.table(feature.table).rows  # type: ignore[arg-type]
            if skew == "uniform":
                values[:] = rng.integers(0, size, values.shape)
            else:
                values[:] = np.searchsorted(_zipf_cdf(size, exponent), rng.random(values.shape))
        blocks.append(block)
    return blocks


@lru_cache(maxsize=256)
def wide_ids(block: RowBlock) -> np.ndarray:
    """int32[rows, ids]: the ids of the block's rows. Always the same array for a block."""
    return block.wide_ids("candidate_ids")


@lru_cache(maxsize=64)
def _zipf_cdf(size: int, exponent: float) -> np.ndarray:
    """float64[size]: the exact distribution, so that no draw has to be rejected (8 MB a million rows)."""
    cumulative = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    return cumulative / cumulative[-1]
