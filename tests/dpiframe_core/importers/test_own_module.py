"""Models of DeepCTR-Torch and torch-rechub that are not imported by name, by a file that makes them, against the libraries."""

import importlib.util

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.importers.own_class import own_class, own_maker, with_weights
from dpiframe_core.importers.raw_rows import random_rows
from dpiframe_core.importers.state_dict import StateDict
from tests.dpiframe_core.importers.peers import library, randomized

pytestmark = pytest.mark.bulk

DEEPCTR = """
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import {kind}

COLUMNS = [SparseFeat("user", 20, 4), SparseFeat("ad", 10, 4), DenseFeat("price")]


def model():
    return {kind}(COLUMNS, COLUMNS, {more})
"""
RECHUB = """
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import {kind}

SPARSE = [SparseFeature("user", 20, 4), SparseFeature("ad", 10, 4)]


def model():
    return {kind}({more})


three = 3
"""
SPEC = {"features": [{"name": "user"}, {"name": "ad"}]}


def files(tmp_path, text, features=()):
    """The file, the checkpoint of its model with random weights, the spec; and the model."""
    source, spec = tmp_path / "own.py", SPEC | {"features": [*SPEC["features"], *features]}
    source.write_text(text)
    loaded = importlib.util.spec_from_file_location("own_of_test", source)
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    net = randomized(module.model(), embeddings=0.5)
    torch.save(net.state_dict(), tmp_path / "model.pt")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    return source, net


def imported(tmp_path, command, source):
    arguments = [
        str(tmp_path / "model.pt"),
        "--spec",
        str(tmp_path / "spec.yaml"),
        "--source",
        source,
        "-o",
        str(tmp_path / "b"),
    ]
    return CliRunner().invoke(app, ["import", command, *arguments])


def compared(tmp_path, own):
    engine = Engine(read_bundle(tmp_path / "b"), "cpu", "fp32")
    engine.warmup()
    rows = random_rows(engine.schema, {}, 50)
    several = {f.name for f in engine.schema.features if f.max_values > 1}
    rows = {name: [v or ([] if name in several else 0) for v in column] for name, column in rows.items()}
    got = engine.score(rows)
    engine.close()
    with torch.no_grad():
        want = own(rows).reshape(-1, 1).numpy()
    assert want.std() > 1e-3
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("NFM", "dnn_hidden_units=(7, 5)"),
        ("PNN", None),
        ("IFM", "dnn_hidden_units=(7, 5)"),
        ("AutoInt", "dnn_hidden_units=(7,), att_head_num=2"),
        ("FiBiNET", "dnn_hidden_units=(7, 5)"),
        ("DIFM", "dnn_hidden_units=(7, 5), att_head_num=2"),
    ],
)
def test_a_model_of_deepctr_torch_by_a_function(tmp_path, kind, more):
    library("deepctr_torch.models")
    text = DEEPCTR.format(kind=kind, more=more)
    if more is None:
        text = text.replace("(COLUMNS, COLUMNS, None)", "(COLUMNS, dnn_hidden_units=(7, 5))")
    source, net = files(tmp_path, text, [{"kind": "dense", "name": "price"}])
    done = imported(tmp_path, "deepctr-torch", f"{source}:model")
    assert done.exit_code == 0, done.output
    compared(
        tmp_path, lambda rows: net(torch.tensor(np.stack([rows[n] for n in ("user", "ad", "price")], 1), dtype=torch.float32))
    )


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("AutoInt", "sparse_features=SPARSE, dense_features=[], num_layers=2, num_heads=2, mlp_params=None"),
        ("EDCN", "SPARSE, 2, {'dims': [8], 'activation': 'relu', 'dropout': 0}"),
        ("FiBiNet", "SPARSE, {'dims': [8], 'activation': 'relu', 'dropout': 0}"),
    ],
)
def test_a_model_of_torch_rechub_by_a_function(tmp_path, kind, more):
    library("torch_rechub.models.ranking")
    source, net = files(tmp_path, RECHUB.format(kind=kind, more=more))
    done = imported(tmp_path, "torch-rechub", f"{source}:model")
    assert done.exit_code == 0, done.output
    assert read_bundle(tmp_path / "b").manifest.name == kind.lower(), "the model's name, not the function's"
    compared(tmp_path, lambda rows: net({name: torch.tensor(rows[name]) for name in ("user", "ad")}))


TWO = """
import torch
from torch import nn


class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.ad, self.towers = nn.Embedding(20, 4), nn.Embedding(10, 4), nn.Linear(8, 2)

    def forward(self, x):
        return torch.sigmoid(self.towers(torch.cat([self.user(x["user"]), self.ad(x["ad"])], 1)))
"""


