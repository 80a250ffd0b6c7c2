"""Activations behind a product: plain, packed for a CPU and in a kernel, against float64 formulas."""

import numpy as np
import pytest
import torch

from dpiframe_core.graph.architecture import LeakyReLU
from kernels import reference
from kernels.cpu import dense
from tests import model_oracle
from tests.backends import BACKENDS
from tests.kernels.lane_state import lane_state

KINDS = ["identity", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "leaky_relu", "prelu", "dice"]
PARAMS = {"prelu": ("alpha",), "dice": ("alpha", "scale", "shift")}


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 5, 3), (19, 13, 100), (64, 33, 17), (3, 7, 1100)])
def test_a_layer_applies_its_activation_to_the_product_and_bias(rows, width, out, kind, device):
    rng = np.random.default_rng(out)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (out, width), (out,)))
    p = {f"a.{name}": rng.standard_normal(out).astype(np.float32) for name in ("alpha", "scale", "shift")}
    z = x.astype(np.float64) @ w.T.astype(np.float64) + b
    own = LeakyReLU(slope=0.3) if kind == "leaky_relu" else kind
    want = model_oracle.activate(own, z, {name: v.astype(np.float64) for name, v in p.items()}, "a")
    terms = np.abs(x) @ np.abs(w).T + np.abs(b)
    steepness = (
        1 + np.abs(p["a.alpha"]) + (np.abs(z) * np.abs(p["a.scale"]) * (1 + np.abs(p["a.alpha"])) if kind == "dice" else 0)
    )
    bound = 8 * np.finfo(np.float32).eps * (terms * steepness + 1)
    params = [torch.from_numpy(p[f"a.{name}"]) for name in PARAMS.get(kind, ())]
    weights = torch.from_numpy(w), torch.from_numpy(b)
    if device == "cpu":
        plain = reference.linear(torch.from_numpy(x), *weights, kind, params, 0.3).numpy()
        assert (np.abs(plain - want) <= bound).all()
        got = dense.Linear(*weights, kind, torch.float32, params, 0.3)(torch.from_numpy(x))
    else:
        from kernels.dense.linear import Linear, matmul_precision, padded

        layer = Linear(*weights, kind, torch.float32, torch.device(device), params=params, slope=0.3)
        operand = torch.zeros(rows, padded(width), device=device)
        operand[:, :width] = torch.from_numpy(x)
        got = torch.full((rows, padded(out)), torch.nan, device=device)
        with torch.inference_mode(), matmul_precision("fp32"):
            layer(operand, got, None, lane_state(rows, device))
        assert torch.isfinite(got).all(), "pad columns must stay finite"
    assert (np.abs(got.cpu().numpy()[:, :out] - want) <= bound).all()


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation: got 'mish', expected one of identity, relu, sigmoid, tanh, gelu"):
        reference.activate_(torch.zeros(1), "mish")
