"""`dpiframe compress --prune`: scores of the pruned bundle are the source's, with dropped values read as unknown ones."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deployments.cli.tables.compress_command import CompressJob, write_compressed
from deployments.cli.tables.compression import Changed
from dpiframe_core.bundle.bundle import Bundle, read_bundle, write_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.features.schema import FeatureSchema, Hash
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.models.model_graph import model_graph
from tests import oracle
from tests.backends import BACKENDS
from tests.deployments.command import dpiframe_here
from tests.dpiframe_core.embedding.vocabulary_model import ITEMS, SHOPS, USERS, make_rows, make_schema, write_model

VOCABULARIES = ("user", "item")  # tables whose ids come in the order of a vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle `words`, and raw rows to count and to score."""
    path: Path = tmp_path_factory.mktemp("pruning")
    write_model(path / "words", example={"candidates": make_rows(3, 2)})
    pq.write_table(pa.table(make_rows(400, 1)), path / "trace.parquet")
    rows = make_rows(500, 4)
    scores = engine_scores(read_bundle(path / "words"), rows)
    labels = np.random.default_rng(3).random(500) < scores
    pq.write_table(pa.table({**rows, "click": labels.astype(int)}), path / "rows.parquet")
    return path


def engine_scores(bundle: Bundle, rows: dict[str, Any], device: str = "cpu") -> np.ndarray:
    engine = Engine(bundle, device, "fp32")
    engine.warmup()
    scores = engine.submit(engine.encoder.encode(rows))[:, 0]
    engine.close()
    return scores


def kept_of(folder: Path, share: float) -> dict[str, set[int]]:
    """The ids that stay by what the trace holds, counted in Python."""
    trace = make_rows(400, 1)
    words = {f"i{n}": n for n in range(2, ITEMS)}
    read = {
        "item": [0 if v is None else words.get(v, 1) for v in chain(trace["item"], *trace["seen"])],
        "user": [0 if v is None else v - 100 if 102 <= v < 100 + USERS else 1 for v in trace["user"]],
        "shop": [3 if v is None else v if v < SHOPS else SHOPS - 1 for v in trace["shop"]],
    }
    out = {}
    for (name, ids), special in zip(read.items(), ({0, 1}, {0, 1}, {3, SHOPS - 1}), strict=True):
        n = {"item": ITEMS, "user": USERS, "shop": SHOPS}[name]
        lowest = sorted(set(range(n)) - special, key=lambda i, ids=ids: (ids.count(i), -i))  # type: ignore[misc]
        out[name] = set(range(n)) - set(lowest[: int(share * n)])
    return out


def unknown_where_dropped(rows: dict[str, Any], kept: dict[str, set[int]]) -> dict[str, Any]:
    """The rows with a value that no vocabulary has in the place of every dropped one."""

    def item(v: Any) -> Any:
        return "never seen" if v is not None and v != "new" and int(v[1:]) not in kept["item"] else v

    return rows | {
        "user": [9999 if v is not None and v >= 102 and v - 100 not in kept["user"] else v for v in rows["user"]],
        "item": [item(v) for v in rows["item"]],
        "seen": [[item(v) for v in bag] for bag in rows["seen"]],
        "shop": [9999 if v is not None and v < SHOPS and v not in kept["shop"] else v for v in rows["shop"]],
    }


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_scores_are_those_of_the_source_with_dropped_values_unknown(
    folder: Path, tmp_path: Path, share: float, device: str
) -> None:
    write_compressed(CompressJob(folder / "words", tmp_path / "out", share=share, trace=folder / "trace.parquet"))
    rows, source = make_rows(500, 4), read_bundle(folder / "words")
    replaced = unknown_where_dropped(rows, kept_of(folder, share))
    touched = np.array([any(rows[n][i] != replaced[n][i] for n in rows) for i in range(500)])
    assert 20 < touched.sum() < 480
    got, before = engine_scores(read_bundle(tmp_path / "out"), rows, device), engine_scores(source, rows, device)
    off = 0 if device == "cpu" else 2e-5  # two engines on a GPU may choose other programs, each within 1e-5
    np.testing.assert_allclose(got, engine_scores(source, replaced, device), rtol=0, atol=off)
    np.testing.assert_allclose(got[~touched], before[~touched], rtol=0, atol=off)
    assert (got[touched] != before[touched]).any()


