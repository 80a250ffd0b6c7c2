"""`examples/skew.py` finds the feature that differs, and none where training rows and log are the same."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpiframe_core.bundle.encoding_files import read_encoding
from dpiframe_core.features.schema import Categorical, Hash
from tests.docs.test_readme import ROOT


def told(bundle: Path, train: Path, log: Path) -> dict[str, list[float]]:
    """(distance, shares of null) by feature, in the order of the output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "skew.py"), str(bundle), str(train), str(log)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    return {name: [float(cell) for cell in cells] for *cells, name in lines}


def test_the_feature_that_changed_comes_first_and_the_others_are_where_they_were(demo_bundle: Path, tmp_path: Path) -> None:
    schema = read_encoding(demo_bundle).manifest.feature_schema
    example = json.loads((demo_bundle / "example.json").read_text())
    given = example["candidates"] | {name: [value] for name, value in example["context"].items()}
    picked = np.random.default_rng(3).integers(0, 5, 2000)
    table = pa.table({f.name: [given[f.name][i % len(given[f.name])] for i in picked.tolist()] for f in schema.features})
    pyarrow.csv.write_csv(table, tmp_path / "train.csv")
    (tmp_path / "log").mkdir()
    for part in range(2):
        pq.write_table(table.slice(part * 1000, 1000), tmp_path / "log" / f"{part}.parquet")
    same = told(demo_bundle, tmp_path / "train.csv", tmp_path / "log")
    assert sorted(same) == sorted(f.name for f in schema.features)
    assert all(cells == [0.0, cells[1], cells[1]] for cells in same.values())
    column = ["another"] * 500 + table["C9"].to_pylist()[500:]
    numbers = [None] * 200 + table["I9"].to_pylist()[200:]
    changed = table.set_column(table.column_names.index("C9"), "C9", pa.array(column))
    changed = changed.set_column(changed.column_names.index("I9"), "I9", pa.array(numbers))
    pq.write_table(changed, tmp_path / "changed.parquet")
    found = told(demo_bundle, tmp_path / "train.csv", tmp_path / "changed.parquet")
    assert list(found)[:2] == ["C9", "I9"]
    assert (found["C9"][0], found["I9"][0]) == (0.25, 0.1)
    assert found["I9"][1:] == [0.0, 0.1]
    assert all(cells[0] == 0 for name, cells in found.items() if name not in ("C9", "I9"))


def test_a_list_without_values_is_missing() -> None:
    spec = importlib.util.spec_from_file_location("skew", ROOT / "examples" / "skew.py")
    assert spec is not None
    assert spec.loader is not None
    skew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(skew)
    tags = Categorical(name="tags", max_values=3, encoder=Hash(buckets=10), table="tags")
    lists = pa.chunked_array([[["rock"], None, [], ["jazz", "rock"]]], pa.list_(pa.string()))
    assert skew.shares(tags, lists, np.empty(0)) == {"rock": 0.4, "jazz": 0.2, None: 0.4}
    pairs = pa.chunked_array([pa.array([["rock", "jazz"], None], pa.list_(pa.string(), 2))])
    assert skew.shares(tags, pairs, np.empty(0)) == {"rock": 1 / 3, "jazz": 1 / 3, None: 1 / 3}
    assert skew.shares(tags, pa.chunked_array([[None, None]], pa.list_(pa.string())), np.empty(0)) == {None: 1.0}
