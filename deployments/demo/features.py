"""Learns the demo model's feature schema and vocabularies from the training rows of a Criteo-format table.

It sees raw columns only, and never the held-out rows. Encoding is `features.encoder`'s work, in training as in serving.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpiframe_core.features.schema import Categorical, FeatureSchema, Hash, Numeric, Scope, Table, Vocabulary
from dpiframe_core.features.transforms import Log, Standardize
from dpiframe_core.features.vocabulary import VocabularyTable
from dpiframe_core.files.click_logs import CRITEO

NUMERIC = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
# Criteo does not say what its fields mean; the demo takes these to describe the user, the others the ad.
CONTEXT = frozenset((*NUMERIC[:5], *CATEGORICAL[:8]))
# The five fields with millions of values in Criteo itself: hashed, since no one ships such a dictionary for little gain.
HASHED = frozenset(("C3", "C4", "C12", "C16", "C21"))

_MISSING, _UNKNOWN, _FIRST = 0, 1, 2  # rows of every categorical table
_HASH_BUCKETS = 8192
_MIN_COUNT = 2  # a value seen once is left out: those train the row that serving reads for values never seen


def first_order_name(feature: str) -> str:
    return f"{feature}_first_order"


def learn_features(training: pa.Table, dim: int) -> tuple[FeatureSchema, dict[str, VocabularyTable]]:
    """The schema (13 numeric, then 26 categorical features, each with a table of `dim` and a first-order table)."""
    numbers = [_numeric(name, training[name]) for name in NUMERIC]
    vocabularies = {name: _vocabulary(training[name]) for name in CATEGORICAL if name not in HASHED}
    values = [_categorical(name) for name in CATEGORICAL]
    rows = dict.fromkeys(NUMERIC, 1) | dict.fromkeys(HASHED, _FIRST + _HASH_BUCKETS)
    rows |= {name: _FIRST + len(vocabulary.table) for name, vocabulary in vocabularies.items()}
    tables = [Table(name=name, rows=rows[name], dim=dim) for name in (*NUMERIC, *CATEGORICAL)]
    tables += [Table(name=first_order_name(name), rows=rows[name], dim=1) for name in (*NUMERIC, *CATEGORICAL)]
    return FeatureSchema(features=(*numbers, *values), tables=tuple(tables)), vocabularies


def feature_columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns that `Encoder.encode` takes: all but the label."""
    return {name: table[name] for name in table.column_names if name != CRITEO.label}


def _scope(name: str) -> Scope:
    return "context" if name in CONTEXT else "candidate"


def _numeric(name: str, column: pa.ChunkedArray) -> Numeric:
    """A logarithm that starts at the lowest value seen, for Criteo's counts start at -3, then mean 0 and deviation 1."""
    values = column.drop_null().to_numpy().astype(np.float64)
    lowest = min(0.0, float(values.min(initial=0.0)))
    log = np.log(values - lowest + 1.0)
    mean, std = (float(log.mean()), float(log.std())) if log.size else (0.0, 0.0)
    return Numeric(
        name=name,
        scope=_scope(name),
        transforms=(Log(offset=1.0 - lowest, minimum=lowest), Standardize(mean=mean, std=std or 1.0)),
        missing_value=0.0,
        table=name,
        first_order_table=first_order_name(name),
    )


def _categorical(name: str) -> Categorical:
    return Categorical(
        name=name,
        scope=_scope(name),
        encoder=Hash(buckets=_HASH_BUCKETS, first_id=_FIRST) if name in HASHED else Vocabulary(),
        table=name,
        first_order_table=first_order_name(name),
        missing_id=_MISSING,
        oov_id=_UNKNOWN,
    )


def _vocabulary(column: pa.ChunkedArray) -> VocabularyTable:
    """Values by falling frequency, so that the rows read most lie together (and may be placed together)."""
    counts = pc.value_counts(column.drop_null())
    table = pa.table({"value": counts.field("values"), "count": counts.field("counts")})
    table = table.filter(pc.field("count") >= _MIN_COUNT).sort_by([("count", "descending"), ("value", "ascending")])
    ids = pa.array(np.arange(_FIRST, _FIRST + len(table), dtype=np.int64))
    return VocabularyTable(pa.table({"value": table["value"], "id": ids}))
