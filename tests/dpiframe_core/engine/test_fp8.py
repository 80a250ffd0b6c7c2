"""fp8: scales from what a run saw, scores near the oracle's, and a clear refusal of what it cannot do."""

import numpy as np
import pytest
import torch

from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.fp8 import MOST, check_fp8, scales_of
from dpiframe_core.engine.options import GOLDEN_TOLERANCE, EngineOptions
from dpiframe_core.errors import ConfigError, InputError
from dpiframe_core.fusion.passes import PASSES, fuse
from dpiframe_core.graph.architecture import DCN, DCNv2, DeepFM, WideDeep
from dpiframe_core.graph.placement import Matrix
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.models.build import build_graph
from tests import model_oracle, oracle
from tests.dpiframe_core.bundle.test_library_bundles import bundle_of
from tests.runner import small_bundle

MODELS = {
    "wide_deep": WideDeep(hidden_units=(40, 24)),
    "deepfm": DeepFM(hidden_units=(40, 24)),
    "dcn": DCN(cross_layers=3, hidden_units=(40, 24)),
    "dcnv2-parallel": DCNv2(cross_layers=2, hidden_units=(40, 24), structure="parallel"),
    "dcnv2-uneven": DCNv2(cross_layers=1, hidden_units=(40, 24, 16), structure="parallel"),  # its head is a launch of its own
}


def test_a_scale_leaves_room_for_four_times_what_was_seen():
    scales = scales_of({"x": 2.0, "nothing": 0.0})
    assert scales == {"x": 4 * 2.0 / MOST, "nothing": 1.0}


def test_values_of_one_matrix_have_one_scale():
    matrix = Matrix("lookup", 48, {"x0": (0, 32), "bottom": (0, 16), "numbers": (32, 48), "never written": (48, 48)})
    scales = scales_of({"x0": 1.5, "bottom": 0.5, "numbers": 2.0, "else": 1.0}, [matrix])
    assert scales == {"else": 4 * 1.0 / MOST} | dict.fromkeys(("x0", "bottom", "numbers"), 4 * 2.0 / MOST)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dcnv2-low-rank", "dcnv2-low-rank-outer-bias", "dlrm-dcnv2-16"])
def test_fp8_scores_of_low_rank_layers_stay_within_its_documented_deviation(name, tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply fp8")
    path, schema, architecture, dense, tables = bundle_of(tmp_path / "b", name)
    engine = Engine.load(path, "cuda", "fp8", max_batch_rows=64)
    engine.warmup()
    block = oracle.make_block(schema, 57, 5, np.random.default_rng(3))
    want = model_oracle.scores(schema, architecture, dense, tables, block)
    assert 0 < np.abs(engine.submit(block) - want).max() <= GOLDEN_TOLERANCE["fp8"]
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_fp8_scores_stay_within_its_documented_deviation(name, tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply fp8")
    bundle = small_bundle(tmp_path / "small", MODELS[name])
    engine, full = (Engine(bundle, "cuda", p, EngineOptions(max_batch_rows=64)) for p in ("fp8", "fp32"))
    report = engine.warmup()
    full.warmup()
    assert (report.precision, report.golden_tolerance) == ("fp8", GOLDEN_TOLERANCE["fp8"])
    block = oracle.make_block(bundle.manifest.feature_schema, 57, 5, np.random.default_rng(3))
    got, want = engine.submit(block), full.submit(block)
    assert 0 < np.abs(got - want).max() <= GOLDEN_TOLERANCE["fp8"]
    assert engine.submit(block).tobytes() == got.tobytes()
    engine.close()
    full.close()


@pytest.mark.gpu
def test_fp8_on_streams_is_refused(tmp_path):
    bundle = small_bundle(tmp_path / "small", MODELS["dcn"])
    with pytest.raises(ConfigError, match="policy: got 'breadth_first' with precision fp8, expected auto or waves"):
        Engine(bundle, "cuda", "fp8", EngineOptions(policy="breadth_first"))


def graph_without_fusion():
    return build_graph(MODELS["deepfm"], oracle.make_schema())


def test_an_operator_that_knows_no_fp8_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    check_fp8(group_waves(fuse(graph_without_fusion(), tuple(PASSES))), device)
    with pytest.raises(InputError, match=r"precision: got 'fp8', expected fp32, tf32 or bf16 for a model with x \(concat\)"):
        check_fp8(graph_without_fusion(), device)


def test_a_gpu_that_does_not_multiply_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(InputError, match=r"precision: got 'fp8', expected fp32, tf32 or bf16 on this GPU, which does not"):
        check_fp8(graph_without_fusion(), torch.device("cuda", 0))


def test_a_cpu_has_no_fp8(tmp_path):
    with pytest.raises(InputError, match="precision: got 'fp8', expected one of fp32, bf16 on cpu"):
        Engine(small_bundle(tmp_path / "small", MODELS["dcn"]), "cpu", "fp8")
