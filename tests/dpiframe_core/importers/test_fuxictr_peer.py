"""FuxiCTR itself against what is imported of it: random weights in its own layers, its own feature processor on real samples.

Every import here compares the bundle's scores, from raw rows, with the library's, and fails if one is off by more than 1e-5.
"""

import copy

import numpy as np
import pytest
import torch

from dpiframe_core.engine.engine import Engine
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.raw_rows import read_rows
from dpiframe_core.importers.writing import write_import
from tests.dpiframe_core.importers.peers import SAMPLES, Later, needs_samples

zoo = Later("tests.dpiframe_core.importers.fuxi_zoo")

pytestmark = [needs_samples, pytest.mark.bulk]

LABEL = {"name": "label", "dtype": "float"}


def numbers(*names, **options):
    return {"name": list(names), "active": True, "dtype": "float", "type": "numeric", "fill_na": 0, **options}


def texts(*names, **options):
    return {"name": list(names), "active": True, "dtype": "str", "type": "categorical", **options}


CRITEO = [
    numbers(*(f"I{i}" for i in range(1, 7)), normalizer="StandardScaler"),
    numbers("I7", "I8", normalizer="MinMaxScaler", fill_na=3),
    texts(*(f"C{i}" for i in range(1, 9))),
    texts("C9", min_categr_count=5),
]
CRITEO_NUMBERS = [numbers(*(f"I{i}" for i in range(1, 7)), normalizer="StandardScaler")]
CRITEO_TEXTS = [texts(*(f"C{i}" for i in range(1, 6)))]
AVAZU = [{"name": [f"feat_{i}" for i in range(1, 9)], "active": True, "dtype": "int", "type": "categorical"}]
SEQUENCE = {
    "name": "click_sequence", "active": True, "dtype": "str", "type": "sequence", "splitter": "^", "max_len": 3,
    "padding": "pre", "share_embedding": "adgroup_id",
}  # fmt: skip
TAOBAO = [texts("userid", "adgroup_id", "brand", "cate_id"), numbers("price", normalizer="MinMaxScaler"), SEQUENCE]
MOVIELENS = [
    texts("gender", "zip", "occupation"),
    {"name": "genres", "active": True, "dtype": "str", "type": "sequence", "splitter": "|", "max_len": 4, "padding": "post",
     "feature_encoder": "layers.MaskedSumPooling()"},
]  # fmt: skip
DATA = {
    "criteo": ("criteo_sample.csv", CRITEO, LABEL),
    "criteo-numbers": ("criteo_sample.csv", CRITEO_NUMBERS, LABEL),
    "criteo-texts": ("criteo_sample.csv", CRITEO_TEXTS, LABEL),
    "avazu": ("avazu_sample.csv", AVAZU, LABEL),
    "taobao": ("taobao_tiny_sample.csv", TAOBAO, {"name": "clk", "dtype": "float"}),
    "movielens": ("movielens_sample.csv", MOVIELENS, {"name": "rating", "dtype": "float"}),
}
MODELS = ("DeepFM", "WideDeep", "xDeepFM", "DCN", "DCNv2")
TARGET = {"din_target_field": "adgroup_id", "din_sequence_field": "click_sequence"}


def check(folder, data, model, columns=None, **settings):
    """Imports a run of the model and returns what was written."""
    file, own, label = DATA[data]
    run = zoo.make_run(folder / "run", SAMPLES / file, copy.deepcopy(columns or own), label, model, **settings)
    source = fuxictr(find_files(run))
    known = write_import(source, folder / "bundle", rows=run / "test.csv", expected=run / "expected.csv", label=None)
    alone = write_import(source, folder / "alone", rows=run / "test.csv")
    assert known.parity.max_deviation <= 1e-5
    assert alone.parity.max_deviation <= 1e-5
    assert abs(source.probabilities(zoo_block(source, run)) - 0.5).max() > 1e-4  # the model says something
    return known


