"""A plan is made for the reads of a trace, or of Zipf's law, with no table read; and says what it is predicted to do."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.cli.tables.plan_command import Plan, trace_blocks, write_plan
from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.bundle.encoding_files import read_encoding
from dpiframe_core.embedding.placement import Links, predicted_links, uniform
from dpiframe_core.embedding.placement_file import read_placement
from dpiframe_core.embedding.row_counts import count_rows, zipf_counts
from dpiframe_core.errors import BundleError, InputError
from dpiframe_core.graph.architecture import DeepFM
from tests.runner import small_bundle

GIB = 1 << 30


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A context feature, a candidate's and a bag, each with a first-order table; without the files of the tables."""
    path = tmp_path_factory.mktemp("bundles") / "small"
    made: Bundle = small_bundle(path, DeepFM(hidden_units=(4,)), dim=8, one_hot=2, context=1, bags=1, embedded_numbers=0)
    shutil.rmtree(path / "tables")
    return made


TRACE = {"c0": [2, 2, 1, None], "c1": [9, 8, 9, 9], "bag0": [["a"], ["a", "b"], [], ["c", "c"]]}


def traced(path: Path) -> Path:
    pq.write_table(pa.table(TRACE), path)
    return path


def test_a_trace_is_counted_row_by_row(bundle: Bundle, tmp_path: Path) -> None:
    read = read_encoding(bundle.path)
    counts = count_rows(read.manifest.feature_schema, trace_blocks(read, traced(tmp_path / "rows.parquet")))
    assert counts.rows == 4
    assert counts.tables["c0"].tolist() == counts.tables["c0_w"].tolist() == [1, 1, 2]
    assert counts.tables["c1"].tolist() == [0] * 8 + [1, 3]
    assert counts.tables["bag0"].sum() == 5


def test_the_plan_holds_the_rows_that_the_trace_reads(bundle: Bundle, tmp_path: Path) -> None:
    schema = bundle.manifest.feature_schema
    ranks = 4 * sum(t.rows for t in schema.tables)  # at most
    room = ranks + 400
    out = tmp_path / "placed"
    made = write_plan(bundle.path, 1, room / GIB, traced(tmp_path / "rows.parquet"), 1.05, Links(), out)
    c1 = next(p for p in made.placement.tables if p.table == "c1")
    assert made.placement.ranks["c1"][[9, 8, 0]].tolist() == [0, 1, 2]
    assert 2 <= c1.hot < c1.rows
    assert made.reads["c1"] == (4, 0, 0)
    assert made.placement.gpu_bytes(schema) <= room < sum(t.bytes_used for t in schema.tables)
    again = read_placement(out, schema)
    assert again.tables == made.placement.tables
    assert (again.ranks["c1"] == made.placement.ranks["c1"]).all()


def planned(bundle: Bundle, gpus: int, room: int) -> Plan:
    return write_plan(bundle.path, gpus, room / GIB, None, 1.2, Links(1e6, 1e5, 1e4), None)


def test_the_report_tells_rows_reads_bytes_and_times(bundle: Bundle) -> None:
    schema, links = bundle.manifest.feature_schema, Links(1e6, 1e5, 1e4)
    made = planned(bundle, 2, 350)
    counts = zipf_counts(schema, 1.2)
    lines = made.report(1000).splitlines()
    assert lines[0].split() == ["table", "rows", "x", "dim", "MB", "hot", "warm", "host", "reads", "hot", "warm", "host"]
    assert {len(line) for line in lines[: 1 + len(schema.tables)]} == {len(lines[0])}
    for line, p in zip(lines[1:], made.placement.tables, strict=False):
        name, rows, _, dim, _, *ends = line.split()
        assert (name, int(rows), int(dim)) == (p.table, p.rows, schema.table(name).dim)
        assert [int(n) for n in ends[:3]] == [p.hot, p.warm - p.hot, p.rows - p.warm]
        own = counts.tables[name]
        want = [own[: p.hot].sum(), own[p.hot : p.warm].sum(), own[p.warm :].sum()] / own.sum()
        np.testing.assert_allclose([float(share.rstrip("%")) / 100 for share in ends[3:]], want, atol=0.00051)
    assert lines[-3].startswith("small 1 on 2 GPUs, reads by Zipf's law of exponent 1.2: ")
    assert lines[-2].startswith("bytes: 0.000 GB on each GPU, ")
    us = [max(predicted_links(schema, counts, p, links)) * 1e9
          for p in (made.placement, uniform(schema, hot=True), uniform(schema, hot=False))]  # fmt: skip
    assert us[1] < us[0] < us[2]
    assert lines[-1].startswith(f"predicted lookup of 1,000 rows: {us[0]:,.1f} us, bound by the link ")
    assert lines[-1].endswith(f"; all rows in HBM {us[1]:,.1f} us, all in host memory {us[2]:,.1f} us")


