"""Recurrences over a sequence, GRU (Cho et al. 2014) and LSTM (Hochreiter and Schmidhuber 1997), as one operator each: which
columns it reads, what its parameters are, how wide it is. Plain data and checks; `kernels.recurrent` computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import ConfigDict, with_config

from dpiframe_core.graph.aten_rules import Shape

T = TypeVar("T")
Gate = Literal["none", "scaled", "replaced"]
OPS = ("gru", "lstm")
# What one launch takes (kernels/recurrent/recurrence.py).
MOST_HIDDEN, MOST_INPUTS = 256, 1024


@with_config(ConfigDict(extra="forbid"))  # for `bundle.graph_file`, which reads it from JSON
@dataclass(frozen=True, slots=True)
class Recurrence:
    """A layer over `steps` vectors of `inputs` columns that lie one after the other, with a hidden state of `hidden` columns.

    directions: 2: one more, with parameters of its own, from the last step to the first; at each step the hidden states of both
    lie side by side. biases: whether it has any.
    gate: of a GRU. h_t = h + u (n - h) with the update gate u = 1 - z: "scaled" takes a_t u for it and "replaced" a_t, one
    number a step (AUGRU and AGRU, Zhou et al. 2019, eq. 12 to 14), from the node's second input. Where a_t is 0 the state
    stays: scaled by a mask, the last state is the one at the end of a padded sequence, as of a packed one.
    cell: of an LSTM: behind the hidden states is the last cell state of each direction.
    """

    steps: int
    inputs: int
    hidden: int
    directions: int = 1
    biases: bool = True
    gate: Gate = "none"
    cell: bool = False

    @property
    def width(self) -> int:
        """Of the output."""
        return (self.steps + self.cell) * self.directions * self.hidden


def gates_of(op: str, gate: Gate) -> int:
    """Of a cell: r, z and n of a GRU, r and n where its update gate is replaced; i, f, g and o of an LSTM."""
    return 4 if op == "lstm" else 2 if gate == "replaced" else 3


def param_shapes(op: str, r: Recurrence) -> tuple[Shape, ...]:
    """Of a node's parameters: for each direction W_ih, W_hh, b_ih, b_hh, the gates of `gates_of` one above the other."""
    rows = gates_of(op, r.gate) * r.hidden
    weights, biases = ((rows, r.inputs), (rows, r.hidden)), ((rows,), (rows,))
    return (weights + (biases if r.biases else ())) * r.directions


def directions_of(r: Recurrence, params: Sequence[T]) -> list[tuple[T, T, T | None, T | None]]:
    """W_ih, W_hh, and b_ih and b_hh or None, of each direction."""
    if r.biases:
        return [(params[i], params[i + 1], params[i + 2], params[i + 3]) for i in range(0, len(params), 4)]
    return [(params[i], params[i + 1], None, None) for i in range(0, len(params), 2)]


def check_recurrence(op: str, r: Recurrence | None, offset: int, widths: Sequence[int], params: Sequence[Shape]) -> int:
    """Holds a recurrence that reads from column `offset` on against its node's inputs and parameters; gives its width.

    Raises:
        ValueError: it has no meaning, or they do not fit.
    """
    if r is None or min(r.steps, r.inputs, r.hidden) < 1 or r.directions not in (1, 2):
        raise ValueError(f"got {r}, expected a recurrence of one step and column or more in one or two directions")
    if r.hidden > MOST_HIDDEN or r.inputs > MOST_INPUTS:
        raise ValueError(f"got {r.inputs} columns and {r.hidden} hidden ones, expected at most {MOST_INPUTS} and {MOST_HIDDEN}")
    if (r.cell and op != "lstm") or (r.gate != "none" and (op != "gru" or r.directions > 1)):
        raise ValueError(f"got {r} on {op}, expected a last cell state of an lstm alone, a gate of a gru in one direction")
    last = offset + r.steps * r.inputs
    scales = () if r.gate == "none" else (r.steps,)
    if offset < 0 or tuple(widths[1:]) != scales or not widths or last > widths[0]:
        got = f"columns {offset} to {last} of widths {list(widths)}"
        raise ValueError(f"got {got}, expected them within one value, and {list(scales)} of others")
    if tuple(params) != param_shapes(op, r):
        raise ValueError(f"got parameters {list(params)}, expected {list(param_shapes(op, r))}")
    return r.width