def zoo_block(source, run):
    return Encoder(source.schema, source.vocabularies).encode(read_rows(run / "test.csv", source.schema, None)[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_every_sample_scores_as_the_library(tmp_path, data, model):
    made = check(tmp_path, data, model)
    assert made.parity.rows >= 20


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layers", "dim"), [(1, 4), (2, 10), (3, 16), (4, 40)])
@pytest.mark.parametrize("model", MODELS)
def test_one_to_four_layers_of_any_dim_with_batch_norm_and_dropout(tmp_path, model, layers, dim):
    units = [13, 8, 11, 5][:layers]
    check(
        tmp_path, "criteo", model, embedding_dim=dim, hidden_units=units, dnn_hidden_units=units,
        parallel_dnn_hidden_units=units, num_cross_layers=layers, cin_hidden_units=units, batch_norm=True, net_dropout=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "GELU", "LeakyReLU", "PReLU", "dice", None])
def test_every_activation(tmp_path, activation):
    check(tmp_path, "criteo-texts", "DeepFM", hidden_activations=activation, batch_norm=activation == "PReLU")


def test_layers_may_differ_in_activation(tmp_path):
    made = check(tmp_path, "criteo-texts", "DCN", dnn_activations=["relu", "tanh"])
    assert made.manifest.architecture.activation == ("relu", "tanh")


@pytest.mark.parametrize("structure", ["stacked", "parallel", "stacked_parallel", "crossnet_only"])
@pytest.mark.parametrize("mixture", [False, True])
def test_every_structure_of_dcnv2(tmp_path, structure, mixture):
    check(tmp_path, "criteo", "DCNv2", model_structure=structure, use_low_rank_mixture=mixture, batch_norm=True)


@pytest.mark.parametrize("model", ["DCN", "xDeepFM"])
def test_without_a_deep_part(tmp_path, model):
    check(tmp_path, "criteo-texts", model, dnn_hidden_units=[])


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("activation", ["Dice", "ReLU", "PReLU", "sigmoid"])
def test_din_with_and_without_softmax(tmp_path, softmax, activation):
    columns = copy.deepcopy(TAOBAO)
    columns[2]["feature_encoder"] = None
    check(tmp_path, "taobao", "DIN", columns, din_use_softmax=softmax, attention_hidden_activations=activation,
          attention_hidden_units=[8, 5], dnn_activations="Dice", **TARGET)  # fmt: skip


def test_din_of_two_fields_in_one_unit(tmp_path):
    columns = copy.deepcopy(TAOBAO)
    columns[2]["feature_encoder"] = None
    columns.append(dict(columns[2], name="click_sequence_2", share_embedding="cate_id"))
    file = tmp_path / "taobao.csv"
    lines = (SAMPLES / "taobao_tiny_sample.csv").read_text().splitlines()
    file.write_text("\n".join(f"{line},{line.rsplit(',', 1)[1] if i else 'click_sequence_2'}" for i, line in enumerate(lines)))
    run = zoo.make_run(
        tmp_path / "run", file, columns, {"name": "clk", "dtype": "float"}, "DIN",
        din_target_field=[["adgroup_id", "cate_id"]], din_sequence_field=[["click_sequence", "click_sequence_2"]],
    )  # fmt: skip
    made = write_import(fuxictr(find_files(run)), tmp_path / "b", rows=run / "test.csv", expected=run / "expected.csv")
    assert made.parity.max_deviation <= 1e-5


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("dim", [4, 10, 16, 40])
def test_dlrm(tmp_path, batch_norm, dim):
    check(tmp_path, "criteo", "DLRM", embedding_dim=dim, batch_norm=batch_norm)


@pytest.mark.parametrize("model", ["DeepFM", "DCN"])
def test_numbers_cut_into_buckets_by_the_criteo_processor(tmp_path, model):
    columns = [
        {"name": [f"I{i}" for i in range(1, 14)], "active": True, "dtype": "float", "type": "categorical", "fill_na": 0,
         "preprocess": "convert_to_bucket"},
        *CRITEO_TEXTS,
    ]  # fmt: skip
    check(tmp_path, "criteo", model, columns, processor_class=zoo.criteo.CustomizedFeatureProcessor)


@pytest.mark.parametrize("model", MODELS)
def test_random_rows_of_every_kind_of_value(tmp_path, model):
    """Values that samples have not: large, tiny and negative numbers, spaces, signs, other scripts, no value."""
    rng = np.random.default_rng(5)
    file, rows = tmp_path / "random.csv", []
    words = ["a", "B", " b", "0", "00", "1.0", "__PAD__", "__OOV__", "naïve", "语言", "None", "nan", "^", ""]
    for _ in range(150):
        numbers_ = ["" if rng.random() < 0.2 else repr(float(v)) for v in rng.standard_normal(3) * [1, 1e3, 1e-3]]
        rows.append(
            [str(rng.integers(2)), *numbers_, *rng.choice(words, 3), "^".join(rng.choice(words[:6], rng.integers(0, 5)))]
        )
    file.write_text("label,I1,I2,I3,C1,C2,C3,S\n" + "".join(",".join(row) + "\n" for row in rows))
    columns = [
        numbers("I1", "I2", normalizer="StandardScaler"), numbers("I3", fill_na=-1),
        texts("C1", "C2"), texts("C3", fill_na="none"),
        {"name": "S", "active": True, "dtype": "str", "type": "sequence", "splitter": "^", "max_len": 3, "padding": "pre"},
    ]  # fmt: skip
    run = zoo.make_run(tmp_path / "run", file, columns, LABEL, model)
    made = write_import(fuxictr(find_files(run)), tmp_path / "b", rows=run / "test.csv", expected=run / "expected.csv")
    assert made.parity.max_deviation <= 1e-5
    assert made.parity.auc is not None


def test_a_single_row_scores_as_in_a_batch_where_the_library_squeezes_it_away(tmp_path):
    """CrossNetMix ends in `squeeze()`: of a batch of one row its result has no batch any more."""
    mix = zoo.layers.CrossNetMix(6, 1, low_rank=2, num_experts=2)
    assert mix(torch.ones(2, 6)).shape == (2, 6)
    assert mix(torch.ones(1, 6)).shape == (6,)
    check(tmp_path, "criteo-texts", "DCNv2", use_low_rank_mixture=True)
    engine = Engine.load(tmp_path / "bundle", "cpu")
    engine.warmup()
    columns, _ = read_rows(tmp_path / "run" / "test.csv", engine.schema, None)
    batch = engine.score(columns)
    one = engine.score({name: values[:1] for name, values in columns.items()})
    engine.close()
    assert one.shape == (1, 1)
    assert abs(one[0, 0] - batch[0, 0]) <= 1e-6
