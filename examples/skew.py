"""Which features of scored requests are not what the model was trained on: training rows against the log of a service.

    python examples/skew.py models/demo train.parquet score-log/model=demo/version=1

The bundle's schema says what the features are. A feature's distance is half the sum of the differences of its values' shares:
0 where both have the same values equally often, 1 where none is in both. Numbers count by the deciles of the training rows.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpiframe_core.bundle.encoding_files import read_encoding
from dpiframe_core.features.schema import Feature, FeatureSchema, Numeric
from dpiframe_core.files.row_files import RowFile, iter_chunks
from dpiframe_core.files.table_rows import column_types, splitters


def rows(path: Path, schema: FeatureSchema) -> pa.Table:
    """All rows of a file, or of the Parquet files of a folder."""
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise SystemExit(f"{path}: got a folder without Parquet files, expected some")
    types = column_types(schema)
    read = [RowFile(file, types, splitters(schema), tuple(types)) for file in files]
    return pa.concat_tables(chunk.table for file in read for chunk in iter_chunks(file, 65536))


def shares(feature: Feature, column: pa.ChunkedArray, edges: np.ndarray) -> dict[object, float]:
    """The share of each value, null among them, as a list without values is; of numbers, of each interval between `edges`."""
    absent = 0
    if any(of(column.type) for of in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        absent = pc.sum(pc.equal(pc.fill_null(pc.list_value_length(column), 0), 0)).as_py() or 0
        column = pc.list_flatten(column)
    if isinstance(feature, Numeric):
        numbers = column.cast(pa.float64()).drop_null().to_numpy()
        counts = dict(enumerate(np.bincount(np.searchsorted(edges, numbers, side="right"))))
        counts[None] = column.null_count
    else:
        counts = {c["values"].as_py(): c["counts"].as_py() for c in pc.value_counts(column.combine_chunks())}
    counts[None] = counts.get(None, 0) + absent
    return {value: count / max(1, len(column) + absent) for value, count in counts.items()}


def distances(schema: FeatureSchema, train: pa.Table, logged: pa.Table) -> list[tuple[float, str, float, float]]:
    """(distance, feature, share of null in training, in the log), the largest first."""
    out = []
    for f in schema.features:
        edges = np.empty(0)
        if isinstance(f, Numeric):
            edges = np.unique(np.quantile(train[f.name].cast(pa.float64()).drop_null(), np.arange(0.1, 1, 0.1)))
        a, b = shares(f, train[f.name], edges), shares(f, logged[f.name], edges)
        apart = sum(abs(a.get(v, 0.0) - b.get(v, 0.0)) for v in a.keys() | b.keys()) / 2
        out.append((apart, f.name, a.get(None, 0.0), b.get(None, 0.0)))
    return sorted(out, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("bundle", "train", "log"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    schema = read_encoding(given.bundle).manifest.feature_schema
    train, logged = rows(given.train, schema), rows(given.log, schema)
    print(
        f"{train.num_rows} training rows, {logged.num_rows} logged ones\ndistance  null in training  null in the log  feature"
    )
    for apart, name, null_train, null_log in distances(schema, train, logged):
        print(f"{apart:8.3f}  {null_train:16.3f}  {null_log:15.3f}  {name}")


if __name__ == "__main__":
    main()
