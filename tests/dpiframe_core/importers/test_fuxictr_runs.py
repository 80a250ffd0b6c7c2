"""Real FuxiCTR training runs: each imports with one command and scores raw rows as the library did, in HTTP's form too."""

import csv
import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from deployments.config import Limits
from deployments.offline.file_scoring import score_file
from deployments.offline.score_job import ScoreJob
from deployments.scoring.request_form import RequestForm
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.importers.fuxictr.files import find_files, read_run
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.writing import write_import
from tests.deployments.server_process import Server, score
from tests.dpiframe_core.importers.peers import RUNS, needs_runs

pytestmark = [needs_runs, pytest.mark.bulk]
NAMES = ("deepfm_bn", "widedeep", "dcn", "dcnv2_parallel", "din")


def run_copy(tmp_path, name):
    """A copy that may be spoilt."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / name, folder)
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o755)
    return folder


def read_csv(name, file):
    return list(csv.DictReader((RUNS / name / file).read_text().splitlines()))


def expected(name):
    return np.array([float(row["score"]) for row in read_csv(name, "expected.csv")])


def raw_columns(name, schema):
    """The raw rows as a client reads them from the CSV file: text, numbers, null for an empty cell."""
    rows = read_csv(name, "test.csv")
    kinds = {f.name: float if f.kind == "numeric" else str for f in schema.features}
    return {f: [kind(row[f]) if row[f] else None for row in rows] for f, kind in kinds.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_imports_with_one_command_and_scores_its_raw_rows_as_the_library_did(tmp_path, name):
    out = tmp_path / "bundle"
    done = CliRunner().invoke(app, ["import", "fuxictr", str(RUNS / name), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "|dp| max" in done.output
    engine = Engine.load(out, "cpu")
    engine.warmup()
    got = engine.score(raw_columns(name, engine.schema))[:, 0]
    engine.close()
    assert np.abs(got - expected(name)).max() <= 1e-5
    manifest = read_bundle(out).manifest
    assert manifest.golden.tolerance == {}
    metrics = manifest.provenance.metrics
    assert metrics["parity_max_deviation"] <= 1e-5
    assert metrics["parity_rank_correlation"] > 0.9999
    assert metrics["parity_rows"] == len(got)
    assert metrics["auc"] == pytest.approx(metrics["source_auc"], abs=1e-2)
    assert {"log_loss", "source_log_loss", "parity_mean_deviation"} <= metrics.keys()


def test_embeddings_shared_in_a_chain_are_one_table(tmp_path):
    """C3 reads C2's embedding, C2 C1's: all three are C1's."""
    run = run_copy(tmp_path, "dcn")
    features = json.loads((run / "feature_map.json").read_text())
    specs = {name: spec for f in features["features"] for name, spec in f.items()}
    weights = torch.load(run / "checkpoint.model", weights_only=True)
    vocab = json.loads((run / "feature_vocab.json").read_text())
    name = next(k for k in weights if k.endswith("embedding_layers.C1.weight")).replace("C1", "{}")
    for child, parent in (("C2", "C1"), ("C3", "C2")):
        specs[child].update(share_embedding=parent, vocab_size=specs["C1"]["vocab_size"])
        weights[name.format(child)] = weights[name.format("C1")].clone()
        vocab[child] = vocab["C1"]
    (run / "feature_map.json").write_text(json.dumps(features))
    (run / "feature_vocab.json").write_text(json.dumps(vocab))
    torch.save(weights, run / "checkpoint.model")
    normalizers = {n: t.model_dump() for n, t in read_run(find_files(RUNS / "dcn")).normalizers.items()}
    (run / "normalizers.yaml").write_text(yaml.safe_dump(normalizers))
    (run / "feature_processor.pkl").unlink()
    source = fuxictr(find_files(run, normalizers=run / "normalizers.yaml"))
    assert [source.schema.feature(f"C{i}").table for i in (1, 2, 3)] == ["C1"] * 3
    assert write_import(source, tmp_path / "b").parity.max_deviation <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_run_scores_its_file_offline_as_the_library_did(tmp_path, name):
    """The file's sequences are split as the schema says; no --splitter is needed."""
    write_import(fuxictr(find_files(RUNS / name)), tmp_path / "b", rows=RUNS / name / "test.csv")
    job = ScoreJob(tmp_path / "b", RUNS / name / "test.csv", tmp_path / "scored.parquet", device="cpu", chunk_rows=16)
    report = score_file(job, lambda done, rows: None, 1)
    assert report.rows == len(expected(name))
    assert np.abs(pq.read_table(job.out)["score"].to_numpy() - expected(name)).max() <= 1e-5


