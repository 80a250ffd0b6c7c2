"""The layers of a CPU against float64 formulas: packed products and their fallback, single rows, both precisions."""

import itertools

import numpy as np
import pytest
import torch

from kernels.cpu import dense
from kernels.cpu.dense import CrossV1, Head, Layers, Linear, has_bf16
from kernels.runtime.c_build import cpu_library

F32, BF16 = torch.float32, torch.bfloat16
EPS = np.finfo(np.float32).eps
ACTIVATIONS = {
    "identity": lambda z: z, "relu": lambda z: np.maximum(z, 0), "tanh": np.tanh, "sigmoid": lambda z: 1 / (1 + np.exp(-z))
}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request, monkeypatch):
    """oneDNN's packed products, where this torch has them, and torch's own."""
    if request.param and not dense._packs():
        pytest.skip("this torch has no packed products")
    monkeypatch.setattr(dense, "_packs", lambda: request.param)


def draw(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("width", "out"), [(1, 1), (5, 3), (429, 100), (624, 1024)])
@pytest.mark.parametrize("rows", [1, 2, 19, 129])
def test_a_linear_layer_is_exact_to_float32(rows, width, out, activation, biased):
    rng = np.random.default_rng(rows)
    x, weight, bias = draw(rng, rows, width), draw(rng, out, width), draw(rng, out) if biased else None
    got = Linear(weight, bias, activation, F32)(x)
    x64, w64, b64 = (t.double().numpy() for t in (x, weight, torch.zeros(out) if bias is None else bias))
    terms = np.abs(x64) @ np.abs(w64).T + np.abs(b64)
    assert got.dtype == F32
    assert (np.abs(got.numpy() - ACTIVATIONS[activation](x64 @ w64.T + b64)) <= 8 * EPS * (terms + 1)).all()


