"""nn.GRU and nn.LSTM: a node a layer, both directions in one, last states as views of what it gives; and DIEN's GRU."""

from collections.abc import Sequence, Set

from dpiframe_core.compiler.operations.arguments import Arguments, constant
from dpiframe_core.compiler.operations.emit import Const, Emitter
from dpiframe_core.compiler.operations.joins import stack
from dpiframe_core.compiler.operations.strided import (
    BATCH,
    Atom,
    Frame,
    Refused,
    Size,
    Strided,
    frame_of,
    fresh,
    permuted,
    selected,
    sliced,
    unsqueezed,
)
from dpiframe_core.graph.graph import Attrs
from dpiframe_core.graph.recurrence import MOST_HIDDEN, MOST_INPUTS, Recurrence

OPS = {"aten.gru.input": "gru", "aten.lstm.input": "lstm"}
_OTHERS = {"aten.rnn_tanh.input", "aten.rnn_relu.input"}
RECURRENT = OPS.keys() | _OTHERS


def recurrence(e: Emitter, target: str, a: Arguments, read: Set[int]) -> tuple[Strided | None, ...]:
    """The hidden states of the last layer at all steps, and the last ones of all layers (and cell states of an LSTM), as torch
    lays them out. read: which of these anybody reads; the others are None.
    """
    _check(target, a)
    op, x, directions = OPS[target], a["input"], 1 + a["bidirectional"]
    sequence = x if a["batch_first"] else permuted(x, [1, 0, 2])
    if frame_of([sequence], 3) != Frame(3, 0):
        raise Refused("got a recurrence over or beside the rows of the batch, expected each row to be computed from itself")
    cells = _cells(op, a, directions)
    hidden, cell = cells[0][1].tensor.shape[1], 2 in read
    last, cell_states = list[Strided](), list[Strided]()
    for layer in range(a["num_layers"]):
        own = cells[layer * directions : (layer + 1) * directions]
        sequence = _layer(e, op, sequence, own, a["has_biases"], cell)
        for d in range(directions):
            end = selected(sequence, 1, 0 if d else sequence.size(1) - 1)
            part = sliced(end, 1, d * hidden, hidden)
            assert part is not None  # hidden states lie side by side
            last.append(part)
            offset = (sequence.size(1) * directions + d) * hidden
            cell_states.append(Strided(sequence.base, ((BATCH,), (Atom(hidden, 1),) if hidden > 1 else ()), offset))
    out = sequence if a["batch_first"] else permuted(sequence, [1, 0, 2])
    return out, _of_layers(e, last) if 1 in read else None, _of_layers(e, cell_states) if cell else None


def _check(target: str, a: Arguments) -> None:
    """Raises Refused: what no node says."""
    if target in _OTHERS:
        raise Refused(f"got {target}, expected nn.GRU or nn.LSTM")
    if a["dropout"] and a["train"]:
        raise Refused(f"got {target} with dropout between its layers in training mode, expected nothing random")
    if not isinstance(a["input"], Strided):
        raise Refused("got a sequence that depends on no feature, expected one that does")
    if a["input"].rank != 3:
        raise Refused(f"got a sequence of {a['input'].rank} dimensions, expected [rows, steps, columns]")
    for state in a["hx"] if isinstance(a["hx"], list | tuple) else [a["hx"]]:
        if not isinstance(state, Const) or state.tensor.any():
            raise Refused("got a first state that is not zero, expected none or zeros")


def _cells(op: str, a: Arguments, directions: int) -> list[list[Const]]:
    """W_ih, W_hh (b_ih, b_hh) of each layer's directions."""
    params = [constant(p) for p in a["params"]]
    each = 4 if a["has_biases"] else 2
    if len(params) != each * a["num_layers"] * directions:
        raise Refused("got a projection of the hidden state (proj_size), expected an LSTM without: a step here has one product")
    hidden, inputs = params[1].tensor.shape[1], max(p.tensor.shape[1] for p in params[::each])
    if hidden > MOST_HIDDEN or inputs > MOST_INPUTS:
        got = f"{op} of {inputs} columns into {hidden}"
        raise Refused(f"got {got}, expected at most {MOST_INPUTS} into {MOST_HIDDEN}, what one launch keeps on a processor")
    return [params[i : i + each] for i in range(0, len(params), each)]


def _layer(e: Emitter, op: str, x: Strided, cells: Sequence[Sequence[Const]], biases: bool, cell: bool) -> Strided:
    """[rows, steps, directions * hidden] of x[rows, steps, inputs], read where it lies if its columns are side by side."""
    x = x if x.is_run else e.copied(x)
    r = Recurrence(x.size(1), x.size(2), cells[0][1].tensor.shape[1], len(cells), biases, cell=cell)
    params = [e.param(p.tensor, p.name) for own in cells for p in own]
    base = e.node(op, [x.base], r.width, params, Attrs(recurrence=r, offset=x.offset))
    return fresh(base, [Size(1, True), Size(r.steps), Size(r.directions * r.hidden)])


def _of_layers(e: Emitter, states: Sequence[Strided]) -> Strided:
    """[layers * directions, rows, hidden]; a copy of all, which is dead where single ones are chosen."""
    if len(states) == 1:
        return unsqueezed(states[0], 0)
    made = stack(e, states, 0)
    e.stacked[made] = tuple(states)
    return made


def attentive(e: Emitter, a: Arguments) -> Strided:
    """One node of a call of `kernels.recurrent.attentive_gru`: the hidden states of all steps.

    Raises:
        Refused: the steps are not those of a row.
    """
    x, scores = a["x"], a["scores"]
    if not (isinstance(x, Strided) and isinstance(scores, Strided)) or frame_of([x], 3) != Frame(3, 0):
        raise Refused("got steps or scores that are not those of each row, expected [rows, steps, columns] and [rows, steps]")
    x, scores = x if x.is_run else e.copied(x), e.copied(scores)
    params = [constant(a[k]) for k in ("w_x", "w_h", "b_x", "b_h")]
    hidden = params[1].tensor.shape[1]
    r = Recurrence(x.size(1), x.size(2), hidden, gate="replaced" if a["replaced"] else "scaled")
    names = [e.param(p.tensor, p.name) for p in params]
    base = e.node("gru", [x.base, scores.base], r.width, names, Attrs(recurrence=r, offset=x.offset))
    return fresh(base, [Size(1, True), Size(r.steps), Size(hidden)])
