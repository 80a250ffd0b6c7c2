"""RecBole's context-aware models, a state dict and a spec in, against the scores that the library's own classes gave."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from deployments.cli.main import app
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError
from dpiframe_core.importers.recbole.checkpoint import recbole
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.recbole.cases import BY_NAME, CASES, TOKENS, rows, spec, vocabulary

STORED = Path(__file__).parent / "stored"


def stored_files(case, folder):
    """The checkpoint, the spec beside its vocabularies, and the library's scores, float32[rows, 1]."""
    weights = load_file(STORED / f"{case.name}.safetensors")
    expected = weights.pop("expected").numpy()
    torch.save(weights, folder / "model.pt")
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec(case)))
    for name in TOKENS:
        (folder / f"{name}.json").write_text(json.dumps(vocabulary(name)))
    return folder / "model.pt", folder / "spec.yaml", expected


def engine_scores(path, columns, device="cpu", precision="fp32"):
    options = EngineOptions(policy="waves" if device != "cpu" else "auto", buckets=(64,), max_batch_rows=64, lanes=1)
    engine = Engine(read_bundle(path), device, precision, options)
    engine.warmup()
    try:
        return engine.score(columns)
    finally:
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_raw_tokens_score_as_in_the_library(tmp_path, case):
    checkpoint, spec_file, expected = stored_files(case, tmp_path)
    write_import(recbole(checkpoint, spec_file), tmp_path / "bundle")
    assert expected.std() > 1e-3
    np.testing.assert_allclose(engine_scores(tmp_path / "bundle", rows(case)), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), (None, 1e-3)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_raw_tokens_score_the_same_on_a_gpu(tmp_path, case, precision, tolerance):
    checkpoint, spec_file, expected = stored_files(case, tmp_path)
    write_import(recbole(checkpoint, spec_file), tmp_path / "bundle")
    got = engine_scores(tmp_path / "bundle", rows(case), "cuda:0", precision)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def test_a_token_that_the_data_set_did_not_have_reads_the_row_of_pad(tmp_path):
    case = BY_NAME["fm"]
    checkpoint, spec_file, _ = stored_files(case, tmp_path)
    write_import(recbole(checkpoint, spec_file), tmp_path / "bundle")
    one = {name: column[:1] for name, column in rows(case).items()}
    unseen, missing = (engine_scores(tmp_path / "bundle", one | {"gender": [value]}) for value in ("unheard", None))
    assert unseen == missing != engine_scores(tmp_path / "bundle", one)


def test_the_command_writes_a_bundle(tmp_path):
    checkpoint, spec_file, _ = stored_files(BY_NAME["deepfm"], tmp_path)
    arguments = ["import", "recbole", str(checkpoint), "--spec", str(spec_file), "-o", str(tmp_path / "bundle")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "RecBole's DeepFM computed in float64" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("fm", lambda s, w: s.update(model="FwFM"), r"model: got 'FwFM', expected another model: it keeps the weights of its"),
        ("fm", lambda s, w: s.update(model="DSSM"), r"model: got 'DSSM', expected one of AutoInt, DCN, .*--source FILE.py:N"),
        ("autoint", lambda s, w: s.update(settings={}), r"settings.num_heads: got 'nothing', expected the hyper-parameter"),
        ("fm", lambda s, w: s.update(settings={"direct": True}), r"settings: got 'direct', expected only what FM does not"),
        ("autoint", lambda s, w: s.update(settings={"num_heads": 5}), r"model AutoInt: got .*expected settings and parameters"),
        ("fm", lambda s, w: s["features"].pop(0), r"token_embedding_table.*: got '16 rows', expected 9, .*of item_id"),
        ("fm", lambda s, w: s["features"][0].pop("vocabulary"), r"user_id.vocabulary: got 'nothing', expected a JSON file"),
        ("fm", lambda s, w: s.update(tasks=["buy"]), r"tasks: got \['buy'\], expected none: FM has one, named click"),
        (
            "deepfm",
            lambda s, w: [f.update(pooling="max") for f in s["features"] if f.get("max_values")],
            r"\w+.pooling: got 'max', expected mean: whatever pooling_mode says, RecBole's DeepFM",
        ),
        (
            "deepfm",
            lambda s, w: w.update({n: w[n][:-1] for n in w if "token_seq" in n}),
            r"token_seq_embedding_table.0.weight: got '\d+ rows', expected \d+, \d+ of class, as ",
        ),
        ("nfm", lambda s, w: w.pop("predict_layer.weight"), r"predict_layer.weight: got 'no such parameter', expected it"),
        ("dcn", lambda s, w: w.update(more=torch.ones(2)), r"got '1 parameters left over', expected a place in RecBole's DCN"),
        ("fm", lambda s, w: w.pop("token_embedding_table.embedding.weight"), r"token_embedding_table.*as RecBole's models of"),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 8 else "",
)
def test_what_does_not_fit_is_said_with_the_file_and_the_name(tmp_path, name, change, said):
    checkpoint, spec_file, _ = stored_files(BY_NAME[name], tmp_path)
    fields, weights = yaml.safe_load(spec_file.read_text()), torch.load(checkpoint, weights_only=True)
    change(fields, weights)
    spec_file.write_text(yaml.safe_dump(fields))
    torch.save(weights, checkpoint)
    with pytest.raises(InputError, match=said):
        recbole(checkpoint, spec_file)
