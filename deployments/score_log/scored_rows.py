"""A scored request as an Arrow table: a row a candidate, a column a feature as `dpiframe score` reads it, and what came of it.

Columns of ours begin with `@`, which no feature's name does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dpiframe_core.features.raw_columns import ColumnValues, as_list, split_text
from dpiframe_core.features.row_block import Floats
from dpiframe_core.features.schema import Categorical, Feature, FeatureSchema
from dpiframe_core.files.table_rows import column_types


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """One request. Filled by `ScoreRecorder`, on the event loop: references alone.

    `candidates` and `context` are the raw values as the client sent them; `scores` is float32[n, tasks].
    """

    model: str
    version: str
    tasks: Sequence[str]
    schema: FeatureSchema
    request_id: str
    unix_ms: int
    candidates: Mapping[str, ColumnValues]
    context: Mapping[str, object]
    scores: Floats

    def table(self) -> pa.Table:
        n, types = len(self.scores), column_types(self.schema)
        columns = {
            "@time": pa.array(np.full(n, self.unix_ms), pa.timestamp("ms", tz="UTC")),
            "@request_id": pa.array([self.request_id] * n, pa.string()),
            "@model": pa.array([self.model] * n, pa.string()),
            "@version": pa.array([self.version] * n, pa.string()),
            "@row": pa.array(np.arange(n, dtype=np.int32)),
        }
        for i, task in enumerate(self.tasks):
            columns["@score" if len(self.tasks) == 1 else f"@score_{task}"] = pa.array(self.scores[:, i])
        for f in self.schema.features:
            given = f.name in self.candidates
            values = as_list(self.candidates[f.name]) if given else [self.context[f.name]]
            column = pa.array([_plain(f, value) for value in values], types[f.name])
            columns[f.name] = column if given else pa.concat_arrays([column] * n)
        return pa.table(columns)


def _plain(f: Feature, value: object) -> object:
    if value is None:
        return None
    if not isinstance(f, Categorical):
        return float(value)  # type: ignore[arg-type]  # the encoder has read it as a number
    if f.max_values > 1:
        split = value if f.splitter is None else split_text(value, f.splitter, f.values)
        return list(split)  # type: ignore[call-overload]
    return value
