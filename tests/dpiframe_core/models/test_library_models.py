"""xDeepFM, DIN, DLRM, DLRM-DCNv2 and the forms of DCN-V2 against a float64 oracle from their papers, fused and not, on both
backends; and every activation, in every place that may have one.
"""

import numpy as np
import pytest

from dpiframe_core.engine.options import GOLDEN_TOLERANCE
from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.architecture import DIN, DLRM, DCNv2, DLRMDCNv2, LeakyReLU, TargetAttention, WideDeep, XDeepFM
from dpiframe_core.models.build import build_graph
from tests import model_oracle, oracle
from tests.backends import BACKENDS
from tests.runner import Model, table_tensors


def unit(**options):
    return TargetAttention(**{"targets": ("c0",), "sequences": ("s0",), "hidden_units": (16, 5), **options})


CASES = {
    "xdeepfm": (XDeepFM(cin_units=(6, 4), hidden_units=(24, 8)), {"first_order": True}),
    "xdeepfm-halves": (
        XDeepFM(cin_units=(6, 4, 3), cin_halves=True, cin_activation="relu", hidden_units=(9,)),
        {"first_order": True, "numbers": 2, "embedded_numbers": 2, "buckets": 2},
    ),
    "xdeepfm-cin-only": (XDeepFM(cin_units=(5,), hidden_units=()), {"first_order": True, "dim": 10}),
    "din": (DIN(attention=(unit(),), hidden_units=(24, 8), activation="dice"), {"sequences": (7,), "numbers": 1}),
    "din-softmax": (
        DIN(attention=(unit(activation="prelu", softmax=True),), hidden_units=(16,)),
        {"sequences": (50,), "dim": 10},
    ),
    "din-no-mask": (
        DIN(attention=(unit(activation="sigmoid", masked=False, output_activation="sigmoid"),), hidden_units=(8,)),
        {"sequences": (3,), "dim": 4},
    ),
    "din-two-units": (
        DIN(
            attention=(
                unit(activation="relu", hidden_units=(8,)),
                unit(targets=("c1",), sequences=("s1",), activation=LeakyReLU(slope=0.2), softmax=True),
            ),
            hidden_units=(8,),
        ),
        {"sequences": (5, 33)},
    ),
    "din-two-fields": (
        DIN(attention=(unit(targets=("c0", "c1"), sequences=("s0", "t0")),), hidden_units=(8,), activation="prelu"),
        {"sequences": (9,), "pairs": 2, "embedded_numbers": 1, "buckets": 1, "numbers": 1},
    ),
    "dlrm": (DLRM(bottom_units=(12, 8), hidden_units=(20, 6)), {"numbers": 3, "embedded_numbers": 1, "buckets": 1}),
    "dlrm-itself": (DLRM(bottom_units=(10,), hidden_units=(), self_interaction=True), {"numbers": 1, "dim": 10}),
    "dlrm-dcnv2": (DLRMDCNv2(bottom_units=(12, 8), cross_layers=2, rank=5, hidden_units=(16,)), {"numbers": 4}),
    "dlrm-dcnv2-full": (DLRMDCNv2(bottom_units=(8,), cross_layers=2, hidden_units=(16,)), {"numbers": 4}),
    "dlrm-dcnv2-16": (
        DLRMDCNv2(bottom_units=(24, 16), cross_layers=3, rank=16, hidden_units=(40, 24), activation="gelu_tanh"),
        {"numbers": 13, "dim": 16},
    ),
    "dcnv2-crossnet-only": (DCNv2(structure="crossnet_only", cross_layers=3), {"numbers": 2}),
    "dcnv2-both": (
        DCNv2(structure="stacked_parallel", cross_layers=2, hidden_units=(16, 8), parallel_hidden_units=(7,)),
        {"embedded_numbers": 2, "buckets": 1, "numbers": 1},
    ),
    "dcnv2-low-rank": (DCNv2(structure="parallel", cross_layers=2, rank=3, hidden_units=(16,)), {}),
    "dcnv2-outer-bias": (DCNv2(cross_layers=3, outer_bias=True, hidden_units=(16, 8), activation="gelu"), {"numbers": 1}),
    "dcnv2-low-rank-outer-bias": (
        DCNv2(cross_layers=2, rank=5, outer_bias=True, hidden_units=(16,), activation="prelu", structure="stacked"),
        {},
    ),
    "dcnv2-mixture": (DCNv2(structure="stacked", cross_layers=2, rank=3, experts=4, hidden_units=(16,)), {"dim": 10}),
    "dcnv2-one-expert": (DCNv2(structure="crossnet_only", cross_layers=1, rank=8, experts=1), {}),
    "numbers-only": (DCNv2(structure="parallel", cross_layers=1, hidden_units=(5,)), {"one_hot": 0, "numbers": 6}),
}


