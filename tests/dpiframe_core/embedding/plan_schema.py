"""Schemas of nothing but tables of given sizes, for tests of what plans."""

import numpy as np

from dpiframe_core.embedding.row_counts import RowCounts
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table


def schema_of(*shapes, dtype="float32"):
    """Tables t0, t1, .. of (rows, dim)."""
    tables = tuple(Table(name=f"t{i}", rows=rows, dim=dim, dtype=dtype) for i, (rows, dim) in enumerate(shapes))
    features = tuple(Categorical(name=f"f{t.name}", values="int", encoder=Identity(), table=t.name) for t in tables)
    return FeatureSchema(features=features, tables=tables)


def counts_of(*tables, rows=1):
    return RowCounts({f"t{i}": np.array(counts, np.int64) for i, counts in enumerate(tables)}, rows)
