"""Models of FuxiCTR and DeepCTR-Torch without code of their own here, compiled: their scores against the library's forward."""

import warnings

import pytest
import torch

from dpiframe_core import compile as compile_model
from dpiframe_core.features.schema import FeatureSchema, Numeric, Table
from tests.dpiframe_core.compiler.modules import categorical, example, randomised
from tests.dpiframe_core.compiler.served import served

pytestmark = pytest.mark.bulk

REASON = "needs {}: pip install 'dpiframe[test-peers]'"


def library(name):
    """The library, or a skip with the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs, at import
        return pytest.importorskip(name, reason=REASON.format(name), exc_type=ImportError)


def paired(names, options, sizes):
    """Each of the options at one of the sizes, each size with some of them. That any dim compiles is tested in test_modules."""
    sizes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [
        pytest.param(o, *sizes[i % len(sizes)], id=f"{sizes[i % len(sizes)][0]}-{name}")
        for i, (name, o) in enumerate(zip(names, options, strict=True))
    ]


def agrees(module, schema, tmp_path, **options):
    """Compiles a module and holds the served scores of fresh rows, in batches of several sizes, against its own forward."""
    compiled = compile_model(module, schema, example(schema, 37, seed=1), **options)
    compiled.write(tmp_path / "bundle", name="peer")
    with served(tmp_path / "bundle") as scores:
        for rows, seed in ((1, 2), (19, 3), (64, 4)):
            fresh = example(schema, rows, seed)
            matrix = torch.stack([v.float() for v in fresh.values()], 1)
            with torch.no_grad():
                found = module(matrix if options.get("call") == "matrix" else fresh)
            want = (found["y_pred"] if isinstance(found, dict) else found).reshape(rows, 1)
            assert rows == 1 or want.std() > 1e-3, "scores that are all alike would prove nothing"
            torch.testing.assert_close(scores(fresh), want, rtol=0, atol=1e-5)
    return compiled


ROWS = {"user": 40, "item": 23, "cate": 6}


def fuxictr_parts(dim, *, numbers=True, wide=False, context=()):
    """FuxiCTR's feature map and the schema of the same features; `context`: features that a gate embeds once more."""
    library("fuxictr")
    from tests.dpiframe_core.compiler.fuxictr_models import feature_map

    specs, features, tables = {}, [], []
    for name, rows in ROWS.items():
        specs[name] = {"type": "categorical", "source": "", "vocab_size": rows, "padding_idx": 0}
        features.append(categorical(name, name, f"{name}_w" if wide else None))
        tables.append(Table(name=name, rows=rows, dim=dim * (1 + context.count(name))))
    for name in ("age", "price") if numbers else ():
        specs[name] = {"type": "numeric", "source": ""}
        features.append(Numeric(name=name, table=name, first_order_table=f"{name}_w" if wide else None))
        tables.append(Table(name=name, rows=1, dim=dim))
    first = [Table(name=f.first_order_table, rows=t.rows, dim=1) for f, t in zip(features, tables, strict=True) if wide]
    return feature_map(specs, dim), FeatureSchema(features=tuple(features), tables=(*tables, *first))


@pytest.mark.parametrize(
    ("options", "dim"),
    paired(
        ["plain", "norms", "wide", "deep"],
        [
            {},
            {"batch_norm": True, "layer_norm": True, "use_scale": True},
            {"use_wide": True, "heads": 1, "layers": 1, "hidden": ()},
            {"use_residual": False, "layers": 3, "hidden": (9, 7, 5, 3)},
        ],
        [4, 10],
    ),
)
def test_autoint_scores_as_fuxictr(options, dim, tmp_path):
    features, schema = fuxictr_parts(dim, wide=options.get("use_wide", False))
    from tests.dpiframe_core.compiler.fuxictr_models import AutoInt

    agrees(randomised(AutoInt(features, dim, **options)), schema, tmp_path)


@pytest.mark.parametrize(
    ("options", "dim", "numbers"),
    paired(
        ["serial", "parallel", "no-norms", "one-block"],
        [
            {},
            {"parallel": 3, "hidden": (8, 4)},
            {"emb_norm": False, "net_norm": False, "ratio": 2, "activation": "tanh"},
            {"parallel": 1, "net_norm": False, "ratio": 0.5, "hidden": (7,)},
        ],
        [(10, True), (16, False)],
    ),
)
def test_masknet_scores_as_fuxictr(options, dim, numbers, tmp_path):
    features, schema = fuxictr_parts(dim, numbers=numbers)
    from tests.dpiframe_core.compiler.fuxictr_models import MaskNet

    agrees(randomised(MaskNet(features, dim, **options)), schema, tmp_path)


