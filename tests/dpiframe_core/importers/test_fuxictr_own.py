"""FuxiCTR runs by the user's own class, made from the configuration, compiled, or refused in words."""

import importlib.util
import json

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from tests.dpiframe_core.importers.peers import library, needs_runs
from tests.dpiframe_core.importers.test_fuxictr_runs import raw_columns, run_copy


@pytest.fixture(scope="module", autouse=True)
def installed():
    library("fuxictr")


pytestmark = [needs_runs, pytest.mark.bulk]

OWN = """
from tests.dpiframe_core.compiler import multitask


class Own(multitask.{base}):
    def __init__(self, feature_map, embedding_dim, batch_norm=False, **settings):
        super().__init__(feature_map, embedding_dim, batch_norm=batch_norm)
        self.labels = feature_map.labels
"""


def two_task_run(tmp_path, base, **settings):
    """A run of Criteo's numbers and categories whose model, Own, has random weights and two labels; and its module."""
    from fuxictr.features import FeatureMap

    from tests.dpiframe_core.compiler.test_multitask import lively

    run, source = run_copy(tmp_path, "deepfm_bn"), tmp_path / "own.py"
    source.write_text(OWN.format(base=base))
    features = json.loads((run / "feature_map.json").read_text()) | {"labels": ["click", "buy"]}
    (run / "feature_map.json").write_text(json.dumps(features))
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"model": "Own", "num_tasks": 2} | settings
    config["task"] = ["binary_classification"] * 2
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "expected.csv").unlink()
    feature_map = FeatureMap(config["dataset_id"], "")
    feature_map.load(str(run / "feature_map.json"), config)
    spec = importlib.util.spec_from_file_location("own_of_test", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = lively(module.Own(feature_map, **config))
    torch.save(net.state_dict(), run / "checkpoint.model")
    return run, source, net


def imported(run, source, out, *more):
    return CliRunner().invoke(app, ["import", "fuxictr", str(run), "--source", str(source), "-o", str(out), *more])


@pytest.mark.parametrize(("base", "batch_norm"), [("MMoE", False), ("PLE", True), ("ShareBottom", False)])
def test_a_run_of_two_tasks_scores_its_raw_rows_as_its_own_class_does(tmp_path, base, batch_norm):
    run, source, net = two_task_run(tmp_path, base, batch_norm=batch_norm)
    done = imported(run, f"{source}:Own", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert "FuxiCTR's Own itself, on test.csv" in done.output
    bundle = read_bundle(tmp_path / "b")
    assert bundle.manifest.tasks == ("click", "buy")
    engine = Engine(bundle, "cpu", "fp32")
    engine.warmup()
    raw = raw_columns("deepfm_bn", engine.schema)
    block = engine.encoder.encode(raw)
    got = engine.score(raw)
    engine.close()
    x = {f.name: torch.from_numpy(np.array(block.column(engine.schema.columns[f.name]))[:, 0]) for f in engine.schema.features}
    with torch.no_grad():
        want = torch.cat(list(net(x).values()), 1).numpy()
    assert want.std(0).min() > 1e-3
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "Other", "own.py: got 'Other', expected a subclass of torch.nn.Module in it, one of Own"),
        ("import no_such_library", "Own", "got \"no module 'no_such_library'\", expected the library that trained it"),
        ("1 / 0", "Own", "ZeroDivisionError"),
        (OWN.format(base="PLE"), "Own", "the checkpoint lacks cgc_layers"),
        (OWN.format(base="MMoE").replace("embedding_dim,", "embedding_dim, missing,"), "Own", "its constructor: got"),
        (OWN.format(base="MMoE").replace("(feature_map, embedding_dim", "(feature_map, 2 * embedding_dim"), "Own", "as made"),
    ],
    ids=["no-class", "no-library", "fails", "other-names", "constructor", "other-shapes"],
)
def test_what_does_not_fit_is_said_in_one_line_and_nothing_is_left(tmp_path, text, name, said):
    run, source, _ = two_task_run(tmp_path, "MMoE")
    if text is not None:
        source.write_text(text)
    done = imported(run, f"{source}:{name}", tmp_path / "b")
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert not (tmp_path / "b").exists()


def test_a_model_that_is_not_known_by_name_leads_to_its_class_and_help_says_that_it_is_run(tmp_path):
    run, _, _ = two_task_run(tmp_path, "MMoE")
    done = CliRunner().invoke(app, ["import", "fuxictr", str(run), "-o", str(tmp_path / "b")])
    assert "--source FILE.py:CLASS" in " ".join(done.output.split())
    shown = CliRunner().invoke(app, ["import", "fuxictr", "--help"], env={"COLUMNS": "200"}).output
    assert "This RUNS that file" in " ".join(shown.replace("│", " ").split())
