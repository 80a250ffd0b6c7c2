"""Runs of FuxiCTR's zoo, imported by name alone, against the scores that the library's own classes gave (see `make`)."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.importers.findings import findings
from dpiframe_core.importers.fuxictr import by_name
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.raw_rows import read_rows
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.fuxictr.zoo.cases import BY_NAME, CASES, columns, write_run

STORED = Path(__file__).parent / "stored"


def stored_run(case, folder):
    """The run's directory, and the library's scores, float32[rows, tasks]."""
    weights = load_file(STORED / f"{case.name}.safetensors")
    expected = weights.pop("expected").numpy()
    write_run(case, folder)
    torch.save(weights, folder / f"{case.name}.model")
    return folder, expected


def engine_scores(path, device="cpu", precision="fp32"):
    """Of the rows of the run beside the bundle, raw rows in; by one program, without a search for a faster one."""
    options = EngineOptions(policy="waves" if device != "cpu" else "auto", buckets=(64,), max_batch_rows=64, lanes=1)
    engine = Engine(read_bundle(path), device, precision, options)
    engine.warmup()
    try:
        raw, _ = read_rows(path.parent / "run" / "test.csv", engine.schema, None)
        return engine.score(raw)
    finally:
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_models_function_scores_raw_rows_as_the_library_did(tmp_path, case, monkeypatch):
    """In float64, with every setting; most of the time of an import goes to torch.export."""
    monkeypatch.setattr(by_name, "compile_module", lambda *given, **options: Mock(dense={}, tables={}, graph=None))
    run, expected = stored_run(case, tmp_path / "run")
    source = fuxictr(find_files(run))
    raw, _ = read_rows(run / "test.csv", source.schema, None)
    block = Encoder(source.schema, source.vocabularies).encode(raw)
    np.testing.assert_allclose(source.reference(block), expected, rtol=0, atol=1e-5)


# Traced, they have every ATen call and operator of all cases together; and of the kinds of data and of several tasks one each.
OF_RUN = """lorentz-fm bst afn-alone ccpm-one dien-mlp euler-net-plain apg-dcn-v2-mixed fibinet-each dmin-plain fgcnn-shared
    apg-deep-fm-whole deep-im-shallow edcn-joined fignn-reused dmr dmr-target shared-bottom"""


@pytest.mark.bulk
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.name in OF_RUN.split() else pytest.mark.whole) for c in CASES], ids=lambda c: c.name
)
def test_a_run_by_its_name_alone_scores_raw_rows_as_the_library_did(tmp_path, case):
    run, expected = stored_run(case, tmp_path / "run")
    written = write_import(fuxictr(find_files(run)), tmp_path / "bundle")
    assert expected.std(0).min() > 1e-3
    assert written.manifest.tasks == (("click",) if len(case.labels) == 1 else case.labels)
    np.testing.assert_allclose(engine_scores(tmp_path / "bundle"), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), (None, 1e-3)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_run_by_its_name_alone_scores_the_same_on_a_gpu(tmp_path, case, precision, tolerance):
    run, expected = stored_run(case, tmp_path / "run")
    write_import(fuxictr(find_files(run)), tmp_path / "bundle")
    scores = engine_scores(tmp_path / "bundle", "cuda:0", precision)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["fm", "bst", "dien"])
def test_what_a_request_gives_once_scores_as_in_the_library(tmp_path, name):
    run, expected = stored_run(BY_NAME[name], tmp_path / "run")
    given = [columns(BY_NAME[name].data)[0]["name"]]
    write_import(fuxictr(find_files(run), given), tmp_path / "bundle")
    engine = Engine(read_bundle(tmp_path / "bundle"), "cpu", "fp32")
    engine.warmup()
    raw, _ = read_rows(run / "test.csv", engine.schema, None)
    ones = [({n: v[i : i + 1] for n, v in raw.items() if n not in given}, {n: raw[n][i] for n in given}) for i in range(9)]
    got = [engine.score(*one) for one in ones]
    engine.close()
    np.testing.assert_allclose(np.concatenate(got), expected[:9], rtol=0, atol=1e-5)


def changed_run(tmp_path, name, change):
    """The run of a case whose configuration or parameters `change` changed."""
    case = BY_NAME[name]
    run, _ = stored_run(case, tmp_path / "run")
    config, path = yaml.safe_load((run / "config.yaml").read_text()), run / f"{name}.model"
    weights = torch.load(path, weights_only=True)
    change(config, weights)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    torch.save(weights, path)
    return run


def test_a_setting_that_the_configuration_does_not_name_is_said_with_what_was_taken(tmp_path):
    run, expected = (
        changed_run(tmp_path, "pnn", lambda c, w: c.pop("hidden_activations")),
        load_file(STORED / "pnn.safetensors"),
    )
    source, scores = fuxictr(find_files(run)), tmp_path / "expected.csv"
    taken = "not in the configuration, taken as the library's class has it: product_type = inner, hidden_activations = ReLU"
    assert taken in findings(source)
    assert taken in write_import(source, tmp_path / "without-expected").report()
    scores.write_text("\n".join(["score", *(f"{p:.9g}" for p in expected["expected"].ravel().tolist())]))
    with pytest.raises(
        InputError, match=r"at most 1e-05 \(the configuration does not name .*hidden_activations = ReLU: taken as"
    ):
        write_import(source, tmp_path / "bundle", rows=run / "test.csv", expected=scores)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("fm", lambda c, w: c.update(model="Unheard"), r"yaml: model: got 'Unheard', expected one of .*--source FILE.py"),
        ("fm", lambda c, w: c.update(model="SIM"), r"got 'SIM', expected another model: its histories come from tables"),
        ("fm", lambda c, w: c.update(task="regression"), r"config.yaml: task: got 'regression', expected binary_class"),
        ("nfm", lambda c, w: c.update(hidden_activations="swirl"), r"yaml: hidden_activations: got 'swirl', expected one of"),
        ("nfm", lambda c, w: c.update(hidden_activations=["relu"]), r"activations: got \['relu'\], expected one activation"),
        ("fwfm-fields", lambda c, w: c.update(linear_type="LX"), r"linear_type: got 'LX', expected one of LW, FeLV, FiLV"),
        ("bst", lambda c, w: c.update(bst_target_field="x"), r"bst_target_field: got 'x', expected a feature of the run"),
        ("fgcnn", lambda c, w: c.update(pooling_sizes=[2]), r"pooling_sizes: got \[2\], expected .* one for each of 2 layers"),
        ("dmr", lambda c, w: c.update(context_field="C1"), r"context_field: got 'C1', expected null: the library's own class"),
        ("autoint", lambda c, w: c.update(num_heads=4), r"model AutoInt: got .*expected settings and parameters of one run"),
        ("nfm", lambda c, w: w.pop("dnn.mlp.0.weight"), r"nfm.model: dnn.mlp.0.weight: got 'no such parameter', exp"),
        ("fm", lambda c, w: w.update(more=torch.ones(2)), r"fm.model: got '1 parameters left over', expected a place"),
        ("afm", lambda c, w: w.pop("weight_p.weight"), r"afm.model: weight_p.weight: got 'no such parameter', exp"),
        ("mmoe", lambda c, w: [w.pop(k) for k in list(w) if "tower.1" in k or "gate.1" in k], r"labels: got .*expected 1, one"),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 16 else "",
)
def test_what_does_not_fit_is_said_with_the_file_and_the_name(tmp_path, name, change, said):
    with pytest.raises(InputError, match=said):
        fuxictr(find_files(changed_run(tmp_path, name, change)))
