"""The demo model: its log is what it claims to be, its training learns, and its bundle scores as the trained module does."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from deployments.demo.export import build_demo_bundle, dense_parameters, table_weights
from deployments.demo.features import CATEGORICAL, CONTEXT, HASHED, NUMERIC, feature_columns, learn_features
from deployments.demo.synthetic import vocabulary_sizes, write_click_log
from deployments.demo.train import DeepFM, EncodedRows, TrainingPlan, train, training_progress
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.errors import BundleError, InputError
from dpiframe_core.evaluation.quality import auc, log_loss
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.files.click_logs import read_table
from tests import oracle

pytestmark = pytest.mark.bulk

PLAN = TrainingPlan(hidden_units=(16, 8), epochs=1)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log") / "train.txt", rows=8000, seed=3)


@pytest.fixture(scope="module")
def table(log):
    return read_table(log.path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "demo"
    manifest = build_demo_bundle(path, rows=4000, seed=3, progress=False, plan=PLAN)
    read = read_bundle(path)
    assert read.manifest == manifest
    return read


def oracle_scores(bundle, block):
    dense = {name: t.numpy() for name, t in bundle.dense.items()}
    tables = {name: t.numpy() for name, t in bundle.tables.items()}
    return oracle.scores(bundle.manifest.feature_schema, bundle.manifest.architecture, dense, tables, block)


# --- the log


def test_the_log_is_criteo_format_line_by_line(log):
    lines = log.path.read_text().splitlines()
    assert len(lines) == log.rows == 8000
    for line in lines:
        label, *cells = line.split("\t")
        assert label in ("0", "1")
        assert len(cells) == 39
        assert all(not c or c.lstrip("-").isdigit() for c in cells[:13])
        assert all(not c or (len(c) == 8 and int(c, 16) >= 0) for c in cells[13:])


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(log, tmp_path):
    again = write_click_log(tmp_path / "again.txt", rows=8000, seed=3)
    other = write_click_log(tmp_path / "other.txt", rows=8000, seed=4)
    assert again.path.read_bytes() == log.path.read_bytes() != other.path.read_bytes()
    assert again.planted_auc == log.planted_auc != other.planted_auc


def test_the_log_has_missing_negative_and_heavy_tailed_values_and_a_quarter_of_clicks(log, table):
    assert table["label"].to_numpy().mean() == log.click_rate == pytest.approx(0.25, abs=0.02)
    assert pc.min(table["I2"]).as_py() == -3
    assert pc.max(table["I5"]).as_py() > 100 * np.median(table["I5"].drop_null().to_numpy())
    missing = {name: table[name].null_count / log.rows for name in (*NUMERIC, *CATEGORICAL)}
    assert missing["I12"] == pytest.approx(0.76, abs=0.03)
    assert missing["C19"] == pytest.approx(0.44, abs=0.03)
    assert missing["C1"] == missing["I2"] == 0


def test_values_follow_a_zipf_law_over_distinct_strings(table):
    for name, size in zip(CATEGORICAL, vocabulary_sizes(), strict=True):
        counts = np.sort(pc.value_counts(table[name].drop_null()).field("counts").to_numpy())[::-1]
        assert counts.size <= size
        assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.25)


def test_the_planted_model_predicts_better_than_chance_and_its_loss_beats_the_mean_rate(log, table):
    assert 0.78 < log.planted_auc < 0.88
    clicks = table["label"].to_numpy()[-log.held_out :]
    assert log.planted_log_loss < log_loss(clicks, np.full(log.held_out, 0.25)) - 0.05


# --- AUC and log-loss


def test_auc_is_the_share_of_pairs_in_the_right_order_with_ties_counted_half():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 200), rng.integers(0, 12, 200).astype(np.float32)
    clicked, other = scores[labels == 1], scores[labels == 0]
    pairs = (clicked[:, None] > other).mean() + 0.5 * (clicked[:, None] == other).mean()
    assert auc(labels, scores) == pytest.approx(pairs, abs=1e-12)


def test_auc_of_one_class_is_refused():
    with pytest.raises(ValueError, match="labels: got 3 clicks and 0 others, expected some of both"):
        auc(np.ones(3, np.int64), np.zeros(3))


def test_log_loss_is_the_mean_negative_log_likelihood():
    assert log_loss(np.array([1, 0, 1]), np.array([0.5, 0.25, 0.125])) == pytest.approx(np.log(2 * (4 / 3) * 8) / 3)


# --- features


def test_vocabularies_hold_what_the_training_rows_show_twice_by_falling_frequency(table):
    training = table.slice(0, 7000)
    schema, vocabularies = learn_features(training, 4)
    assert set(vocabularies) == set(CATEGORICAL) - HASHED
    counts: dict[str, int] = {}
    for value in training["C1"].to_pylist():
        counts[value] = counts.get(value, 0) + 1
    rows = vocabularies["C1"].table.to_pylist()
    assert {r["value"] for r in rows} == {v for v, n in counts.items() if n >= 2}
    assert [r["id"] for r in rows] == list(range(2, len(rows) + 2))
    assert sorted((counts[r["value"]] for r in rows), reverse=True) == [counts[r["value"]] for r in rows]
    assert schema.table("C1").rows == schema.table("C1_first_order").rows == len(rows) + 2


def test_missing_and_unknown_values_are_encoded_apart_and_numbers_are_standardized(table):
    schema, vocabularies = learn_features(table.slice(0, 7000), 4)
    block = Encoder(schema, vocabularies).encode(feature_columns(table))
    rows = EncodedRows.of(block, schema)
    for j, name in enumerate(CATEGORICAL):
        absent = table[name].is_null().to_numpy()
        assert np.array_equal(rows.ids[:, j].numpy() == 0, absent), name
    assert block.oov_count == int((rows.ids == 1).sum()) > 0
    for j, name in enumerate(NUMERIC):
        present = table[name].is_valid().to_numpy()[:7000]
        column = rows.numbers[:7000, j].numpy()[present].astype(np.float64)
        assert column.mean() == pytest.approx(0, abs=1e-5)
        assert column.std() == pytest.approx(1, abs=1e-5)
        assert not rows.numbers[:7000, j].numpy()[~present].any()


def test_a_numeric_column_without_any_value_still_gives_a_schema(table):
    empty = table.slice(0, 50).set_column(1, "I1", pa.nulls(50, pa.int64()))
    schema, vocabularies = learn_features(empty, 4)
    rows = EncodedRows.of(Encoder(schema, vocabularies).encode(feature_columns(empty)), schema)
    assert not rows.numbers[:, 0].any()


# --- training


def test_training_learns_and_leaves_global_random_state_and_threads_alone(table, log):
    schema, vocabularies = learn_features(table.slice(0, 7200), 8)
    rows = EncodedRows.of(Encoder(schema, vocabularies).encode(feature_columns(table)), schema)
    labels = table["label"].to_numpy()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    plan = TrainingPlan(hidden_units=(32,), epochs=2, batch_rows=64)
    with training_progress(False) as bar:
        model = train(rows.part(0, 7200), labels[:7200], schema, plan, seed=1, progress=bar)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    # 7,200 rows teach the most frequent values only: far from the ceiling, and far from a coin.
    reached = auc(labels[7200:], model.predict(rows.part(7200, 8000))[:, 0])
    assert 0.65 < reached < log.planted_auc


def test_the_module_scores_as_the_papers_formula_in_float64(table):
    schema, vocabularies = learn_features(table.slice(0, 7000), 8)
    block = Encoder(schema, vocabularies).encode(feature_columns(table.slice(7000)))
    torch.manual_seed(0)
    model = DeepFM(schema, (16, 8))
    for weight in model.parameters():  # of a size at which every term counts
        torch.nn.init.normal_(weight, std=0.15)
    dense = {name: t.numpy() for name, t in dense_parameters(model).items()}
    tables = {name: t.numpy() for name, t in table_weights(model).items()}
    architecture = oracle.DeepFM(hidden_units=(16, 8))
    expected = oracle.scores(schema, architecture, dense, tables, block)
    assert expected.std() > 0.1
    np.testing.assert_allclose(model.predict(EncodedRows.of(block, schema)), expected, atol=1e-5, rtol=0)


# --- the bundle


def test_the_bundle_splits_user_and_ad_and_uses_both_encoders(bundle):
    schema = bundle.manifest.feature_schema
    assert [f.name for f in schema.features] == [*NUMERIC, *CATEGORICAL]
    assert {f.name for f in schema.features if f.scope == "context"} == {*NUMERIC[:5], *CATEGORICAL[:8]} == CONTEXT
    assert {f.encoder.type for f in schema.features if f.kind == "categorical"} == {"vocabulary", "hash"}
    assert sum(f.stat().st_size for f in bundle.path.rglob("*") if f.is_file()) < 50e6


def test_golden_rows_agree_with_the_bundles_own_tensors(bundle):
    golden = bundle.golden
    assert (golden.block.rows, golden.block.contexts, golden.scores.shape) == (64, 8, (64, 1))
    ids = np.concatenate([golden.block.wide_ids(side).ravel() for side in ("context_ids", "candidate_ids")])
    assert (ids == 0).any()  # missing
    assert (ids == 1).any()  # unknown
    np.testing.assert_allclose(golden.scores, oracle_scores(bundle, golden.block), atol=1e-5, rtol=0)


def test_held_out_rows_score_by_the_bundle_as_its_own_figures_say(bundle, tmp_path):
    """From the raw file to the AUC by the bundle's schema, vocabularies and tensors alone: nothing of the trained module."""
    log = write_click_log(tmp_path / "train.txt", rows=4000, seed=3)
    held_out = read_table(log.path).slice(log.rows - log.held_out)
    block = Encoder(bundle.manifest.feature_schema, bundle.vocabularies).encode(feature_columns(held_out))
    scores, clicks = oracle_scores(bundle, block)[:, 0], held_out["label"].to_numpy()
    metrics = bundle.manifest.provenance.metrics
    assert auc(clicks, scores) == pytest.approx(metrics["auc"], abs=1e-4)
    assert log_loss(clicks, scores) == pytest.approx(metrics["log_loss"], abs=1e-6)
    assert metrics["planted_auc"] == log.planted_auc


def test_the_example_is_plain_json_that_the_encoder_takes_whole(bundle):
    example = json.loads((bundle.path / "example.json").read_text())
    assert set(example) == {"context", "candidates"}
    assert set(example["context"]) == CONTEXT
    block = Encoder(bundle.manifest.feature_schema, bundle.vocabularies).encode(**example)
    assert isinstance(block, RowBlock)
    assert (block.rows, block.contexts) == (5, 1)
    # The first golden request is the same user with the same first ads.
    assert np.array_equal(block.candidate_ids, bundle.golden.block.candidate_ids[:5])
    assert np.array_equal(block.context_dense, bundle.golden.block.context_dense[:1])


def test_a_taken_path_is_refused_before_any_work(tmp_path):
    with pytest.raises(BundleError, match=r": got an existing path, expected a new one"):
        build_demo_bundle(tmp_path, rows=10**12, progress=False)


def test_a_log_too_small_for_golden_rows_is_refused(tmp_path):
    with pytest.raises(InputError, match="rows: got 999, expected at least 1000"):
        build_demo_bundle(tmp_path / "demo", rows=999, progress=False)
    assert build_demo_bundle(tmp_path / "demo", rows=1000, progress=False, plan=PLAN).golden.rows == 64