def test_golden_rows_deviate_as_reported_and_are_checked_as_sharply_as_before(folder: Path, tmp_path: Path) -> None:
    done = write_compressed(CompressJob(folder / "words", tmp_path / "out", share=0.5, trace=folder / "trace.parquet"))
    got, source = read_bundle(tmp_path / "out"), read_bundle(folder / "words")
    kept, schema, block = kept_of(folder, 0.5), source.manifest.feature_schema, source.golden.block
    for f in schema.features[:4]:
        view = block.column(schema.columns[f.name])
        ids = np.where(view == np.array(-1).astype(view.dtype), -1, view.astype(np.int64))
        view[:] = np.where((ids >= 0) & ~np.isin(ids, list(kept[f.table or ""])), f.oov_id, ids)
    tables = {name: weight.numpy() for name, weight in source.tables.items()}
    dense = {name: weight.numpy() for name, weight in source.dense.items()}
    want = oracle.scores(schema, source.manifest.architecture, dense, tables, block)
    off = np.abs(want - source.golden.scores)
    assert (done.max_deviation, done.mean_deviation) == pytest.approx((off.max(), off.mean()), abs=2e-6)
    assert off.max() > 1e-3
    np.testing.assert_allclose(got.golden.scores, want, rtol=0, atol=2e-6)
    assert got.manifest.golden.tolerance == done.tolerance
    assert done.tolerance["fp32"] <= 1.2e-5
    assert Engine(got, "cpu", "fp32").warmup().golden_error <= 2e-6


def test_the_report_and_the_note_say_what_was_dropped(folder: Path, tmp_path: Path) -> None:
    job = CompressJob(folder / "words", tmp_path / "out", "int8", 0.2, trace=folder / "trace.parquet")
    done = write_compressed(job)
    lines = done.report().splitlines()
    assert re.fullmatch(r"item    9,600 -> 1,952 bytes, 300 -> 240 rows, float32 -> int8, off by at most 0\.00\d+", lines[2])
    assert lines[8] == (
        f"words 1-pruned-int8: 8 tables changed, {2 * (60 + 8 + 5)} of their {2 * (ITEMS + USERS + SHOPS + 1)} rows dropped "
        f"(frequencies counted on 400 rows of trace.parquet); all tables {done.bytes_used[0]:,} -> {done.bytes_used[1]:,} bytes"
    )
    assert len(lines) == 8 + 3
    got = read_bundle(tmp_path / "out")
    assert done.bytes_used[1] == sum(t.nbytes for t in (*got.tables.values(), *got.scales.values()))
    assert f"(fingerprint {read_bundle(folder / 'words').fingerprint[:16]}) {done.summary}." in got.manifest.provenance.notes
    assert got.example == {"candidates": make_rows(3, 2)}


def test_int8_takes_its_scales_from_the_rows_that_are_left(folder: Path, tmp_path: Path) -> None:
    both = CompressJob(folder / "words", tmp_path / "both", "int8", 0.5, trace=folder / "trace.parquet")
    write_compressed(both)
    write_compressed(replace(both, out=tmp_path / "first", dtype=None))
    write_compressed(CompressJob(tmp_path / "first", tmp_path / "second", "int8"))
    once, twice = read_bundle(tmp_path / "both"), read_bundle(tmp_path / "second")
    assert once.manifest.feature_schema == twice.manifest.feature_schema
    for name, weight in once.tables.items():
        np.testing.assert_array_equal(weight.numpy(), twice.tables[name].numpy())
        np.testing.assert_array_equal(once.scales[name].numpy(), twice.scales[name].numpy())


def test_int8_tables_lose_rows_too(folder: Path, tmp_path: Path) -> None:
    write_compressed(CompressJob(folder / "words", tmp_path / "int8", "int8"))
    write_compressed(CompressJob(tmp_path / "int8", tmp_path / "out", share=0.5, only=VOCABULARIES))
    old, new = read_bundle(tmp_path / "int8"), read_bundle(tmp_path / "out")
    for name in ("item", "item_w"):
        np.testing.assert_array_equal(new.tables[name].numpy(), old.tables[name].numpy()[:150])
        np.testing.assert_array_equal(new.scales[name].numpy(), old.scales[name].numpy())


def test_a_named_table_takes_along_those_of_the_same_ids(folder: Path, tmp_path: Path) -> None:
    done = write_compressed(CompressJob(folder / "words", tmp_path / "out", "float16", 0.25, only=("item_w",)))

    def told(t: Changed) -> tuple[str, int, str]:
        return t.new.name, t.new.rows, t.new.dtype

    assert [told(t) for t in done.tables] == [("item", 225, "float32"), ("item_w", 225, "float16")]
    assert "not counted; rows in the order of their ids are taken to be by falling frequency" in done.report()
    schema = read_bundle(tmp_path / "out").manifest.feature_schema
    assert schema.feature("shop") == make_schema().feature("shop")


