"""torch-rechub itself against what is imported of it: its ranking models, random weights, random rows."""

import numpy as np
import pytest
import torch

from dpiframe_core.engine.engine import Engine
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.importers.model_spec import DenseFeature, SparseFeature, Spec, with_vocabularies
from dpiframe_core.importers.raw_rows import random_rows
from dpiframe_core.importers.rechub import read_rechub
from dpiframe_core.importers.state_dict import StateDict
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.peers import Later, randomized

pytestmark = pytest.mark.bulk

ranking, features = Later("torch_rechub.models.ranking"), Later("torch_rechub.basic.features")


def given(dim=4):
    sparse = [
        features.SparseFeature("a", 11, dim),
        features.SparseFeature("b", 5, dim),
        features.SparseFeature("c", 5, dim, shared_with="b"),
        features.SequenceFeature("s", 7, dim, pooling="mean", padding_idx=0),
    ]
    return sparse, [features.DenseFeature("n0"), features.DenseFeature("n1")]


def spec_feature(f):
    if isinstance(f, features.DenseFeature):
        return DenseFeature(name=f.name)
    if isinstance(f, features.SequenceFeature):
        return SparseFeature(name=f.name, max_values=3, pooling=f.pooling, padding_value=0)
    return SparseFeature(name=f.name, table=f.shared_with)


def check(model, name, used, tmp_path, **spec):
    file = with_vocabularies(Spec(model=name, features=tuple(map(spec_feature, used)), **spec), "spec")
    source = read_rechub(file, StateDict(randomized(model, embeddings=0.5).state_dict(), "weights"))
    rows = random_rows(source.schema, {}, 150)
    x = {f.name: torch.tensor(padded(rows[f.name], f)) for f in used}
    with torch.no_grad():
        own = model(x).numpy()
    assert own.std() > 1e-4
    assert np.abs(source.probabilities(Encoder(source.schema, {}).encode(rows))[:, 0] - own).max() <= 1e-5
    write_import(source, tmp_path / "b")
    engine = Engine.load(tmp_path / "b", "cpu")
    engine.warmup()
    assert np.abs(engine.score(rows)[:, 0] - own).max() <= 1e-5
    engine.close()


def padded(column, f):
    if isinstance(f, features.SequenceFeature):
        return [(list(v or []) + [0] * 3)[:3] for v in column]
    return [v or 0 for v in column]


ACTIVATIONS = ["relu", "prelu", "sigmoid", "leakyrelu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dims", [[7], [12, 5, 6]])
def test_wide_and_deep_of_different_features(tmp_path, activation, dims):
    sparse, dense = given()
    for i, (wide, deep) in enumerate([(dense, sparse), (sparse, [*sparse, *dense]), ([*dense, sparse[0]], sparse)]):
        model = ranking.WideDeep(wide, deep, {"dims": dims, "activation": activation, "dropout": 0.2})
        names = {"wide": tuple(f.name for f in wide), "deep": tuple(f.name for f in deep)}
        check(model, "WideDeep", [*sparse, *dense], tmp_path / str(i), settings={"activation": activation}, **names)


@pytest.mark.parametrize("dim", [4, 10, 16, 40])
def test_deepfm_whose_deep_part_has_the_numbers(tmp_path, dim):
    sparse, dense = given(dim)
    for i, deep in enumerate([dense, [*dense, *sparse]]):
        model = ranking.DeepFM(deep, sparse, {"dims": [9, 5], "activation": "relu"})
        names = {"wide": tuple(f.name for f in sparse), "deep": tuple(f.name for f in deep)}
        check(model, "DeepFM", [*dense, *sparse], tmp_path / str(i), settings={"activation": "relu"}, **names)


def test_dcn(tmp_path):
    used = [*given()[1], *given()[0]]
    model = ranking.DCN(used, n_cross_layers=3, mlp_params={"dims": [9, 5], "activation": "relu"})
    check(model, "DCN", used, tmp_path, settings={"activation": "relu"})


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("structure", ["crossnet_only", "stacked", "parallel"])
def test_dcnv2_whose_bias_stands_outside_the_product(tmp_path, structure, mixture):
    used = [*given()[0], *given()[1]]
    model = ranking.DCNv2(
        used, 2, {"dims": [9, 5], "activation": "relu"}, model_structure=structure, use_low_rank_mixture=mixture,
        low_rank=3, num_experts=2,
    )  # fmt: skip
    settings = {"model_structure": structure} | ({} if structure == "crossnet_only" else {"activation": "relu"})
    check(model, "DCNv2", used, tmp_path, settings=settings)


def test_what_has_no_form_here_is_refused_by_name():
    sparse, dense = given()
    model = ranking.WideDeep(dense, sparse, {"dims": [4], "activation": "dice"})
    used = tuple(map(spec_feature, [*sparse, *dense]))

    def refused(pattern, name="WideDeep", **spec):
        with pytest.raises(InputError, match=pattern):
            read_rechub(with_vocabularies(Spec(model=name, features=used, **spec), "spec"), StateDict(model.state_dict(), "w"))

    parts = {"wide": ("n0", "n1"), "deep": tuple(f.name for f in sparse)}
    refused(r"spec: model: got 'DIN', expected one of WideDeep", "DIN")
    refused(r"spec: wide: got 'nothing', expected the features of the wide part")
    refused(r"settings\.activation: got 'dice', expected one of none", settings={"activation": "dice"}, **parts)
    refused(r"settings\.activation: got 'nothing', expected the hyper-parameter", **parts)
    refused(r"w: mlp\.mlp\.2\.weight: got 'no such parameter', expected it, beside mlp\.mlp\.2\.alpha", **parts,
            settings={"activation": "relu"})  # fmt: skip
    refused(r"spec: wide: got 'x', expected one of the features", wide=("x",), deep=("a",))
