"""RecBole models that are not imported by name, by their class, against the class's own `predict` on what its loaders give."""

import copy

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from tests.dpiframe_core.importers.peers import library, randomized
from tests.dpiframe_core.importers.recbole.cases import BY_NAME, NUMBERS, Case, encoded, rows, spec
from tests.dpiframe_core.importers.recbole.make import Config, Dataset
from tests.dpiframe_core.importers.recbole.test_recbole import engine_scores, stored_files


@pytest.fixture(scope="module", autouse=True)
def installed():
    library("recbole.utils")


pytestmark = pytest.mark.bulk

OWN = """
from recbole.model.context_aware_recommender.{file} import {kind}
"""
UNMASKED = """
from recbole.model.context_aware_recommender.afm import AFM


class Unmasked(AFM):
    def embed_token_seq_fields(self, fields, mode="mean"):
        return self.token_seq_embedding_table[0](fields[0]).mean(1, keepdim=True)
"""
MLP = {"embedding_size": 4, "mlp_hidden_size": [7, 5], "dropout_prob": 0.2}
SETTINGS = {
    "AFM": {"embedding_size": 4, "attention_size": 6, "dropout_prob": 0.3, "reg_weight": 2},
    "FFM": {"embedding_size": 4},
    "PNN": MLP | {"reg_weight": 0, "use_inner": True, "use_outer": True},
    "DCNV2": MLP | {"mixed": False, "structure": "parallel", "cross_layer_num": 2, "reg_weight": 0},
    "LR": {"embedding_size": 4},
    "FwFM": {"embedding_size": 4, "dropout_prob": 0.0},
}


def files(folder, kind, text=None):
    """The file, the checkpoint of the class with random weights and the spec beside its vocabularies; and the model."""
    case = Case(kind.lower(), kind, {}, SETTINGS.get(kind, SETTINGS["AFM"]))
    _, spec_file, _ = stored_files(BY_NAME["fm"], folder)
    source = folder / "own.py"
    source.write_text(text or OWN.format(file=kind.lower(), kind=kind))
    spec_file.write_text(yaml.safe_dump(spec(case)))
    scope: dict = {}
    exec(source.read_text(), scope)
    common = {"LABEL_FIELD": "label", "device": "cpu", "numerical_features": list(NUMBERS)}
    net = randomized(scope[kind](Config(common | case.settings), Dataset(case)), embeddings=0.5)
    torch.save(net.state_dict(), folder / "model.pt")
    return source, net, case


def imported(folder, source):
    arguments = [str(folder / "model.pt"), "--spec", str(folder / "spec.yaml"), "--source", source, "-o", str(folder / "b")]
    return CliRunner().invoke(app, ["import", "recbole", *arguments])


@pytest.mark.parametrize("kind", ["AFM", "FFM", "PNN", "DCNV2", "LR", "Unmasked"])
def test_raw_tokens_score_as_the_class_predicts(tmp_path, kind):
    """Also of a class that reads the row of [PAD] where a list has ended."""
    source, net, case = files(tmp_path, kind, UNMASKED if kind == "Unmasked" else None)
    done = imported(tmp_path, f"{source}:{kind}")
    assert done.exit_code == 0, done.output
    assert f"RecBole's {kind} itself" in " ".join(done.output.split())
    with torch.no_grad():
        want = net.predict({name: torch.from_numpy(v) for name, v in encoded(case).items()}).reshape(-1, 1).numpy()
    assert want.std() > 1e-3
    np.testing.assert_allclose(engine_scores(tmp_path / "b", rows(case)), want, rtol=0, atol=1e-5)


def test_a_function_is_called_with_config_and_dataset(tmp_path):
    source, _, _ = files(tmp_path, "AFM", OWN.format(file="afm", kind="AFM") + "\n\ndef made(config, dataset):\n"
                         "    assert config['embedding_size'] == 4 and dataset.num('gender') == 3\n"
                         "    return AFM(config, dataset)\n")  # fmt: skip
    done = imported(tmp_path, f"{source}:made")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("kind", "text", "settings", "said"),
    [
        (
            "FwFM",
            None,
            None,
            "--source FwFM: weight: got 'weights outside of its state_dict', expected a parameter or a buffer",
        ),
        ("AFM", None, {"attention_size": 6}, "spec.yaml: settings: got 'no embedding_size"),
        (
            "AFM",
            None,
            SETTINGS["AFM"] | {"attention_size": 5},
            "attlayer.h: got 'shape [6] in the checkpoint', expected [5] as made",
        ),
    ],
    ids=["outside", "unset", "other"],
)
def test_what_cannot_be_had_is_said_and_nothing_is_written(tmp_path, kind, text, settings, said):
    source, _, _ = files(tmp_path, kind, text)
    if settings is not None:
        fields = copy.deepcopy(yaml.safe_load((tmp_path / "spec.yaml").read_text()))
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(fields | {"settings": settings}))
    done = imported(tmp_path, f"{source}:{kind}")
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "b").exists()