@pytest.mark.skipif(not has_bf16(), reason="this processor only emulates bfloat16")
@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("rows", [1, 2, 19, 129])
def test_a_bfloat16_layer_rounds_its_operands_and_result_alone(rows):
    """A single row's bias and result are float32, and without a compiler its weights too."""
    rng = np.random.default_rng(rows)
    x, weight, bias = draw(rng, rows, 100), draw(rng, 42, 100), draw(rng, 42)
    got = Linear(weight, bias, "relu", BF16)(x.bfloat16())
    exact = rows == 1
    x64, b64 = (t.double().numpy() for t in (x.bfloat16(), bias if exact else bias.bfloat16()))
    w64 = (weight if exact and cpu_library() is None else weight.bfloat16()).double().numpy()
    want = np.maximum(x64 @ w64.T + b64, 0)
    terms = np.abs(x64) @ np.abs(w64).T + np.abs(b64)
    assert got.dtype == (F32 if exact else BF16)
    assert (np.abs(got.double().numpy() - want) <= 8 * EPS * terms + (0 if exact else 2.0**-8) * want).all()


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
@pytest.mark.parametrize(("width", "out"), [(1, 1), (15, 7), (16, 4), (429, 1001), (2048, 600)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_a_row_times_weights_of_bfloat16_is_exact_to_float32(width, out, activation, biased):
    """On any processor: of widths that lanes, and outputs that threads do not divide."""
    rng = np.random.default_rng(width)
    x, weight, bias = draw(rng, 1, width), draw(rng, out, width), draw(rng, out) if biased else None
    got = Linear(weight, bias, activation, BF16)(x)
    x64, w64, b64 = (t.double().numpy() for t in (x, weight.bfloat16(), torch.zeros(out) if bias is None else bias))
    terms = np.abs(x64) @ np.abs(w64).T + np.abs(b64)
    assert got.dtype == F32
    assert (np.abs(got.numpy() - ACTIVATIONS[activation](x64 @ w64.T + b64)) <= 8 * EPS * (terms + 1)).all()


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
def test_a_row_that_is_not_the_layers_is_refused_and_a_bias_may_lie_anywhere():
    rng = np.random.default_rng(0)
    weight, biases, x = draw(rng, 8, 5), draw(rng, 8, 3), draw(rng, 1, 5)
    layer = Linear(weight, biases[:, 1], "identity", BF16)
    torch.testing.assert_close(layer(x), Linear(weight, biases[:, 1].contiguous(), "identity", BF16)(x), rtol=0, atol=0)
    for wrong in ((draw(rng, 1, 4), None), (x, draw(rng, 1)), (x, biases[:, 1])):
        with pytest.raises(ValueError, match=r"layer: got x .*, expected \(1, 5\) and \(8,\)"):
            layer(*wrong)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("rows", [1, 64])
def test_fp32_is_not_silently_less(rows):
    """Products whose exact value neither bfloat16 nor tf32 can hold."""
    value = 1 + 2.0**-12
    got = Linear(torch.full((64, 64), value), None, "identity", F32)(torch.eye(64)[:rows])
    assert (got == value).all()


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_same_rows_give_the_same_bits(rows):
    rng = np.random.default_rng(rows)
    layer, x = Linear(draw(rng, 1024, 624), draw(rng, 1024), "relu", F32), draw(rng, rows, 624)
    first = layer(x)
    assert all(torch.equal(layer(x.clone()), first) for _ in range(10))


@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("rows", [1, 33])
def test_the_folded_dcn_head_is_the_cross_output_times_the_head(rows, tasks):
    rng = np.random.default_rng(tasks)
    x, w, b, v = (draw(rng, *shape) for shape in ((rows, 100), (4, 100), (4, 100), (tasks, 100)))
    w /= 40
    x0 = xl = x.double().numpy()
    for wi, bi in zip(w.double().numpy(), b.double().numpy(), strict=True):
        xl = x0 * (xl @ wi)[:, None] + bi + xl
    want = xl @ v.double().numpy().T
    np.testing.assert_allclose(CrossV1(w, b, v)(x).numpy(), want, rtol=0, atol=64 * EPS * np.abs(want).max())


def test_a_head_takes_bfloat16_parts_and_sums_in_float32():
    rng = np.random.default_rng(0)
    parts, logit = [draw(rng, 9, width).bfloat16() for width in (40, 7)], draw(rng, 9, 1)
    weight, bias = draw(rng, 1, 60) / 8, draw(rng, 1)
    got = Head(weight, bias, [(10, 40), (50, 7)])(*parts, logit)
    w64 = weight.double().numpy()
    z = parts[0].double().numpy() @ w64[:, 10:50].T + parts[1].double().numpy() @ w64[:, 50:57].T
    z += bias.double().numpy() + logit.double().numpy()
    assert got.dtype == F32
    np.testing.assert_allclose(got.numpy(), 1 / (1 + np.exp(-z)), rtol=0, atol=1e-6)


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("widths", [(1, 1), (5, 16, 1), (39, 40, 7, 3), (128, 512, 33, 1), (16, 1, 17)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, 129])
@pytest.mark.parametrize("last_relu", [False, True])
def test_layers_in_one_call_are_the_layers_one_by_one(rows, widths, last_relu):
    """Of widths that no vector divides, with and without a bias; each row has the same bits alone and in a batch."""
    rng = np.random.default_rng(rows)
    pairs = list(itertools.pairwise(widths))
    given = [
        (draw(rng, out, width) / width**0.5, draw(rng, out) if i % 2 == 0 else None, last_relu or i < len(pairs) - 1)
        for i, (width, out) in enumerate(pairs)
    ]
    x, layers = draw(rng, rows, widths[0]), Layers(given)
    got = layers(x)
    y, slack = x.double(), torch.zeros(rows, 1).double()
    for weight, bias, relu in given:
        w, b = weight.double(), torch.zeros(len(weight)).double() if bias is None else bias.double()
        slack = slack @ w.abs().sum(0, keepdim=True).amax(1, keepdim=True) + (y.abs() @ w.abs().t() + b.abs()).amax(1, True)
        y = y @ w.t() + b
        y = y.clamp(min=0) if relu else y
    assert got.dtype == F32
    assert ((got.double() - y).abs() <= 8 * EPS * (slack + 1)).all()
    assert all(torch.equal(layers(x[i : i + 1]), got[i : i + 1]) for i in range(rows))


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
def test_layers_of_several_threads_are_those_of_one(monkeypatch):
    rng = np.random.default_rng(1)
    layers = Layers([(draw(rng, 64, 100), draw(rng, 64), True), (draw(rng, 1, 64), None, False)])
    x = draw(rng, 3001, 100)
    got = layers(x)
    monkeypatch.setattr(dense, "pool_arguments", lambda: (None, 1))
    assert torch.equal(layers(x), got)


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
def test_layers_refuse_another_width_and_are_of_few_rows_alone():
    layer = torch.zeros(3, 5), None, False
    with pytest.raises(ValueError, match=r"layers: got x \(2, 4\), expected \[rows, 5\]"):
        Layers([layer])(torch.zeros(2, 4))
    assert Layers([layer]).few > 10_000
    assert Layers([(torch.zeros(513, 5), None, False)]).few == 0
    assert Layers([(torch.zeros(512, 8192), None, False)]).few == 0


def test_without_a_compiler_no_layers_are_computed_at_once(monkeypatch):
    monkeypatch.setattr(dense, "cpu_library", lambda: None)
    assert Layers([(torch.zeros(3, 5), None, False)]).few == 0


@pytest.mark.parametrize(
    ("intel", "rows"),
    [(True, {512 * 512: 128, 64 * 64: 256, 513 * 512: 1}), (False, {512 * 512: 4, 64 * 64: 256, 513 * 512: 1})],
)
def test_mkl_multiplies_more_rows_on_processors_of_its_maker(monkeypatch, intel, rows):
    monkeypatch.setattr(dense, "_is_intel", lambda: intel)
    assert {numbers: dense.few_rows(numbers) for numbers in rows} == rows
