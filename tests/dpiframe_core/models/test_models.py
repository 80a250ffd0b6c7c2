"""Every model's scores against a float64 oracle written from its paper, on both backends, fused and not."""

import numpy as np
import pytest

from dpiframe_core.fusion.passes import PASSES
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep
from dpiframe_core.graph.schedule import depth_first, sequential
from dpiframe_core.models.build import build_graph
from kernels.cpu.dense import has_bf16
from tests import oracle
from tests.backends import BACKENDS
from tests.runner import Model, table_tensors

MODELS = {
    "wide_deep": WideDeep(hidden_units=(24, 8)),
    "deepfm": DeepFM(hidden_units=(33, 7)),
    "dcn": DCN(cross_layers=3, hidden_units=(24, 8)),
    "dcn-1-layer": DCN(cross_layers=1, hidden_units=(5,), activation="tanh"),
    "dcnv2-parallel": DCNv2(cross_layers=2, hidden_units=(24, 8)),
    "dcnv2-stacked": DCNv2(cross_layers=3, hidden_units=(24,), structure="stacked", activation="sigmoid"),
}


def random_model(architecture, seed=0, **schema_options):
    rng = np.random.default_rng(seed)
    first = isinstance(architecture, WideDeep | DeepFM)
    schema = oracle.make_schema(first_order=first, **schema_options)
    tensors, tables = table_tensors(schema, oracle.make_tables(schema, rng))
    dense = oracle.make_dense(schema, architecture, 1, rng)
    return schema, dense, tensors, tables, rng


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_match_the_float64_oracle(name, device):
    schema, dense, tensors, tables, rng = random_model(MODELS[name])
    model = Model(schema, MODELS[name], dense, tensors, device)
    for rows, contexts in ((1, 1), (2, 1), (19, 3), (64, 64)):
        block = oracle.make_block(schema, rows, contexts, rng)
        want = oracle.scores(schema, MODELS[name], dense, tables, block)
        np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("dim", [1, 3, 4, 10, 16, 40])
