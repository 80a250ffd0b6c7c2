"""Whole models over histories through `compile`, a bundle on disk and an engine, against the module in float64."""

from functools import cache

import pytest
import torch

from dpiframe_core import compile as compile_module
from tests.dpiframe_core.compiler.history_models import HOURS, MODELS, example, schema
from tests.dpiframe_core.compiler.modules import called, randomised
from tests.dpiframe_core.compiler.served import exact, served, served_scores

pytestmark = pytest.mark.bulk

GPU_ONLY = [pytest.param("cuda:0", policy, marks=pytest.mark.gpu) for policy in ("waves", "regions", "sequential")]


@cache
def compiled_of(name):
    """The module and what it was compiled to; neither is to be changed."""
    module = randomised(MODELS[name](), seed=3)
    return module, compile_module(module, schema(), example(23))


@pytest.mark.parametrize(("device", "policy"), [("cpu", "auto"), *GPU_ONLY])
@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_scores_as_the_module_did(name, device, policy, tmp_path):
    module, compiled = compiled_of(name)
    compiled.write(tmp_path / "b", name=name)
    with served(tmp_path / "b", device, policy=policy) as scores:
        for rows in (1, 19, 64):  # the first row's history is empty
            values = example(rows, seed=rows)
            got = scores(values)
            torch.testing.assert_close(got.double(), exact(module, values), rtol=0, atol=1e-5)
    assert got.std() > 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("name", ["sasrec", "caser"])  # which choose by no value: a rounding may change what is largest
def test_lower_precisions_stay_near(name, precision, tolerance, tmp_path):
    module, compiled = compiled_of(name)
    compiled.write(tmp_path / "b", name=name)
    got = served_scores(tmp_path / "b", example(64, seed=5), "cuda:0", precision)
    torch.testing.assert_close(got.double(), exact(module, example(64, seed=5)), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_history_has_its_part_in_the_scores_and_the_padding_has_none(name):
    module, _ = compiled_of(name)
    values = example(23)
    empty = values | {"hist": torch.zeros_like(values["hist"])}
    apart = (called(module, values, {}) - called(module, empty, {})).abs().flatten()
    there = (values["hist"] != 0).any(1)
    assert (apart[there] > 1e-5).all()
    assert (apart[~there] == 0).all()


def test_one_hot_of_ids_is_a_table_and_of_buckets_a_small_one():
    _, compiled = compiled_of("sasrec")
    assert torch.equal(compiled.tables["hour"], torch.eye(HOURS))
    assert "age.weight" in compiled.dense
