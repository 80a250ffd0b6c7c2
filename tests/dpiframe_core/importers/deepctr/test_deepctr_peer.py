"""DeepCTR-Torch itself against what is imported of it: its own models, random weights, real samples and random rows.

From the live model, and from its checkpoint with a written spec, through the command.
"""

import csv
import json
import zlib

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from deployments.cli.main import app
from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.importers.deepctr.checkpoint import deepctr_torch, read_deepctr
from dpiframe_core.importers.deepctr.columns import spec_of
from dpiframe_core.importers.model_spec import with_vocabularies
from dpiframe_core.importers.raw_rows import random_rows, read_rows
from dpiframe_core.importers.state_dict import StateDict
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.peers import SAMPLES, Later, needs_samples, randomized

pytestmark = pytest.mark.bulk

models, inputs = Later("deepctr_torch.models"), Later("deepctr_torch.inputs")


def Sparse(*given, **options):  # noqa: N802
    return inputs.SparseFeat(*given, **options)


def Dense(*given):  # noqa: N802
    return inputs.DenseFeat(*given)


def VarLen(*given, **options):  # noqa: N802
    return inputs.VarLenSparseFeat(*given, **options)


def columns(dim=4, *, sparse=True, dense=True, lists=True, shared=True):
    """A mixture in an order that the library rearranges: sparse, then lists, then numbers."""
    out = [Dense("n0")] if dense else []
    out += [Sparse("a", 11, dim), Sparse("b", 5, dim)] if sparse else []
    if lists:
        out.insert(1, VarLen(Sparse("tags", 7, dim), 3, "mean"))
        out += [VarLen(Sparse("more", 7, dim, embedding_name="tags" if shared else "more"), 4, "sum")]
    return out + ([Dense("n1"), Dense("n2")] if dense else [])


def model_input(model, rows, lengths=None):
    """float32[n, ..] as the library takes it: lists padded behind with 0, their lengths where a column asks for them."""
    count = len(next(iter(rows.values())))
    x = np.zeros((count, max(end for _, end in model.feature_index.values())), np.float32)
    for name, (at, end) in model.feature_index.items():
        for i in range(count):
            value = len(rows[lengths[name]][i] or []) if lengths and name in lengths else rows[name][i]
            values = value if isinstance(value, list) else [value or 0]
            x[i, at : at + len(values)] = values
            assert at + len(values) <= end
    return torch.from_numpy(x)


def scores(model, rows, lengths=None):
    with torch.no_grad():
        return model(model_input(model, rows, lengths)).numpy()[:, 0]


def check(model, tmp_path, rows=None, lengths=None):
    """Imports the live model and compares the bundle's scores from raw rows with the model's own."""
    source = deepctr_torch(randomized(model))
    rows = rows or random_rows(source.schema, {}, 200)
    own = scores(model, rows, lengths)
    assert own.std() > 1e-4
    assert np.abs(source.probabilities(Encoder(source.schema, {}).encode(rows))[:, 0] - own).max() <= 1e-5
    made = write_import(source, tmp_path / "bundle")
    assert made.parity.max_deviation <= 1e-5
    assert made.against.startswith("DeepCTR-Torch's" if source.own else "the layers of DeepCTR-Torch's")
    engine = Engine.load(tmp_path / "bundle", "cpu")
    engine.warmup()
    assert np.abs(engine.score(rows)[:, 0] - own).max() <= 1e-5
    engine.close()
    return made


