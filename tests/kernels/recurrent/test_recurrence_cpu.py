"""GRU and LSTM on a CPU, in C and without a compiler, against the float64 formulas."""

import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.recurrent import recurrence_cpu
from kernels.recurrent.recurrence_cpu import CpuRecurrence
from kernels.runtime import c_build
from kernels.runtime.c_build import cpu_library
from tests.kernels.recurrent.cells import oracle, random_cells
from tests.kernels.recurrent.test_recurrence import SHAPES, inputs_of

MORE = [("gru", 200, 8, 64, 1, "none"), ("lstm", 30, 64, 256, 2, "none"), ("gru", 7, 3, 130, 1, "scaled")]


def run(op, x, cells, gate, scale, cell):
    layer = CpuRecurrence(op, x.shape[1], cells, gate, cell)
    return layer(torch.from_numpy(x).flatten(1), None if scale is None else torch.from_numpy(scale)).numpy()


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 18])
@pytest.mark.parametrize(("op", "steps", "inputs", "hidden", "directions", "gate"), [*SHAPES, *MORE])
def test_a_layer_is_the_formula(op, steps, inputs, hidden, directions, gate, rows, in_c, monkeypatch):
    if in_c and cpu_library() is None:
        pytest.skip("there is no C compiler")
    if not in_c:
        monkeypatch.setattr(recurrence_cpu, "cpu_library", lambda: None)
    cell = op == "lstm" and steps != 1
    cells = random_cells(op, inputs, hidden, gate=gate, directions=directions, biases=steps != 3)
    x, scale = inputs_of(steps, inputs, rows, gate)
    want = oracle(op, x, cells, gate, scale, cell)
    np.testing.assert_allclose(run(op, x, cells, gate, scale, cell), want, rtol=0, atol=8e-6)


@pytest.mark.bulk
@pytest.mark.skipif(cpu_library() is None or platform.machine() != "x86_64", reason="there is no C compiler for x86")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_a_layer_is_the_formula_in_narrower_vectors(processor, monkeypatch):
    if processor == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(c_build, "_FLAGS", tuple(f.replace("=native", f"={processor}") for f in c_build._FLAGS))
    narrower = cpu_library.__wrapped__()
    monkeypatch.setattr(recurrence_cpu, "cpu_library", lambda: narrower)
    for op, steps, inputs, hidden, directions, gate in SHAPES:
        cells = random_cells(op, inputs, hidden, gate=gate, directions=directions)
        x, scale = inputs_of(steps, inputs, 13, gate)
        np.testing.assert_allclose(run(op, x, cells, gate, scale, False), oracle(op, x, cells, gate, scale), rtol=0, atol=8e-6)


def test_scaled_by_a_mask_the_last_state_is_that_of_a_packed_sequence():
    torch.manual_seed(0)
    module, x, lengths = torch.nn.GRU(5, 9, batch_first=True), torch.randn(6, 8, 5), torch.tensor([8, 1, 3, 5, 2, 7])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        want = module(packed)[1][0]
    mask = (torch.arange(8) < lengths[:, None]).float()
    cell = tuple(p.detach() for p in module.parameters())
    got = CpuRecurrence("gru", 8, [cell], "scaled", False)(x.flatten(1), mask)[:, -9:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("op", ["gru", "lstm"])
def test_large_sums_saturate_and_nan_stays_nan(op):
    cells = random_cells(op, 1, 16)
    for value, expected in ((1e30, np.isfinite), (-1e30, np.isfinite), (np.nan, np.isnan)):
        x = np.full((2, 3, 1), value, np.float32)
        got = run(op, x, cells, "none", None, False)
        assert expected(got).all()
        if value == value:
            np.testing.assert_allclose(got, oracle(op, x, cells), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 64, 256, 1024])
@pytest.mark.parametrize("hidden", [32, 64])
def test_an_lstm_of_twenty_steps_is_exact_to_a_millionth(hidden, rows):
    cells = [tuple(part / 4 for part in cell) for cell in random_cells("lstm", 16, hidden)]
    x, _ = inputs_of(20, 16, rows, "none")
    np.testing.assert_allclose(
        run("lstm", x, cells, "none", None, True), oracle("lstm", x, cells, "none", None, True), rtol=0, atol=1e-6
    )


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
@pytest.mark.parametrize("rows", [5, 300])
def test_at_bf16_rows_are_each_their_own_whatever_lies_in_memory_at_a_time(rows, monkeypatch):
    cells = random_cells("lstm", 6, 20, directions=2)
    x = torch.from_numpy(inputs_of(9, 6, rows, "none")[0]).flatten(1)
    layer = CpuRecurrence("lstm", 9, cells, "none", True, torch.bfloat16)
    whole = layer(x)
    monkeypatch.setattr(recurrence_cpu, "_NUMBERS", 3 * 9 * 4 * 32)  # three rows of a direction's products
    torch.testing.assert_close(layer(x), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(CpuRecurrence("lstm", 9, cells, "none", True)(x), whole, rtol=0, atol=0.03)


@pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
@pytest.mark.parametrize(("op", "gate"), [("gru", "none"), ("gru", "scaled"), ("lstm", "none")])
def test_a_row_has_the_same_bits_in_any_batch_and_wherever_it_lies(op, gate):
    x, scale = inputs_of(7, 5, 29, gate)
    layer = CpuRecurrence(op, 7, random_cells(op, 5, 19, gate=gate), gate, False)
    wide = torch.from_numpy(np.pad(x.reshape(29, -1), ((0, 0), (3, 2))))
    scales = [] if scale is None else [torch.from_numpy(scale)]
    whole = layer(wide[:, 3:-2], *scales)
    for first, last in ((0, 1), (3, 7), (5, 12), (8, 16), (2, 25)):
        own = layer(wide[first:last, 3:-2].contiguous(), *(s[first:last] for s in scales))
        assert torch.equal(own, whole[first:last])
    assert torch.equal(layer(wide[:, 3:-2].t().contiguous().t(), *scales), whole)
