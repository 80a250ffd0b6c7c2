"""FM, cross networks and head: each kernel and its plain twin against float64 formulas, within the project's tolerance policy:
a float32 sum is within 8 * eps * sum|terms| of the float64 one.
"""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu import dense
from tests.backends import BACKENDS

EPS = np.finfo(np.float32).eps


def put(array, device, pad=0):
    """float32 on the device, in rows padded by `pad` columns of NaN that nothing may read."""
    t = torch.full((array.shape[0], array.shape[1] + pad), torch.nan, device=device)
    t[:, : array.shape[1]] = torch.from_numpy(array.astype(np.float32))
    return t


def state(rows, device):
    return torch.tensor([rows, 0, 0, 7], dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("rows", [1, 7, 129])
@pytest.mark.parametrize(("fields", "dim"), [(1, 1), (2, 3), (39, 16), (26, 10), (5, 31), (4, 32), (3, 33), (13, 128)])
def test_fm_is_the_sum_of_all_pairwise_products(fields, dim, rows, device):
    rng = np.random.default_rng(fields * dim)
    offset = 5
    x = rng.standard_normal((rows, offset + fields * dim)).astype(np.float32)
    v = x[:, offset:].astype(np.float64).reshape(rows, fields, dim)
    want = sum((v[:, i] * v[:, j]).sum(1) for i in range(fields) for j in range(i))
    terms = (np.abs(v).sum(1) ** 2 + (v**2).sum(1)).sum(1)
    if device == "cpu":
        got = reference.fm(put(x, device), offset, fields, dim)
    else:
        from kernels.interaction.interaction import fm

        got = torch.full((rows, 1), torch.nan, device=device)
        fm(state(rows, device), put(x, device, pad=3), rows, offset, fields, dim, got)
    assert (np.abs(got.cpu().numpy()[:, 0] - want) <= 8 * EPS * terms).all()


def float64_cross(x, w, b):
    xl = x = x.astype(np.float64)
    for wi, bi in zip(w.astype(np.float64), b.astype(np.float64), strict=True):
        xl = x * (xl @ wi)[:, None] + bi + xl
    return xl


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("layers", [1, 2, 6, 32])
@pytest.mark.parametrize("width", [1, 31, 624])
def test_all_dcn_layers_at_once_equal_the_layers_one_by_one(width, layers, device):
    rng = np.random.default_rng(layers)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((19, width), (layers, width), (layers, width)))
    w /= 4 * width**0.5
    want = float64_cross(x, w, b)
    bound = 64 * EPS * np.abs(want).max()
    if device == "cpu":
        plain = reference.cross_v1(*map(torch.from_numpy, (x, w, b)))
        np.testing.assert_allclose(plain.numpy(), want, rtol=0, atol=bound)
        got = dense.CrossV1(torch.from_numpy(w), torch.from_numpy(b), None)(torch.from_numpy(x))
    else:
        from kernels.interaction.interaction import CrossV1

        got = torch.full((19, width), torch.nan, device=device)
        cross = CrossV1(torch.from_numpy(w), torch.from_numpy(b), None, torch.float32, torch.device(device))
        cross(state(19, device), put(x, device, pad=1), 19, got)
    # The recurrence multiplies rounding errors, so the bound is relative to the largest intermediate value.
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=0, atol=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("tasks", [1, 3])
def test_the_folded_dcn_head_equals_the_cross_output_times_the_head(tasks):
    from kernels.interaction.interaction import CrossV1

    rng = np.random.default_rng(tasks)
    shapes = ((33, 100), (4, 100), (4, 100), (tasks, 100))
    x, w, b, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    w /= 40
    want = float64_cross(x, w, b) @ v.astype(np.float64).T
    got = torch.full((33, tasks), torch.nan, device="cuda")
    cross = CrossV1(*map(torch.from_numpy, (w, b, v)), torch.float32, torch.device("cuda", 0))
    cross(state(33, "cuda"), put(x, "cuda"), 33, got)
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=0, atol=64 * EPS * np.abs(want).max())


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("rows", [1, 8, 9, 130])
@pytest.mark.parametrize("widths", [(), (1,), (256,), (624, 256)])
def test_the_head_joins_parts_and_logits(widths, rows, tasks, device):
    rng = np.random.default_rng(rows)
    parts = [rng.standard_normal((rows, w)) for w in widths]
    logits = [rng.standard_normal((rows, w)) for w in (1, tasks)]
    columns = [sum(widths[:i]) for i in range(len(widths))]
    weight, bias = rng.standard_normal((tasks, sum(widths) + 2)) / 16, rng.standard_normal(tasks)
    rounded = [a.astype(np.float32).astype(np.float64) for a in (weight, bias, *parts, *logits)]
    w64, b64, p64, l64 = rounded[0], rounded[1], rounded[2 : 2 + len(parts)], rounded[2 + len(parts) :]
    z = b64 + sum(l64) + sum(p @ w64[:, c : c + p.shape[1]].T for p, c in zip(p64, columns, strict=True))
    t = [torch.from_numpy(a).float() for a in (weight, bias)]
    if device == "cpu":
        values = [put(p, device) for p in parts], [put(v, device) for v in logits]
        plain = reference.head(values[0], columns, values[1], *t)
        np.testing.assert_allclose(plain.numpy(), 1 / (1 + np.exp(-z)), rtol=0, atol=1e-5)
        got = dense.Head(*t, list(zip(columns, widths, strict=True)))(*values[0], *values[1])
    else:
        from kernels.dense.head import Head

        head = Head(t[0], t[1], torch.float32, torch.device(device))
        got = torch.full((rows, tasks), torch.nan, device=device)
        placed = [(put(p, device, pad=2), p.shape[1], c) for p, c in zip(parts, columns, strict=True)]
        done = torch.zeros(-(-rows // 8), dtype=torch.int32).pin_memory()
        head(state(rows, device), placed, [put(v, device) for v in logits], rows, got, done)
        torch.cuda.synchronize()
        assert (done == 7).all()
    np.testing.assert_allclose(got.cpu().numpy(), 1 / (1 + np.exp(-z)), rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("cross", [False, True])
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
    want = x * product + x if cross else act(product)
    terms = np.abs(x) @ np.abs(w).T + np.abs(b)
    bound = 8 * EPS * (np.abs(x) * terms + np.abs(x) if cross else terms)
    layer = Linear(
        torch.from_numpy(w), torch.from_numpy(b), activation, torch.float32, torch.device("cuda", 0), cross=cross, tf32=tf32
    )
    operand = torch.zeros(rows, padded(width), device="cuda")
    operand[:, :width] = torch.from_numpy(x)
    precision = "tf32" if tf32 else "fp32"
    if tf32:  # 10 fraction bits of each factor
        bound = 4 * 2.0**-11 * (np.abs(x) * terms + np.abs(x) if cross else terms)
    with torch.inference_mode(), matmul_precision(precision):
        result = torch.full((rows, padded(out)), torch.nan, device="cuda")
        ways = layer.ways(operand, result, operand if cross else None, state(rows, "cuda"))
        by_triton = sum(name.startswith("triton") for name in ways)
        assert len(ways) - by_triton == (2 if cross else 4)
        assert (by_triton > 0) == (tf32 and activation != "tanh")
        for run in ways.values():
            result.fill_(torch.nan)
            run()
            assert (np.abs(result[:, :out].cpu().numpy() - want) <= bound).all()
            assert torch.isfinite(result).all(), "pad columns must stay finite"