MODELS = {
    "WDL": lambda a, b, **o: models.WDL(a, b, **o),
    "DeepFM": lambda a, b, **o: models.DeepFM(a, b, **o),
    "xDeepFM": lambda a, b, **o: models.xDeepFM(a, b, cin_layer_size=(6, 4), **o),
    "DCN": lambda a, b, **o: models.DCN(a, b, **o),
    "DCN-matrix": lambda a, b, **o: models.DCN(a, b, cross_parameterization="matrix", cross_num=3, **o),
    "DCNMix": lambda a, b, **o: models.DCNMix(a, b, low_rank=3, num_experts=2, **o),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(("units", "dim"), [((7,), 4), ((12, 5), 10), ((9, 8, 7), 16), ((9, 8, 7, 6), 40)])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_one_to_four_layers_of_any_dim(tmp_path, name, units, dim, batch_norm):
    found = columns(dim, shared=name != "xDeepFM")  # whose CIN counts tables, not fields: sharing breaks it in the library
    check(MODELS[name](found, found, dnn_hidden_units=units, dnn_use_bn=batch_norm), tmp_path)


def test_a_live_model_is_called_for_the_comparison_and_left_in_its_mode(tmp_path):
    model = randomized(models.DeepFM(columns(), columns(), dnn_dropout=0.5)).train()
    made = write_import(deepctr_torch(model), tmp_path / "bundle")
    assert made.against == "DeepCTR-Torch's DeepFM itself, on random rows"
    assert model.training
    source = deepctr_torch(model)
    with torch.no_grad():
        model.out.bias += 0.01
    with pytest.raises(InputError, match=r"parity: .* against DeepCTR-Torch's DeepFM itself"):
        write_import(source, tmp_path / "other")


@pytest.mark.parametrize("kinds", [{"dense": False}, {"lists": False}, {"dense": False, "lists": False}])
@pytest.mark.parametrize("name", MODELS)
def test_features_of_some_kinds_alone(tmp_path, name, kinds):
    found = columns(shared=name != "xDeepFM", **kinds)
    check(MODELS[name](found, found), tmp_path)


@pytest.mark.parametrize("name", ["WDL", "DCN", "DCN-matrix", "DCNMix"])
def test_numbers_alone(tmp_path, name):
    found = columns(sparse=False, lists=False)
    check(MODELS[name](found, found), tmp_path)


@pytest.mark.parametrize("activation", ["sigmoid", "linear", "prelu", torch.nn.Tanh, torch.nn.GELU, torch.nn.LeakyReLU])
def test_every_activation(tmp_path, activation):
    check(models.WDL(columns(), columns(), dnn_activation=activation, dnn_use_bn=True), tmp_path)


def test_the_linear_part_may_have_fewer_features_or_none(tmp_path):
    check(models.DeepFM(columns()[:3], columns()), tmp_path)
    check(models.DCN([], columns()), tmp_path / "none")
    with pytest.raises(InputError, match=r"wide: got 'n2', expected features that the deep part has too"):
        deepctr_torch(models.WDL(columns(), columns()[:-1]))


def test_lists_pooled_by_their_maximum(tmp_path):
    found = [Sparse("a", 11, 4), VarLen(Sparse("tags", 7, 4), 3, "max")]
    model = models.WDL(found, found)
    rows = random_rows(deepctr_torch(model).schema, {}, 100)
    # Of an empty list the library makes -1e9, which saturates every score; here it is zero.
    rows["tags"] = [[t for t in tags or [] if t] or [3] for tags in rows["tags"]]
    check(model, tmp_path, rows)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("activation", ["relu", "linear", "sigmoid"])
def test_forms_of_the_compressed_interaction_network(tmp_path, halves, activation):
    found = columns(shared=False)
    check(models.xDeepFM(found, found, cin_layer_size=(6, 4, 3), cin_split_half=halves, cin_activation=activation), tmp_path)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("activation", ["Dice", "relu", "prelu", "sigmoid"])
def test_din_reads_its_history_by_the_length_column(tmp_path, softmax, activation):
    found = [Sparse("user", 9, 4), Sparse("item", 13, 4), Sparse("cate", 5, 8), Dense("n0"), *[
        VarLen(Sparse(f"hist_{name}", rows, dim, embedding_name=name), 4, length_name="length")
        for name, rows, dim in (("item", 13, 4), ("cate", 5, 8))
    ]]  # fmt: skip
    model = models.DIN(found, ["item", "cate"], att_activation=activation, att_weight_normalization=softmax)
    rows = random_rows(deepctr_torch(model).schema, {}, 100)
    # A row's histories have one length. Of an empty one with softmax the library pools its padding: not so here.
    rows["hist_item"] = [items or [3] for items in rows["hist_item"]]
    rows["hist_cate"] = [[i % 5 for i in items] for items in rows["hist_item"]]
    check(model, tmp_path, rows, {"length": "hist_item"})


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: models.NFM(columns(), columns()), r"model: got 'NFM', expected one of WDL, DeepFM"),
        (lambda: torch.nn.Linear(2, 1), r"model: got 'Linear', expected a model of DeepCTR-Torch"),
        (lambda: models.WDL(columns(), columns(), task="regression"), r"settings\.task: got 'regression', expected binary"),
        (lambda: models.WDL([Dense("v", 3)], [Dense("v", 3)]), r"columns\.v\.dimension: got 3, expected 1"),
        (lambda: models.WDL(columns(), columns(), dnn_activation=torch.nn.Softplus), r"dnn: activation: got 'Softplus'"),
        (lambda: with_more(models.WDL(columns(), columns())), r"got '1 parameters left over', expected .* for extra"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_refused_by_name(make, pattern):
    with pytest.raises(InputError, match=pattern):
        deepctr_torch(make())


def with_more(model):
    model.extra = torch.nn.Parameter(torch.ones(1))
    return model


def criteo():
    """(spec features, model, raw rows as text, its scores): numbers min-maxed, 6 categories hashed to their trained ids."""
    rows = list(csv.DictReader((SAMPLES / "criteo_sample.csv").read_text().splitlines()))
    names, sizes = [f"C{i}" for i in range(1, 7)], 50
    found = [*(Sparse(n, sizes, 4) for n in names), Dense("I1"), Dense("I2")]
    model = randomized(models.DeepFM(found, found, dnn_use_bn=True))
    vocabulary = {n: {v: 2 + zlib.crc32(v.encode()) % 40 for v in {r[n] for r in rows} if v} for n in names}
    x = np.zeros((len(rows), 8), np.float32)
    for i, row in enumerate(rows):
        x[i, :6] = [vocabulary[n].get(row[n], 0) for n in names]
        x[i, 6:] = [float(row[n]) / 100 if row[n] else 0.25 for n in ("I1", "I2")]
    with torch.no_grad():
        own = model(torch.from_numpy(x)).numpy()[:, 0]
    features = [{"name": n, "vocabulary": f"{n}.json", "values": "string", "missing_id": 0, "oov_id": 1} for n in names]
    scale = [{"type": "minmax", "minimum": 0.0, "maximum": 100.0}]
    features += [{"kind": "dense", "name": n, "transforms": scale, "missing_value": 0.25} for n in ("I1", "I2")]
    return features, model, vocabulary, own


@needs_samples
def test_a_checkpoint_and_a_spec_import_with_one_command_and_score_raw_rows(tmp_path):
    features, model, vocabulary, own = criteo()
    for name, ids in vocabulary.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(ids))
    spec = {"model": "DeepFM", "features": features,
            "settings": {"task": "binary", "dnn_activation": "relu", "use_fm": True}}  # fmt: skip
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(spec))))
    torch.save(model.state_dict(), tmp_path / "deepfm.pt")
    (tmp_path / "expected.csv").write_text("score\n" + "\n".join(f"{p:.9f}" for p in own) + "\n")
    args = ["import", "deepctr-torch", str(tmp_path / "deepfm.pt"), "--spec", str(tmp_path / "spec.yaml"),
            "--golden-rows", str(SAMPLES / "criteo_sample.csv"), "--expected", str(tmp_path / "expected.csv"),
            "--label", "label", "-o", str(tmp_path / "b")]  # fmt: skip
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "AUC: source" in done.output
    del spec["settings"]["dnn_activation"]
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(spec))))
    done = CliRunner().invoke(app, [*args, "--overwrite"])
    assert done.exit_code == 1
    assert "settings.dnn_activation: got 'nothing', expected the hyper-parameter" in " ".join(done.output.split())