def random_model(architecture, tasks=1, seed=0, **schema_options):
    rng = np.random.default_rng(seed)
    schema = model_oracle.make_schema(**schema_options)
    tensors, tables = table_tensors(schema, oracle.make_tables(schema, rng))
    dense = model_oracle.make_dense(build_graph(architecture, schema, tasks).params, rng)
    if isinstance(architecture, DCNv2) and architecture.experts:
        model_oracle.block_diagonal(dense, architecture.experts, architecture.rank)
    return schema, dense, tensors, tables, rng


def check(name, device, *, sizes=((1, 1), (2, 1), (19, 3), (64, 64)), atol=1e-5, seed=0, tasks=1, options=None, **run):
    architecture, own = CASES[name]
    schema, dense, tensors, tables, rng = random_model(architecture, tasks, seed, **own | (options or {}))
    model = Model(schema, architecture, dense, tensors, device, tasks=tasks, **run)
    for rows, contexts in sizes:
        block = oracle.make_block(schema, rows, contexts, rng)
        want = model_oracle.scores(schema, architecture, dense, tables, block)
        np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=atol)
        assert want.std() > 1e-3 or rows < 19, "an oracle that answers the same for all proves nothing"


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_scores_match_the_float64_oracle(name, device):
    check(name, device)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_narrow_mlp_and_dots_as_one_launch_score_as_the_oracle_does(precision, capture):
    run = {"precision": precision, "tower": True, "capture": capture, "buckets": (1, 16, 64, 2400)}
    check("dlrm", "cuda:0", sizes=((1, 1), (19, 3), (64, 64), (2391, 7)), atol=GOLDEN_TOLERANCE[precision], **run)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_dlrm_of_few_rows_is_a_chain(precision, capture):
    run = {"precision": precision, "chain": True, "capture": capture, "buckets": (1, 3, 8)}
    check("dlrm", "cuda:0", sizes=((1, 1), (2, 1), (3, 2), (7, 7), (1, 1)), atol=GOLDEN_TOLERANCE[precision], **run)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("left_out", [*PASSES, "all"])
@pytest.mark.parametrize("name", CASES)
def test_scores_do_not_depend_on_fusion(name, left_out, device):
    passes = () if left_out == "all" else tuple(p for p in PASSES if p != left_out)
    check(name, device, sizes=((21, 2),), seed=3, passes=passes)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("dim", [1, 4, 10, 16, 40])
@pytest.mark.parametrize("name", ["xdeepfm-cin-only", "din", "din-two-fields", "dcnv2-mixture"])
def test_any_embedding_dim_is_exact(name, dim, device):
    check(name, device, sizes=((37, 5),), seed=dim, options={"dim": dim})


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ["xdeepfm", "din-softmax", "dlrm"])
def test_half_precision_tables_are_read_exactly(name, device):
    check(name, device, sizes=((37, 5),), options={"dtype": "bfloat16"})


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ["xdeepfm", "din", "dlrm", "dcnv2-both"])
def test_several_tasks_have_a_score_each(name, device):
    if name == "xdeepfm":
        pytest.skip("a first-order term is one logit, which does not go with several tasks")
    check(name, device, sizes=((9, 2),), tasks=3)