def test_more_memory_and_more_gpus_make_a_lookup_faster(bundle: Bundle) -> None:
    times = [max(planned(bundle, gpus, room).links) for gpus, room in ((1, 250), (1, 500), (2, 500))]
    assert times[0] > times[1] > times[2]


def test_what_cannot_be_planned_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    rows = traced(tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"--out: got '.*rows.parquet', expected a path where nothing is yet"):
        write_plan(bundle.path, 1, 1.0, rows, 1.05, Links(), rows)
    with pytest.raises(
        InputError, match=r"--out: got '.*placed', expected a path outside of the bundle .*, which loads with its own"
    ):
        write_plan(bundle.path, 1, 1.0, rows, 1.05, Links(), bundle.path / "placed")
    for given, option in (
        ((float("inf"), None), "--hbm-gib"),
        ((1.0, 1e300), "--host-gib"),
        ((float("nan"), None), "--hbm-gib"),
    ):
        with pytest.raises(InputError, match=f"{option}: got .*, expected a number below 1,000,000"):
            write_plan(bundle.path, 1, given[0], None, 1.05, Links(), None, given[1])
    with pytest.raises(
        InputError, match=r"hbm_gib: got 9.31e-09, 10 bytes, expected at least 10[0-9] bytes: .* for a row of each of 6 tables"
    ):
        write_plan(bundle.path, 1, 10 / GIB, None, 1.05, Links(), None)
    with pytest.raises(BundleError, match=r"nothing/model.yaml: got no such file"):
        write_plan(tmp_path / "nothing", 1, 1.0, None, 1.05, Links(), None)
    pq.write_table(pa.table({"c0": [1]}), rows)
    with pytest.raises(InputError, match=r"rows.parquet, columns: got .*, expected columns for the features c1, bag0 too"):
        write_plan(bundle.path, 1, 1.0, rows, 1.05, Links(), None)
    pq.write_table(pa.table(TRACE | {"c1": [9.5, 8, 9, 9]}), rows)
    with pytest.raises(InputError, match=r"rows.parquet, row 1, column c1"):
        write_plan(bundle.path, 1, 1.0, rows, 1.05, Links(), None)
    (tmp_path / "rows.csv").write_text("c0,c1,bag0\n1,2,a\n")
    with pytest.raises(InputError, match=r"--trace: got .*, expected Parquet or JSON lines, as bag0 has several values and no"):
        write_plan(bundle.path, 1, 1.0, tmp_path / "rows.csv", 1.05, Links(), None)


def test_a_plan_with_less_host_memory_leaves_rows_in_files(tmp_path: Path) -> None:
    made = small_bundle(tmp_path / "b", DeepFM(hidden_units=(4,)), dim=8, one_hot=60, context=0, bags=0, embedded_numbers=0)
    out = tmp_path / "placed"
    schema = made.manifest.feature_schema
    plan = write_plan(made.path, 1, 8_000 / GIB, None, 1.05, Links(), out, 180_000 / GIB)
    in_files = {p.table: p.in_files for p in plan.placement.tables if p.in_files}
    assert in_files
    assert all(schema.table(name).rows > 255 for name in in_files)
    assert plan.placement.host_bytes(schema) <= 180_000
    assert f"in files alone: {sum(in_files.values()):,} rows" in plan.report(100)
    assert read_placement(out, schema).tables == plan.placement.tables
