"""GRU and LSTM: the kernel (on a GPU, and its code on the host) and its plain twins against the float64 formulas."""

import numpy as np
import pytest
import torch

from dpiframe_core.graph import recurrence as in_graphs
from kernels.recurrent import recurrence
from kernels.recurrent.cells import gru, lstm
from tests.kernels.host_cuda import put_under
from tests.kernels.lane_state import lane_state
from tests.kernels.recurrent.cells import oracle, random_cells

SHAPES = [  # op, steps, inputs, hidden, directions, gate
    ("gru", 1, 1, 1, 1, "none"),
    ("gru", 5, 7, 10, 1, "none"),
    ("gru", 3, 16, 16, 2, "none"),
    ("gru", 4, 40, 33, 1, "scaled"),
    ("gru", 4, 9, 20, 1, "replaced"),
    ("lstm", 1, 3, 2, 1, "none"),
    ("lstm", 4, 17, 24, 2, "none"),
    ("lstm", 2, 70, 136, 1, "none"),
    ("gru", 3, 5, 75, 2, "none"),
]
LARGE = [("gru", 64, 64, 200), ("lstm", 256, 256, 50), ("gru", 1024, 8, 3)]
DIGITS = [("fp32", torch.float32, 20), ("tf32", torch.float32, 10), ("bf16", torch.bfloat16, 7)]
DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def inputs_of(steps, inputs, rows, gate, dtype=torch.float32, seed=1):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, steps, inputs, generator=rng).to(dtype).float()
    scale = torch.rand(rows, steps, generator=rng).to(dtype).float()
    return x.numpy(), None if gate == "none" else scale.numpy()


def run(op, x, cells, gate, scale, cell, device, precision="fp32", dtype=torch.float32):
    """The kernel on rows beside others that nothing may read, into columns of a wider matrix."""
    rows, steps, _ = x.shape
    layer = recurrence.Recurrence(op, steps, cells, gate, cell, dtype, precision, torch.device(device))

    def widened(values):
        wide = torch.full((rows + 2, values.shape[1] + 3), torch.nan, dtype=dtype, device=device)
        wide[:rows, : values.shape[1]] = torch.from_numpy(values)
        return wide

    width = (steps + cell) * len(cells) * cells[0][1].shape[1]
    out = torch.full((rows + 2, width + 3), torch.nan, dtype=dtype, device=device)
    layer(lane_state(rows, device), widened(x.reshape(rows, -1)), None if scale is None else widened(scale), rows + 2, out)
    assert torch.isnan(out[rows:]).all(), "rows of padding are not written"
    assert torch.isnan(out[:, width:]).all()
    return out[:rows, :width].float().cpu().numpy()


@pytest.mark.covering(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "steps", "inputs", "hidden", "directions", "gate"), SHAPES)
@pytest.mark.parametrize(("precision", "dtype", "digits"), DIGITS)
def test_a_layer_is_the_formula_to_the_digits_of_its_precision(
    op, steps, inputs, hidden, directions, gate, precision, dtype, digits, device, monkeypatch, run_folder
):
    if device == "host":
        put_under(monkeypatch, recurrence, run_folder)
    biases, cell, rows = steps != 3, op == "lstm" and steps != 1, 18
    cells = random_cells(op, inputs, hidden, gate=gate, directions=directions, biases=biases, dtype=dtype)
    x, scale = inputs_of(steps, inputs, rows, gate, dtype)
    want = oracle(op, x, cells, gate, scale, cell)
    got = run(op, x, cells, gate, scale, cell, device if device != "host" else "cpu", precision, dtype)
    assert want.std() > 0.05
    # Gates' sums are of magnitude 4 at most; what is off in a state comes back through the next step's.
    assert np.abs(got - want).max() <= 8 * 2.0**-digits


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "inputs", "hidden", "steps"), [("gru", 64, 64, 200), ("lstm", 256, 256, 50), ("gru", 1024, 8, 3)]
)
@pytest.mark.parametrize(("precision", "dtype", "digits"), DIGITS)
def test_long_sequences_and_wide_states_stay_within_the_digits(op, inputs, hidden, steps, precision, dtype, digits):
    cells = random_cells(op, inputs, hidden, dtype=dtype)
    x, _ = inputs_of(steps, inputs, 3, "none", dtype)
    got = run(op, x, cells, "none", None, False, "cuda:0", precision, dtype)
    assert np.abs(got - oracle(op, x, cells)).max() <= 16 * 2.0**-digits


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_many_rows_are_each_their_own_and_the_same_again(rows):
    cells = random_cells("gru", 32, 48, directions=2)
    x, _ = inputs_of(20, 32, rows, "none")
    args = cells, "none", None, False, "cuda:0", "bf16", torch.bfloat16
    first = run("gru", x, *args)
    assert (run("gru", x, *args) == first).all()
    some = [0, rows // 2, rows - 1]
    assert (run("gru", x[some], *args) == first[some]).all()


@pytest.mark.parametrize(("op", "steps", "inputs", "hidden", "directions", "gate"), SHAPES)
def test_the_plain_twins_are_the_formulas(op, steps, inputs, hidden, directions, gate):
    cells = random_cells(op, inputs, hidden, gate=gate, directions=directions)
    x, scale = inputs_of(steps, inputs, 3, gate)
    want = oracle(op, x, cells, gate, scale, op == "lstm")
    given, a = torch.from_numpy(x).double(), None if scale is None else torch.from_numpy(scale).double()
    states, last = [], []
    for backwards, cell in enumerate(cells):
        own = tuple(t.double() for t in cell)
        if op == "lstm":
            h, c = lstm(given, own, bool(backwards))
            last.append(c)
        else:
            h = gru(given, a, own, gate == "replaced", bool(backwards))
        states.append(h)
    got = torch.cat([torch.cat(states, 2).flatten(1), *last], 1)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-12)


def test_graphs_hold_what_the_kernel_takes():
    own = recurrence.MOST_HIDDEN, recurrence.MOST_INPUTS
    assert own == (in_graphs.MOST_HIDDEN, in_graphs.MOST_INPUTS)


@pytest.mark.parametrize(("inputs", "hidden"), [(1, 257), (1025, 1)])
def test_more_than_a_block_takes_is_refused(inputs, hidden):
    cells = random_cells("gru", inputs, hidden)
    with pytest.raises(ValueError, match=f"got {inputs} columns and {hidden} hidden ones, expected at most 1024 and 256"):
        recurrence.Recurrence("gru", 1, cells, "none", False, torch.float32, "fp32", torch.device("cpu"))