def test_the_spec_names_the_scores_of_a_model_of_several_tasks(tmp_path):
    source, _ = files(tmp_path, TWO)
    spec = tmp_path / "spec.yaml"
    for tasks in (["buy"], ["buy", "buy"]):
        spec.write_text(yaml.safe_dump(SPEC | {"tasks": tasks}))
        done = imported(tmp_path, "torch-rechub", f"{source}:model")
        assert f"tasks: got {tasks}, expected 2 different names" in " ".join(done.output.split())
        assert not (tmp_path / "b").exists()
    spec.write_text(yaml.safe_dump(SPEC | {"tasks": ["click", "buy"]}))
    assert imported(tmp_path, "torch-rechub", f"{source}:model").exit_code == 0
    assert read_bundle(tmp_path / "b").manifest.tasks == ("click", "buy")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("three", "got 'three', expected a class or function in it that makes the module, one of model"),
        ("nobody", "got 'nobody', expected a class or function"),
        ("SparseFeature", "its constructor: got"),
    ],
)
def test_what_makes_no_module_is_said_in_one_line(tmp_path, name, said):
    library("torch_rechub.models.ranking")
    more = "sparse_features=SPARSE, dense_features=[], num_layers=1, num_heads=1, mlp_params=None"
    source, _ = files(tmp_path, RECHUB.format(kind="AutoInt", more=more))
    done = imported(tmp_path, "torch-rechub", f"{source}:{name}")
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "b").exists()


def test_a_model_that_is_not_known_leads_to_source_and_help_says_that_it_is_run(tmp_path):
    library("torch_rechub.models.ranking")
    more = "sparse_features=SPARSE, dense_features=[], num_layers=1, num_heads=1, mlp_params=None"
    files(tmp_path, RECHUB.format(kind="AutoInt", more=more))
    arguments = [str(tmp_path / "model.pt"), "--spec", str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "b")]
    done = CliRunner().invoke(app, ["import", "torch-rechub", *arguments])
    assert "others by --source FILE.py:NAME" in " ".join(done.output.split())
    shown = CliRunner().invoke(app, ["import", "deepctr-torch", "--help"], env={"COLUMNS": "200"}).output
    assert "This RUNS that file" in " ".join(shown.replace("│", " ").split())


def test_a_file_of_a_package_may_import_its_neighbours_by_a_dot(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .top import Top\n")
    (folder / "below.py").write_text("from torch import nn\n\n\nclass Below(nn.Module):\n    depth = 3\n")
    (folder / "top.py").write_text("from .below import Below\n\n\nclass Top(Below):\n    pass\n")
    assert own_class(f"{folder}/top.py:Top").depth == 3
    (folder / "below.py").write_text("from torch import nn\n\n\nclass Below(nn.Module):\n    depth = 44\n")
    assert own_class(f"{folder}/top.py:Top").depth == 44, "what an earlier call loaded"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("self.w = torch.rand(3, requires_grad=True)", "own: w: got 'weights outside of its state_dict'"),
        ("self.w = torch.rand(3)", "own: w: got 'weights outside of its state_dict'"),
        ("self.register_buffer('w', torch.rand(3), persistent=False)", "own: w: got 'weights outside of its state_dict'"),
        ("self.w = torch.arange(3)", None),
    ],
)
def test_weights_that_no_checkpoint_has_are_refused_and_constants_are_not(tmp_path, line, said):
    text = (
        f"import torch\n\n\nclass Own(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        {line}\n"
    )
    (tmp_path / "own.py").write_text(text)
    make, weights = own_maker(f"{tmp_path}/own.py:Own"), StateDict({}, "model.pt")
    if said is None:
        assert with_weights(make, weights, "own").w.tolist() == [0, 1, 2]
    else:
        with pytest.raises(InputError, match=said):
            with_weights(make, weights, "own")


class Holds(torch.nn.Module):
    """Parameters and what refers to them: a tied one, a list, the list that nn.GRU keeps, and here a view."""

    def __init__(self, view):
        super().__init__()
        self.table, self.tied, self.gru = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False), torch.nn.GRU(3, 3)
        self.tied.weight = self.table.weight
        self.listed = [self.table.weight.detach()[:2] if view else self.table.weight]


@pytest.mark.parametrize("view", [False, True])
def test_a_module_reads_the_checkpoints_own_memory_unless_something_has_views_of_what_it_was_made_with(view):
    weights = randomized(Holds(view), embeddings=0.5).state_dict()
    made = with_weights(lambda: Holds(view), StateDict(weights, "x"), "own")
    table = weights["table.weight"]
    assert (made.table.weight.data_ptr() == table.data_ptr()) is not view
    assert torch.equal(made.listed[0], table[:2] if view else table)
    assert torch.equal(made.tied.weight, table)
    assert torch.equal(made.gru._flat_weights[0], weights["gru.weight_ih_l0"])