@pytest.mark.parametrize("name", ["deepfm", "dcn", "dcnv2-parallel"])
def test_any_embedding_dim_is_exact(name, dim, device):
    schema, dense, tensors, tables, rng = random_model(MODELS[name], seed=dim, dim=dim, bags=2)
    model = Model(schema, MODELS[name], dense, tensors, device)
    block = oracle.make_block(schema, 37, 5, rng)
    want = oracle.scores(schema, MODELS[name], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("left_out", [*PASSES, "all"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_fusion(name, left_out, device):
    schema, dense, tensors, tables, rng = random_model(MODELS[name], seed=3, plain_numbers=0 if name == "deepfm" else 3)
    passes = () if left_out == "all" else tuple(p for p in PASSES if p != left_out)
    model = Model(schema, MODELS[name], dense, tensors, device, passes=passes)
    block = oracle.make_block(schema, 16, 2, rng)
    want = oracle.scores(schema, MODELS[name], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("policy", [sequential, depth_first])
@pytest.mark.parametrize("capture", [True, False])
def test_scores_do_not_depend_on_the_schedule(policy, capture, device):
    schema, dense, tensors, tables, rng = random_model(MODELS["dcnv2-parallel"], seed=4)
    model = Model(schema, MODELS["dcnv2-parallel"], dense, tensors, device, policy=policy, capture=capture)
    block = oracle.make_block(schema, 33, 2, rng)
    want = oracle.scores(schema, MODELS["dcnv2-parallel"], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("dim", [3, 10, 16])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", ("int8", "float32"), ("float16", "int8", "bfloat16")])
def test_tables_of_any_dtypes_are_read_exactly(dtype, dim, device):
    schema, dense, tensors, tables, rng = random_model(MODELS["deepfm"], dim=dim, dtype=dtype, first_dtype=dtype, bags=2)
    model = Model(schema, MODELS["deepfm"], dense, tensors, device)
    block = oracle.make_block(schema, 40, 4, rng)
    want = oracle.scores(schema, MODELS["deepfm"], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 1e-3), ("bf16", 1e-2)])
@pytest.mark.parametrize(("name", "tasks"), [*((name, 1) for name in MODELS), ("dcn", 3), ("dcnv2-parallel", 3)])
def test_a_chain_scores_few_rows_as_the_float64_oracle_does(name, tasks, precision, tolerance):
    schema, _, tensors, tables, rng = random_model(MODELS[name], seed=5)
    dense = oracle.make_dense(schema, MODELS[name], tasks, rng)
    buckets = (1, 2, 4, 8)
    model = Model(schema, MODELS[name], dense, tensors, "cuda:0", precision=precision, tasks=tasks, buckets=buckets, chain=True)
    for rows in (*range(1, 9), 3, 1, 8):
        block = oracle.make_block(schema, rows, min(rows, 2), rng)
        want = oracle.scores(schema, MODELS[name], dense, tables, block)
        np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=tolerance)


@pytest.mark.gpu
def test_int8_tables_at_a_lower_precision_stay_within_its_deviation():
    schema, dense, tensors, tables, rng = random_model(MODELS["dcnv2-parallel"], dtype=("int8", "float16"))
    model = Model(schema, MODELS["dcnv2-parallel"], dense, tensors, "cuda:0", precision="bf16")
    block = oracle.make_block(schema, 64, 4, rng)
    want = oracle.scores(schema, MODELS["dcnv2-parallel"], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-2)


CPU_BF16 = pytest.mark.skipif(not has_bf16(), reason="this processor only emulates bfloat16")


@pytest.mark.parametrize(
    ("device", "precision", "passes", "waves", "tolerance"),
    [
        pytest.param("cuda:0", "tf32", tuple(PASSES), False, 1e-3, marks=pytest.mark.gpu, id="cuda-tf32"),
        pytest.param("cuda:0", "bf16", tuple(PASSES), False, 1e-2, marks=pytest.mark.gpu, id="cuda-bf16"),
        pytest.param("cuda:0", "tf32", tuple(PASSES), True, 1e-3, marks=pytest.mark.gpu, id="cuda-tf32-waves"),
        pytest.param("cuda:0", "bf16", tuple(PASSES), True, 1e-2, marks=pytest.mark.gpu, id="cuda-bf16-waves"),
        pytest.param("cpu", "bf16", tuple(PASSES), False, 1e-2, marks=CPU_BF16, id="cpu-bf16"),
        pytest.param("cpu", "bf16", (), False, 1e-2, marks=CPU_BF16, id="cpu-bf16-unfused"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_lower_precisions_stay_within_their_documented_deviation(name, device, precision, passes, waves, tolerance):
    schema, dense, tensors, tables, rng = random_model(MODELS[name])
    model = Model(schema, MODELS[name], dense, tensors, device, precision=precision, passes=passes, waves=waves)
    for rows, contexts in ((64, 4), (1, 1)):
        block = oracle.make_block(schema, rows, contexts, rng)
        want = oracle.scores(schema, MODELS[name], dense, tables, block)
        got = model.scores(block)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@CPU_BF16
@pytest.mark.parametrize("name", MODELS)
def test_bf16_on_a_cpu_is_not_fp32_by_another_name(name):
    schema, dense, tensors, _, rng = random_model(MODELS[name])
    block = oracle.make_block(schema, 64, 4, rng)
    got, full = (Model(schema, MODELS[name], dense, tensors, "cpu", precision=p).scores(block) for p in ("bf16", "fp32"))
    assert np.abs(got - full).max() > 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("left_out", [None, *PASSES])
@pytest.mark.parametrize("name", MODELS)
def test_waves_score_as_the_oracle_does(name, left_out, capture):
    schema, dense, tensors, tables, rng = random_model(MODELS[name], seed=8, dim=10)
    passes = tuple(p for p in PASSES if p != left_out)
    buckets = (1, 16, 64, 200)
    model = Model(schema, MODELS[name], dense, tensors, "cuda:0", waves=True, capture=capture, passes=passes, buckets=buckets)
    for rows in (1, 2, 19, 64, 65, 200):
        block = oracle.make_block(schema, rows, 1 + rows // 20, rng)
        want = oracle.scores(schema, MODELS[name], dense, tables, block)
        np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
def test_ids_out_of_range_read_the_oov_row_and_are_counted(device):
    schema, dense, tensors, tables, rng = random_model(MODELS["deepfm"], seed=5)
    model = Model(schema, MODELS["deepfm"], dense, tensors, device)
    block = oracle.make_block(schema, 50, 3, rng, wild=True)
    want = oracle.scores(schema, MODELS["deepfm"], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)
    assert model.out_of_range > 0


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ["dcn", "dcnv2-parallel", "dcnv2-stacked"])
def test_a_model_of_plain_numbers_needs_no_table(name, device):
    schema, dense, tensors, tables, rng = random_model(MODELS[name], one_hot=0, bags=0, embedded_numbers=0, plain_numbers=5)
    model = Model(schema, MODELS[name], dense, tensors, device)
    block = oracle.make_block(schema, 20, 3, rng)
    want = oracle.scores(schema, MODELS[name], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("name", ["wide_deep", "deepfm"])
def test_one_feature_alone_makes_a_model(name, device):
    schema, dense, tensors, tables, rng = random_model(MODELS[name], one_hot=1, context=0, bags=0, embedded_numbers=0)
    model = Model(schema, MODELS[name], dense, tensors, device)
    block = oracle.make_block(schema, 20, 1, rng)
    want = oracle.scores(schema, MODELS[name], dense, tables, block)
    np.testing.assert_allclose(model.scores(block), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", BACKENDS)
def test_joined_requests_score_as_they_do_alone(device):
    schema, dense, tensors, _, rng = random_model(MODELS["dcn"], seed=6)
    model = Model(schema, MODELS["dcn"], dense, tensors, device)
    blocks = [oracle.make_block(schema, rows, contexts, rng) for rows, contexts in ((3, 1), (20, 4), (1, 1))]
    together = model.scores(*blocks)
    alone = np.concatenate([model.scores(b) for b in blocks])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


BOTH_ON_A_GPU = [pytest.param("cuda:0", waves, marks=pytest.mark.gpu) for waves in (False, True)]


@pytest.mark.parametrize(("device", "waves"), [("cpu", False), *BOTH_ON_A_GPU])
def test_several_tasks_have_a_score_each(device, waves):
    rng = np.random.default_rng(0)
    architecture = MODELS["dcnv2-stacked"]
    schema = oracle.make_schema(first_order=False)
    tensors, tables = table_tensors(schema, oracle.make_tables(schema, rng))
    dense = oracle.make_dense(schema, architecture, 3, rng)
    block = oracle.make_block(schema, 9, 2, rng)
    got = Model(schema, architecture, dense, tensors, device, tasks=3, waves=waves).scores(block)
    np.testing.assert_allclose(got, oracle.scores(schema, architecture, dense, tables, block), rtol=0, atol=1e-5)


def test_deepfm_without_first_order_tables_is_refused_by_name():
    with pytest.raises(ValueError, match="expected at least one for a first-order term"):
        build_graph(MODELS["deepfm"], oracle.make_schema(first_order=False))


def test_fm_over_tables_of_different_dims_is_refused():
    schema = oracle.make_schema()
    odd = schema.model_copy(update={"tables": (schema.tables[0].model_copy(update={"dim": 8}), *schema.tables[1:])})
    with pytest.raises(ValueError, match=r"got table dims \[8, 16\], expected one dim"):
        build_graph(MODELS["deepfm"], odd)
