"""The program that computes once what rows of a context share scores as the oracle does, however many contexts a batch has."""

import numpy as np
import pytest

from dpiframe_core.engine.options import GOLDEN_TOLERANCE, EngineOptions
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep
from tests import oracle
from tests.runner import Model, small_bundle, table_tensors

MODELS = {
    "wide_deep": WideDeep(hidden_units=(24, 8)),
    "deepfm": DeepFM(hidden_units=(40, 24, 8)),
    "deepfm-1-layer": DeepFM(hidden_units=(24,)),
    "dcn": DCN(cross_layers=3, hidden_units=(24, 8)),
    "dcnv2-parallel": DCNv2(cross_layers=3, hidden_units=(24, 8)),
    "dcnv2-stacked": DCNv2(cross_layers=2, hidden_units=(24,), structure="stacked"),
}
BUCKETS = (128, 192, 520)


def random_model(architecture, seed=3):
    rng = np.random.default_rng(seed)
    schema = oracle.make_schema(one_hot=14, context=9, first_order=isinstance(architecture, WideDeep | DeepFM))
    tensors, tables = table_tensors(schema, oracle.make_tables(schema, rng))
    return schema, oracle.make_dense(schema, architecture, 1, rng), tensors, tables, rng


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_shared_contexts_score_as_the_oracle_does(name, precision, capture):
    schema, dense, tensors, tables, rng = random_model(MODELS[name])
    model = Model(
        schema, MODELS[name], dense, tensors, "cuda:0", precision=precision, shares=True, capture=capture, buckets=BUCKETS
    )
    for rows, contexts in (
        (1, 1),
        (128, 8),
        (128, 9),
        (100, 1),
        (150, 3),
        (192, 192),
        (520, 1),
        (519, 33),
        (300, 40),
        (520, 300),
    ):
        block = oracle.make_block(schema, rows, contexts, rng)
        want = oracle.scores(schema, MODELS[name], dense, tables, block)
        got = model.scores(block)
        np.testing.assert_allclose(got, want, rtol=0, atol=GOLDEN_TOLERANCE[precision])
        assert np.array_equal(model.scores(block), got), "the same bits"


@pytest.mark.gpu
def test_blocks_of_several_requests_each_have_their_contexts():
    schema, dense, tensors, tables, rng = random_model(MODELS["dcnv2-parallel"])
    model = Model(schema, MODELS["dcnv2-parallel"], dense, tensors, "cuda:0", shares=True, buckets=BUCKETS)
    for sizes in ((120, 1, 7), (300, 100, 60, 20), (1,) * 100):
        blocks = [oracle.make_block(schema, n, 1 + (n > 99), rng) for n in sizes]
        want = np.concatenate([oracle.scores(schema, MODELS["dcnv2-parallel"], dense, tables, b) for b in blocks])
        np.testing.assert_allclose(model.scores(*blocks), want, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_a_warm_up_times_shares_from_128_rows_on_and_keeps_the_fastest(tmp_path):
    from dpiframe_core.engine.engine import Engine

    bundle = small_bundle(tmp_path / "bundle", MODELS["deepfm"], one_hot=14, context=9)
    options = EngineOptions(max_batch_rows=256, buckets=(64, 128, 256), lanes=2, recall=False)
    engine = Engine(bundle, "cuda", "tf32", options)
    found = {c.bucket: c for c in engine.warmup().calibrations}
    engine.close()
    assert "shares" not in found[64].microseconds
    for bucket in (128, 256):
        assert {"waves", "shares"} <= set(found[bucket].microseconds)
        assert found[bucket].program == min(found[bucket].microseconds, key=found[bucket].microseconds.get)