@pytest.mark.gpu
@pytest.mark.parametrize("left_out", [None, *PASSES])
@pytest.mark.parametrize("name", CASES)
def test_waves_score_as_the_oracle_does(name, left_out):
    passes = tuple(p for p in PASSES if p != left_out)
    sizes = tuple((rows, 1 + rows // 20) for rows in (1, 2, 19, 64, 65, 200))
    check(name, "cuda:0", sizes=sizes, seed=8, waves=True, passes=passes, buckets=(1, 16, 64, 200))


@pytest.mark.gpu
@pytest.mark.parametrize("waves", [False, True])
@pytest.mark.parametrize(("precision", "atol"), [("tf32", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("name", CASES)
def test_lower_precisions_stay_within_their_documented_deviation(name, precision, atol, waves):
    check(name, "cuda:0", sizes=((64, 4), (1, 1)), precision=precision, atol=atol, waves=waves)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "atol"), [("fp32", 1e-5), ("tf32", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize("name", ["dcnv2-low-rank", "dcnv2-outer-bias", "dcnv2-low-rank-outer-bias"])
def test_a_chain_scores_layers_of_low_rank_as_the_oracle_does(name, precision, atol):
    sizes = tuple((rows, min(rows, 2)) for rows in (*range(1, 9), 3, 1, 8))
    check(name, "cuda:0", sizes=sizes, atol=atol, seed=2, precision=precision, buckets=(1, 2, 4, 8), chain=True)


KINDS = ["relu", "sigmoid", "tanh", "identity", "gelu", "gelu_tanh", "prelu", "dice", LeakyReLU(slope=0.3)]


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_activation_is_exact_in_an_mlp(kind, fused, device):
    architecture = DLRM(bottom_units=(7, 8), hidden_units=(13, 5), activation=kind)
    schema, dense, tensors, tables, rng = random_model(architecture, numbers=2)
    model = Model(schema, architecture, dense, tensors, device, passes=tuple(PASSES) if fused else ())
    for rows in (1, 33):
        block = oracle.make_block(schema, rows, 1, rng)
        want = model_oracle.scores(schema, architecture, dense, tables, block)
        np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_activation_is_exact_in_an_attention_unit(kind, device):
    architecture = DIN(attention=(unit(activation=kind),), hidden_units=(8,))
    schema, dense, tensors, tables, rng = random_model(architecture, sequences=(6,))
    block = oracle.make_block(schema, 33, 3, rng)
    want = model_oracle.scores(schema, architecture, dense, tables, block)
    got = Model(schema, architecture, dense, tensors, device).scores(block)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
def test_each_layer_may_have_its_own_activation(device):
    architecture = DCNv2(cross_layers=1, hidden_units=(9, 8, 7), activation=("dice", "identity", LeakyReLU(slope=0.5)))
    schema, dense, tensors, tables, rng = random_model(architecture)
    block = oracle.make_block(schema, 33, 3, rng)
    want = model_oracle.scores(schema, architecture, dense, tables, block)
    got = Model(schema, architecture, dense, tensors, device).scores(block)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_fusion_leaves_one_lookup_and_one_head(name):
    architecture, options = CASES[name]
    schema = model_oracle.make_schema(**options)
    ops = [n.op for n in fuse(build_graph(architecture, schema)).nodes]
    assert ops.count("lookup") == 1
    assert ops[-1] == "head"
    assert not {"activation", "mul", "sum", "bias"} & set(ops)


def test_an_empty_history_has_no_interest():
    architecture, options = CASES["din-softmax"]
    schema, dense, tensors, tables, rng = random_model(architecture, **options)
    model = Model(schema, architecture, dense, tensors, "cpu")
    block = oracle.make_block(schema, 4, 1, rng)
    block.column(schema.columns["s0"])[:] = 255  # all ones: padding
    other = {k: v * (2 if k == "attention.0.out.weight" else 1) for k, v in dense.items()}
    got = model.scores(block)
    np.testing.assert_allclose(got, model_oracle.scores(schema, architecture, dense, tables, block), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(got, Model(schema, architecture, other, tensors, "cpu").scores(block))


WRONG = {
    "a target that is a sequence": (unit(targets=("s0",)), r"attention.targets: got 's0', expected .* that is no sequence"),
    "a sequence that is none": (unit(sequences=("c1",)), r"attention.sequences: got 'c1', expected .* pooling 'none'"),
    "an unknown feature": (unit(targets=("nobody",)), r"attention.targets: got 'nobody', expected a feature with a table"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_attention_unit_that_does_not_fit_the_schema_is_refused(name):
    wrong, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        build_graph(DIN(attention=(wrong,), hidden_units=(4,)), model_oracle.make_schema(sequences=(5,)))


def test_a_sequence_that_no_unit_reads_is_refused():
    with pytest.raises(ValueError, match=r"features.s1: got 0 attention units that read it, expected 1"):
        build_graph(DIN(attention=(unit(),), hidden_units=(4,)), model_oracle.make_schema(sequences=(5, 6)))


def test_dlrm_without_numbers_or_with_another_width_is_refused():
    with pytest.raises(ValueError, match=r"dlrm: got 0 plain numbers and widths \[8\], expected some and one width"):
        build_graph(DLRM(bottom_units=(8,), hidden_units=(4,)), model_oracle.make_schema())
    with pytest.raises(ValueError, match=r"dlrm: got 2 plain numbers and widths \[8, 9\], expected some and one width"):
        build_graph(DLRM(bottom_units=(9,), hidden_units=(4,)), model_oracle.make_schema(numbers=2))


def test_as_many_activations_as_layers_are_expected():
    wide = WideDeep(hidden_units=(4, 4), activation=("relu",))
    with pytest.raises(ValueError, match="activation: got 1, expected one for all or for each of the 2 layers"):
        build_graph(wide, model_oracle.make_schema(first_order=True))