@pytest.mark.parametrize(
    ("options", "dim"),
    paired(
        ["learnt-gates", "heads", "no-gates", "gates-by-features"],
        [
            {},
            {"batch_norm": True, "heads": 4, "hidden1": (16, 8), "hidden2": (8,)},
            {"use_fs": False, "hidden2": (12, 10, 6), "heads": 2},
            {"fs1_context": ("user",), "fs2_context": ("item", "user"), "activation": "LeakyReLU"},
        ],
        [4, 40],
    ),
)
def test_finalmlp_scores_as_fuxictr(options, dim, tmp_path):
    features, schema = fuxictr_parts(dim, context=(*options.get("fs1_context", ()), *options.get("fs2_context", ())))
    from tests.dpiframe_core.compiler.fuxictr_models import FinalMLP

    agrees(randomised(FinalMLP(features, dim, **options)), schema, tmp_path)


@pytest.mark.parametrize("dim", [4, 10])
def test_products_that_a_mask_selects_score_as_fuxictr(dim, tmp_path):
    features, schema = fuxictr_parts(dim)
    from tests.dpiframe_core.compiler.fuxictr_models import PNN

    model = PNN(features, dim)
    mask = model.inner_product_layer.triu_mask
    masked = mask.clone()
    agrees(randomised(model), schema, tmp_path)
    assert model.inner_product_layer.triu_mask is mask, "a trace leaves a module's parameters as they were"
    assert torch.equal(mask, masked)


def deepctr_columns(dim, *, numbers=True):
    """DeepCTR-Torch's feature columns and the schema of the same features: one matrix of all of them, in this order."""
    library("deepctr_torch")
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat(name, rows, embedding_dim=dim) for name, rows in ROWS.items()]
    features = [categorical(name, name, f"{name}_w") for name in ROWS]
    tables = [Table(name=name, rows=rows, dim=dim) for name, rows in ROWS.items()]
    tables += [Table(name=f"{name}_w", rows=rows, dim=1) for name, rows in ROWS.items()]
    if numbers:
        columns += [DenseFeat("age", 1), DenseFeat("price", 1)]
        features += [Numeric(name="age"), Numeric(name="price")]
    return columns, FeatureSchema(features=tuple(features), tables=tuple(tables))


@pytest.mark.parametrize(
    ("options", "dim", "numbers"),
    paired(
        ["plain", "dropout", "deep"],
        [{}, {"dnn_hidden_units": (9,), "bi_dropout": 0.5}, {"dnn_hidden_units": (16, 8, 4, 2), "dnn_activation": "prelu"}],
        [(4, True), (10, False), (40, True)],
    ),
)
def test_nfm_scores_as_deepctr_torch(options, dim, numbers, tmp_path):
    columns, schema = deepctr_columns(dim, numbers=numbers)
    from deepctr_torch.models import NFM

    agrees(randomised(NFM(columns, columns, **options)), schema, tmp_path, call="matrix")


@pytest.mark.parametrize(
    ("options", "dim"),
    paired(
        ["plain", "one layer", "wide"],
        [{}, {"conv_kernel_width": (2,), "conv_filters": (3,)}, {"conv_kernel_width": (3, 9), "conv_filters": (5, 2)}],
        [4, 10],
    ),
)
def test_ccpm_scores_as_deepctr_torch(options, dim, tmp_path):
    """Convolutions over the fields, k-max pooling by value."""
    columns, schema = deepctr_columns(dim, numbers=False)
    from deepctr_torch.models import CCPM

    compiled = agrees(randomised(CCPM(columns, columns, **options)), schema, tmp_path, call="matrix")
    assert "aten.topk" in str(compiled.graph)


@pytest.mark.parametrize(
    ("options", "dim", "numbers"),
    paired(
        ["plain", "small"],
        [
            {"ltl_hidden_size": 12, "afn_dnn_hidden_units": (16, 8)},
            {"ltl_hidden_size": 5, "afn_dnn_hidden_units": (9,), "dnn_dropout": 0.3},
        ],
        [(4, True), (10, False)],
    ),
)
def test_afn_scores_as_deepctr_torch(options, dim, numbers, tmp_path):
    columns, schema = deepctr_columns(dim, numbers=numbers)
    from deepctr_torch.models import AFN

    agrees(randomised(AFN(columns, columns, **options)), schema, tmp_path, call="matrix")
