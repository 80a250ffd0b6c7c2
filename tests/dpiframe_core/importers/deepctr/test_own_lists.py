"""Models of DeepCTR-Torch and torch-rechub by a file that makes them: lists, the order of columns, what does not fit a spec."""

import numpy as np
import pytest
import torch
import yaml

from tests.dpiframe_core.importers.peers import library
from tests.dpiframe_core.importers.test_own_module import DEEPCTR, compared, files, imported

pytestmark = pytest.mark.bulk

LISTED = DEEPCTR.replace("SparseFeat\n", "SparseFeat, VarLenSparseFeat\n", 1).replace(
    ', DenseFeat("price")]', ', VarLenSparseFeat(SparseFeat("tags", 7, 4), 3, "COMBINED"), DenseFeat("price")]'
)
LISTS = [{"name": "tags", "max_values": 3, "padding_value": 0}, {"kind": "dense", "name": "price"}]


def matrix(net, rows):
    """float32[n, columns] as DeepCTR-Torch takes it."""
    parts = []
    for name, (start, end) in net.feature_index.items():
        column = np.zeros((50, end - start), np.float32)
        for i, value in enumerate(rows[name]):
            values = (value or []) if end - start > 1 else [value]
            column[i, : len(values)] = values
        parts.append(column)
    return torch.from_numpy(np.concatenate(parts, 1))


@pytest.mark.parametrize(
    ("kind", "combiner", "more"),
    [
        ("NFM", "mean", "dnn_hidden_units=(7, 5)"),
        ("WDL", "sum", "dnn_hidden_units=(7, 5)"),
        ("DIFM", "mean", "dnn_hidden_units=(7, 5), att_head_num=2"),
        ("xDeepFM", "sum", "dnn_hidden_units=(7,), cin_layer_size=(6, 4)"),
    ],
)
def test_lists_of_deepctr_torch_whose_tables_have_a_row_of_the_padding(tmp_path, kind, combiner, more):
    library("deepctr_torch.models")
    text = LISTED.replace("COMBINED", combiner).format(kind=kind, more=more)
    source, net = files(tmp_path, text, [LISTS[0] | {"pooling": "mean"}, LISTS[1]])  # as a spec by name has it: not read
    assert net.embedding_dict["tags"].weight[0].abs().min() > 0
    done = imported(tmp_path, "deepctr-torch", f"{source}:model")
    assert done.exit_code == 0, done.output
    compared(tmp_path, lambda rows: net(matrix(net, rows)))


def test_a_mixture_of_regressions_has_several_weights_of_one_column(tmp_path):
    library("deepctr_torch.models")
    text = DEEPCTR.format(kind="MLR", more=None).replace("(COLUMNS, COLUMNS, None)", "(COLUMNS, region_num=3)")
    source, net = files(tmp_path, text, LISTS[1:])
    done = imported(tmp_path, "deepctr-torch", f"{source}:model")
    assert done.exit_code == 0, done.output
    compared(tmp_path, lambda rows: net(matrix(net, rows)))


def test_the_order_of_the_spec_is_not_that_of_the_models_columns(tmp_path):
    """Else one table's ids would read another table: with sizes that fit, in silence."""
    library("deepctr_torch.models")
    text = DEEPCTR.format(kind="NFM", more="dnn_hidden_units=(7, 5)").replace("10, 4)", "20, 4)")
    source, net = files(tmp_path, text, LISTS[1:])
    spec = yaml.safe_load((tmp_path / "spec.yaml").read_text())
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec | {"features": spec["features"][::-1]}))
    done = imported(tmp_path, "deepctr-torch", f"{source}:model")
    assert done.exit_code == 0, done.output
    compared(tmp_path, lambda rows: net(matrix(net, rows)))


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (LISTS[1:], "spec.yaml: features: got 'none of tags', expected the columns of the model that --source makes: user, ad"),
        (
            [*LISTS, {"name": "more"}],
            "features: got 'more', expected the columns of the model that --source makes: user, ad, tags",
        ),
        ([LISTS[0] | {"max_values": 4}, LISTS[1]], "tags.max_values: got 4, expected 3, as many as the model's column has"),
    ],
)
def test_a_spec_of_other_columns_than_the_models_is_refused_by_name(tmp_path, features, said):
    library("deepctr_torch.models")
    source, _ = files(tmp_path, LISTED.replace("COMBINED", "sum").format(kind="WDL", more=""), features)
    assert said in " ".join(imported(tmp_path, "deepctr-torch", f"{source}:model").output.split())


def test_a_column_of_lengths_is_refused_with_what_to_do(tmp_path):
    library("deepctr_torch.models")
    text = LISTED.replace('"COMBINED"', '"sum", length_name="long"').format(kind="WDL", more="")
    source, _ = files(tmp_path, text, LISTS)
    said = " ".join(imported(tmp_path, "deepctr-torch", f"{source}:model").output.split())
    assert "--source: length_name of 'tags': got 'long', expected none: 0 behind a list says its length, too" in said


RECHUB_LISTS = """
from torch_rechub.basic.features import SequenceFeature, SparseFeature
from torch_rechub.models.ranking import {kind}

A, B = [SparseFeature("user", 20, 4)], [SparseFeature("ad", 10, 4)]
L = [SequenceFeature("seen", 10, 4, pooling="{pooling}", shared_with="ad")]


def model():
    return {kind}({more})
"""


@pytest.mark.parametrize(
    ("kind", "pooling", "more"),
    [
        ("DIN", "concat", "A, L, B, {'dims': [8]}, {'dims': [6], 'use_softmax': True}"),
        ("BST", "concat", "A, L, B, {'dims': [8], 'activation': 'relu'}, nhead=2"),
        ("DeepFM", "mean", "A + B + L, A + B + L, {'dims': [8], 'activation': 'dice'}"),
        ("DCNv2", "sum", "A + B + L, 2, {'dims': [8]}, model_structure='stacked', low_rank=3, num_experts=2"),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of torch about its BST
def test_lists_of_torch_rechub_without_a_padding_idx(tmp_path, kind, pooling, more):
    """Its default. Then the padding's row is read like any other; and its DCNv2 takes no single row."""
    library("torch_rechub.models.ranking")
    shared = {"name": "seen", "table": "ad", "max_values": 4, "padding_value": 0}
    source, net = files(tmp_path, RECHUB_LISTS.format(kind=kind, pooling=pooling, more=more), [shared])
    done = imported(tmp_path, "torch-rechub", f"{source}:model")
    assert done.exit_code == 0, done.output

    def own(rows):
        padded = [[*(ids or []), 0, 0, 0, 0][:4] for ids in rows["seen"]]
        return net({name: torch.tensor(rows[name]) for name in ("user", "ad")} | {"seen": torch.tensor(padded)})

    compared(tmp_path, own)
