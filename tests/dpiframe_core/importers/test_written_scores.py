"""The scores that an import compares are those of an engine of the whole bundle, though only the rows read are taken."""

import numpy as np
import pytest

from dpiframe_core.engine.engine import Engine
from dpiframe_core.graph.architecture import DCNv2, DeepFM
from dpiframe_core.importers.writing import written_scores
from tests import oracle
from tests.dpiframe_core.bundle.test_library_bundles import NAMES, bundle_of
from tests.runner import small_bundle


def whole(bundle, block):
    engine = Engine(bundle, "cpu", "fp32")
    engine.warmup()
    scores = engine.submit(block)
    engine.close()
    return scores


@pytest.mark.parametrize("contexts", [1, 40])
@pytest.mark.parametrize("architecture", [DeepFM(hidden_units=(16, 8)), DCNv2(hidden_units=(8,), cross_layers=2)])
def test_scores_are_those_of_the_whole_tables(architecture, contexts, tmp_path):
    bundle = small_bundle(tmp_path / "b", architecture, bags=2, plain_numbers=2, one_hot=9,
                          first_order=isinstance(architecture, DeepFM))  # fmt: skip
    block = oracle.make_block(bundle.manifest.feature_schema, 40, contexts, np.random.default_rng(3))
    got = written_scores(tmp_path / "b", block)
    np.testing.assert_allclose(got, whole(bundle, block), rtol=0, atol=1e-6)
    assert got.std() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_every_kind_of_model_are_too(name, tmp_path):
    path, schema, *_ = bundle_of(tmp_path / "b", name)
    block = oracle.make_block(schema, 30, 30, np.random.default_rng(5))
    engine = Engine.load(path, "cpu")
    engine.warmup()
    np.testing.assert_allclose(written_scores(path, block), engine.submit(block), rtol=0, atol=1e-6)
    engine.close()


def test_more_rows_than_are_scored_at_once_come_in_their_order(tmp_path):
    bundle = small_bundle(tmp_path / "b", DeepFM(hidden_units=(8,)))
    block = oracle.make_block(bundle.manifest.feature_schema, 2500, 700, np.random.default_rng(3))
    np.testing.assert_allclose(written_scores(tmp_path / "b", block), whole(bundle, block), rtol=0, atol=1e-6)
