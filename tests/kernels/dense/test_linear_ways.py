"""The ways in which a linear layer on a GPU can be computed: which there are, and that all give the same."""

import shutil

import numpy as np
import pytest
import torch

from kernels.dense import linear
from tests.kernels.lane_state import lane_state

EPS = np.finfo(np.float32).eps


@pytest.mark.parametrize(
    ("compiler", "named", "builds"), [("gcc", "", True), ("clang", "", True), ("tcc", "", False), ("", "cc", True)]
)
def test_triton_is_offered_only_where_it_finds_a_c_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, named: str, builds: bool
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
    monkeypatch.setenv("CC", named)
    linear.triton_builds.cache_clear()
    try:
        assert linear.triton_builds() is builds
        assert ("no C compiler" in caplog.text) is not builds
    finally:
        linear.triton_builds.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("cross", ["", "cross", "outer bias"])
@pytest.mark.parametrize("activation", ["relu", "identity", "tanh"])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 5, 3), (19, 429, 100), (64, 624, 624)])
def test_every_way_to_compute_a_linear_layer_gives_the_same_result(rows, width, out, activation, cross, tf32):
    from kernels.dense.linear import Linear, matmul_precision, padded

    if cross and (width != out or activation != "identity"):
        pytest.skip("a cross layer is square and has no activation")
    rng = np.random.default_rng(rows)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (out, width), (out,)))
    product = x.astype(np.float64) @ w.T.astype(np.float64) + b
    act = {"relu": lambda z: np.maximum(z, 0), "identity": lambda z: z, "tanh": np.tanh}[activation]
    terms = np.abs(x) @ np.abs(w).T + np.abs(b)
    want = act(product)
    if cross:
        outside = b - x * b if cross == "outer bias" else 0.0
        want, terms = x * product + outside + x, np.abs(x) * terms + np.abs(outside) + np.abs(x)
    bound = 8 * EPS * terms
    layer = Linear(
        torch.from_numpy(w), torch.from_numpy(b), activation, torch.float32, torch.device("cuda", 0), cross=bool(cross),
        outer_bias=cross == "outer bias", tf32=tf32,
    )  # fmt: skip
    operand = torch.zeros(rows, padded(width), device="cuda")
    operand[:, :width] = torch.from_numpy(x)
    precision = "tf32" if tf32 else "fp32"
    if tf32:  # 10 fraction bits of each factor
        bound = 4 * 2.0**-11 * terms
    with torch.inference_mode(), matmul_precision(precision):
        result = torch.full((rows, padded(out)), torch.nan, device="cuda")
        ways = layer.ways(operand, result, operand if cross else None, lane_state(rows, "cuda"))
        by_triton = sum(name.startswith("triton") for name in ways)
        assert len(ways) - by_triton == (2 if cross else 4)
        assert (by_triton > 0) == (tf32 and activation != "tanh")
        for run in ways.values():
            result.fill_(torch.nan)
            run()
            assert (np.abs(result[:, :out].cpu().numpy() - want) <= bound).all()
            assert torch.isfinite(result).all(), "pad columns must stay finite"


@pytest.mark.gpu
def test_tritons_ways_compile_side_by_side_before_they_are_timed(monkeypatch, tmp_path):
    import triton

    from kernels.dense.linear import TRITON, Linear, matmul_precision

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[bool] = []  # whether it was asked for ahead of a launch
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *args, is_manual_warmup, **kwargs: compiled.append(is_manual_warmup)
    )
    rows, width = 64, 328  # no other test's width
    layer = Linear(torch.randn(width, width), torch.zeros(width), "relu", torch.bfloat16, torch.device("cuda", 0))
    x, out = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    with torch.inference_mode(), matmul_precision("bf16"):
        layer.tune({}, x, out, None, lane_state(rows, "cuda"))
        ways = layer.ways(x, out, None, lane_state(rows, "cuda"))
        for run in ways.values():
            run()
    assert compiled
    assert compiled == [True] * sum(name.startswith(TRITON) for name in ways)


@pytest.mark.gpu
def test_of_many_rows_tritons_ways_are_none_and_no_choice_is_rough():
    from kernels.dense.linear import TRITON, Linear, matmul_precision
    from kernels.dense.linear_triton import MOST_ROWS

    layer = Linear(torch.randn(16, 16), torch.zeros(16), "relu", torch.bfloat16, torch.device("cuda", 0))
    rows = 2 * MOST_ROWS
    x, out = (torch.randn(rows, 16, device="cuda").bfloat16() for _ in range(2))
    with torch.inference_mode(), matmul_precision("bf16"):
        few, many = (layer.ways(x[:n], out[:n], None, lane_state(n, "cuda")) for n in (MOST_ROWS, rows))
        assert any(name.startswith(TRITON) for name in few)
        assert not any(name.startswith(TRITON) for name in many)
        layer.tune({}, x, out, None, lane_state(rows, "cuda"), brief=True)
    assert rows not in layer.rough