SAMPLE = {  # file: categories, lists and their splitter, numbers
    "criteo_sample.csv": (["C1", "C2", "C3", "C9"], {}, ["I2", "I3"]),
    "avazu_sample.csv": (["feat_1", "feat_4", "feat_10", "feat_17"], {}, []),
    "taobao_tiny_sample.csv": (["userid", "adgroup_id", "brand"], {"click_sequence": "^"}, ["price"]),
    "movielens_sample.csv": (["movie_id", "gender", "zip"], {"genres": "|"}, ["age"]),
}


@needs_samples
@pytest.mark.parametrize("file", SAMPLE)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_on_every_sample_from_raw_values(tmp_path, name, file):
    singles, lists, numbers = SAMPLE[file]
    rows = list(csv.DictReader((SAMPLES / file).read_text().splitlines()))
    found = [Sparse(n, 60, 4) for n in singles] + [VarLen(Sparse(n, 60, 4), 6) for n in lists] + [Dense(n) for n in numbers]
    model = randomized(MODELS[name](found, found, dnn_use_bn=True))

    def ident(value):
        """As a training script would encode it; 0 is missing or padding, 1 unknown."""
        return 2 + zlib.crc32(value.encode()) % 50 if value else 0

    tokens = {n: {r[n] for r in rows} for n in singles} | {
        n: {t for r in rows for t in r[n].split(s)} for n, s in lists.items()
    }
    for n, values in tokens.items():
        (tmp_path / f"{n}.json").write_text(json.dumps({v: ident(v) for v in values if v}))
    spec = spec_of(model)
    described = {"values": "string", "oov_id": 1}
    features = []
    for f in spec.features:
        if f.name in lists:
            f = f.model_copy(update=described | {"vocabulary": f"{f.name}.json", "splitter": lists[f.name], "padding_value": "",
                                                 "too_many": "keep_first"})  # fmt: skip
        elif f.name in singles:
            f = f.model_copy(update=described | {"vocabulary": f"{f.name}.json", "missing_id": 0})
        else:
            f = f.model_copy(update={"missing_value": 0.0})
        features.append(f)
    file_spec = with_vocabularies(spec.model_copy(update={"features": tuple(features)}), "spec", tmp_path)
    source = read_deepctr(file_spec, StateDict(model.state_dict(), "weights"))
    encoded = {n: [ident(r[n]) for r in rows] for n in singles} | {n: [float(r[n] or 0) for r in rows] for n in numbers}
    encoded |= {n: [[ident(t) for t in r[n].split(s) if t][:6] for r in rows] for n, s in lists.items()}
    own = scores(model, encoded)
    write_import(source, tmp_path / "b", rows=SAMPLES / file)
    engine = Engine.load(tmp_path / "b", "cpu")
    engine.warmup()
    assert np.abs(engine.score(read_rows(SAMPLES / file, source.schema, None)[0])[:, 0] - own).max() <= 1e-5
    engine.close()