def test_quality_before_and_after_is_that_of_the_scores(folder: Path, tmp_path: Path) -> None:
    """AUC by all pairs, log-loss by its formula, in float64."""
    command = [
        "compress", "words", "--table-dtype", "int8", "--prune", "0.5", "--trace", "trace.parquet",
        "--rows", "rows.parquet", "--label", "click", "-o", str(tmp_path / "out"),
    ]  # fmt: skip
    done = dpiframe_here(*command, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    rows = pq.read_table(folder / "rows.parquet").to_pydict()
    clicks = np.array(rows.pop("click")) == 1
    figures = []
    for bundle in (folder / "words", tmp_path / "out"):
        p = engine_scores(read_bundle(bundle), rows).astype(np.float64)
        margin = p[clicks][:, None] - p[~clicks]
        figures.append(((margin > 0).mean() + (margin == 0).mean() / 2, -np.log(np.where(clicks, p, 1 - p)).mean()))
    (auc, loss), (auc_after, loss_after) = figures
    number = r"([-+]?\d\.\d{6})"
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(rf"score: AUC {number} -> {number} \({number}\), log-loss {number} -> {number} \({number}\)", last)
    assert found is not None, last
    want = auc, auc_after, auc_after - auc, loss, loss_after, loss_after - loss
    assert [float(v) for v in found.groups()] == pytest.approx(want, abs=2e-6)
    assert abs(auc_after - auc) > 1e-4


def test_a_file_of_text_is_counted_as_it_is_scored(folder: Path, tmp_path: Path) -> None:
    """A trace of CSV, whose lists a separator joins, drops the same rows as the Parquet file."""
    rows = make_rows(400, 1)
    columns = rows | {"seen": ["|".join(bag) for bag in rows["seen"]]}
    lines = [",".join("" if v is None else str(v) for v in row) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "trace.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
    job = CompressJob(folder / "words", tmp_path / "csv", share=0.4, trace=tmp_path / "trace.csv", separators={"seen": "|"})
    write_compressed(job)
    write_compressed(replace(job, out=tmp_path / "parquet", trace=folder / "trace.parquet", separators={}))
    assert read_bundle(tmp_path / "csv").manifest.files == read_bundle(tmp_path / "parquet").manifest.files


def test_a_graph_in_the_bundle_reads_the_smaller_tables(folder: Path, tmp_path: Path) -> None:
    b = read_bundle(folder / "words")
    m = b.manifest
    write_bundle(
        tmp_path / "graph", name="graph", version="1", architecture=GraphFile(), feature_schema=m.feature_schema, dense=b.dense,
        tables=b.tables, vocabularies=b.vocabularies, golden=b.golden, provenance=m.provenance, graph=model_graph(b),
    )  # fmt: skip
    job = CompressJob(tmp_path / "graph", tmp_path / "out", share=0.5, trace=folder / "trace.parquet")
    write_compressed(job)
    write_compressed(replace(job, bundle=folder / "words", out=tmp_path / "plain"))
    got, want = (engine_scores(read_bundle(tmp_path / name), make_rows(50, 6)) for name in ("out", "plain"))
    np.testing.assert_array_equal(got, want)


def refusals(folder: Path, tmp_path: Path) -> Iterator[tuple[CompressJob, str]]:
    job = CompressJob(folder / "words", tmp_path / "x", share=0.2)
    yield job, "features.shop.encoder: got 'identity', expected a vocabulary, or a trace: raw ids have no known order"
    yield replace(job, share=0.001), "--prune: got 0.001, expected a share by which some table loses a row"
    yield replace(job, only=("rank",)), "--prune: got 0.2, expected a share by which some table loses a row"
    yield replace(job, only=("items",)), "--only: got 'items', expected one of ['user', 'user_w', 'item', 'item_w'"
    (tmp_path / "bad.jsonl").write_text(json.dumps({n: v[0] for n, v in make_rows(1, 1).items()} | {"shop": "three"}) + "\n")
    yield replace(job, trace=tmp_path / "bad.jsonl"), f"{tmp_path}/bad.jsonl, row 1, column shop: got 'three', expected"
    (tmp_path / "few.jsonl").write_text('{"user": 102, "item": "i5"}\n')
    yield replace(job, trace=tmp_path / "few.jsonl"), f"{tmp_path}/few.jsonl, columns: got ['user', 'item'], expected columns"
    rows = replace(job, only=VOCABULARIES, rows=folder / "rows.parquet", labels=("clicks",))
    yield rows, "--label: got 'clicks', expected one of the input's columns"
    schema = make_schema()
    hashed = tuple(
        f if f.name != "shop" else f.model_copy(update={"encoder": Hash(buckets=20, first_id=2)}) for f in schema.features
    )
    write_model(tmp_path / "hashed", FeatureSchema(features=hashed, tables=schema.tables))
    refused = "features.shop.encoder: got 'hash', expected a vocabulary or raw ids: hashed ids cannot be renumbered"
    yield replace(job, bundle=tmp_path / "hashed", trace=folder / "trace.parquet"), refused


def test_what_cannot_be_pruned_is_refused_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    for job, message in refusals(folder, tmp_path):
        with pytest.raises(InputError, match=re.escape(message)):
            write_compressed(job)
        assert not job.out.exists()


def test_a_refusal_for_a_feature_names_the_way_around(folder: Path, tmp_path: Path) -> None:
    command = ["compress", "words", "--prune", "0.2", "-o", str(tmp_path / "out")]
    done = dpiframe_here(*command, cwd=folder)
    refused = "features.shop.encoder: got 'identity', expected a vocabulary, or a trace: raw ids have no known order"
    assert (done.returncode, done.stderr) == (1, f"error: {refused}; --only names the tables to change\n")