def test_the_source_layers_in_float64_are_golden_where_there_are_no_scores(tmp_path):
    run = run_copy(tmp_path, "dcn")
    (run / "expected.csv").unlink()
    done = CliRunner().invoke(app, ["import", "fuxictr", str(run), "-o", str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert "computed in float64" in done.output
    (run / "test.csv").unlink()
    done = CliRunner().invoke(app, ["import", "fuxictr", str(run), "-o", str(tmp_path / "c")])
    assert done.exit_code == 0, done.output
    assert "random rows" in done.output


def test_features_named_as_context_are_given_once(tmp_path):
    out = tmp_path / "b"
    args = ["import", "fuxictr", str(RUNS / "din"), "--context", "userid, click_sequence", "-o", str(out)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    bundle = read_bundle(out)
    assert set(bundle.example["context"]) == {"userid", "click_sequence"}


def test_joined_sequences_come_over_http_as_text_or_as_lists(tmp_path):
    source = fuxictr(find_files(RUNS / "din"))
    write_import(source, tmp_path / "b", rows=RUNS / "din" / "test.csv")
    form, engine = RequestForm("din", source.schema, Limits()), Engine.load(tmp_path / "b", "cpu")
    engine.warmup()
    columns = raw_columns("din", source.schema)
    parsed = form.parse(json.dumps({"candidates": columns}).encode())
    text = engine.score(parsed.candidates, parsed.context)
    columns["click_sequence"] = [v.split("^") if v else [] for v in columns["click_sequence"]]
    lists = engine.score(columns)
    engine.close()
    assert np.array_equal(text, lists)
    assert np.abs(text[:, 0] - expected("din")).max() <= 1e-5


def test_normalisers_from_yaml_do_what_the_pickle_says(tmp_path):
    run = run_copy(tmp_path, "widedeep")
    normalizers = read_run(find_files(run)).normalizers
    (run / "feature_processor.pkl").unlink()
    with pytest.raises(InputError, match=r"columns\.I1\.normalizer: got 'MinMaxScaler', expected its fitted values: --proc"):
        fuxictr(find_files(run))
    file = run / "normalizers.yaml"
    file.write_text(yaml.safe_dump({name: n.model_dump() for name, n in normalizers.items()}))
    made = write_import(
        fuxictr(find_files(run, normalizers=file)), tmp_path / "b", rows=run / "test.csv", expected=run / "expected.csv"
    )
    assert made.parity.max_deviation <= 1e-5
    file.write_text(yaml.safe_dump({"I99": {"type": "standardize", "mean": 0.0, "std": 1.0}}))
    with pytest.raises(InputError, match=r"normalizers\.yaml: I99: got 'a normaliser', expected one of a feature"):
        fuxictr(find_files(run, normalizers=file))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_runs_behind_one_endpoint_score_their_raw_rows_over_http(tmp_path):
    for name in NAMES:
        write_import(fuxictr(find_files(RUNS / name)), tmp_path / name, name=name, rows=RUNS / name / "test.csv")
    config = {"models": [{"path": str(tmp_path / name)} for name in NAMES]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    with Server(tmp_path / "config.yaml") as server:
        server.wait_ready()
        for name in NAMES:
            columns = raw_columns(name, read_bundle(tmp_path / name).manifest.feature_schema)
            answer = score(server.url, json.dumps({"model": name, "candidates": columns}).encode())
            assert answer.status_code == 200, answer.text
            assert np.abs(np.array(answer.json()["scores"]) - expected(name)).max() <= 1e-5, name
