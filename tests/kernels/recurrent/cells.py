"""Cells of recurrences with random weights, and what they compute by the papers' formulas, number by number in float64."""

import numpy as np
import torch


def random_cells(op, inputs, hidden, *, gate="none", directions=1, biases=True, dtype=torch.float32, seed=0):
    """(W_ih, W_hh, b_ih, b_hh) of each direction, float32; the weights are numbers of `dtype`."""
    rng = torch.Generator().manual_seed(seed + 1000 * inputs + hidden)
    gates = {"lstm": 4, "gru": 2 if gate == "replaced" else 3}[op]

    def made(*shape):
        return torch.randn(*shape, generator=rng)

    return [
        (
            (made(gates * hidden, inputs) * inputs**-0.5).to(dtype).float(),
            (made(gates * hidden, hidden) * hidden**-0.5).to(dtype).float(),
            made(gates * hidden) if biases else None,
            made(gates * hidden) if biases else None,
        )
        for _ in range(directions)
    ]


def sigmoid(v):
    return 0.5 + 0.5 * np.tanh(0.5 * v)


def oracle(op, x, cells, gate="none", scale=None, cell=False):
    """[rows, (steps + cell) * directions * hidden] of x[rows, steps, inputs] and scale[rows, steps]."""
    rows, steps, _ = x.shape
    hidden = cells[0][1].shape[1]
    states, last = np.zeros((rows, steps, len(cells), hidden)), np.zeros((rows, len(cells), hidden))
    for d, given in enumerate(cells):
        w, u, b, bias = (0 if t is None else t.double().numpy() for t in given)
        for row in range(rows):
            h = np.zeros(hidden)
            for t in reversed(range(steps)) if d else range(steps):
                of_x, of_h = w @ x[row, t].astype(np.float64) + b, u @ h + bias
                if op == "lstm":
                    i, f, g, o = np.split(of_x + of_h, 4)
                    last[row, d] = sigmoid(f) * last[row, d] + sigmoid(i) * np.tanh(g)
                    h = sigmoid(o) * np.tanh(last[row, d])
                else:
                    parts, before = np.split(of_x, len(w) // hidden), np.split(of_h, len(w) // hidden)
                    n = np.tanh(parts[-1] + sigmoid(parts[0] + before[0]) * before[-1])
                    attention = 1.0 if scale is None else float(scale[row, t])
                    u_t = attention if gate == "replaced" else attention * (1 - sigmoid(parts[1] + before[1]))
                    h = (1 - u_t) * h + u_t * n
                states[row, t, d] = h
    flat = states.reshape(rows, -1)
    return np.concatenate([flat, last.reshape(rows, -1)], 1) if cell else flat
