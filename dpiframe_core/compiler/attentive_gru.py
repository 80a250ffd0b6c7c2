"""A GRU whose update gate attention scales or replaces (DIEN; Zhou et al. 2019, eq. 12 to 14), as an operator of torch's that
`compile` takes over: torch has none, and written out it is a dozen calls a step.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from dpiframe_core.compiler.arguments import Arguments, constant
from dpiframe_core.compiler.emit import Emitter
from dpiframe_core.compiler.strided import Frame, Refused, Size, Strided, frame_of, fresh
from dpiframe_core.graph.graph import Attrs
from dpiframe_core.graph.recurrence import Recurrence

TARGET = "dpiframe.attentive_gru.default"


@torch.library.custom_op("dpiframe::attentive_gru", mutates_args=())
def _attentive_gru(x: Tensor, scores: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor, replaced: bool) -> Tensor:
    hidden = w_h.shape[1]
    h, out, of_x = x.new_zeros(len(x), hidden), [], linear(x, w_x, b_x)
    for t in range(x.shape[1]):
        of_h = linear(h, w_h, b_h)
        reset = torch.sigmoid(of_x[:, t, :hidden] + of_h[:, :hidden])
        new = torch.tanh(of_x[:, t, -hidden:] + reset * of_h[:, -hidden:])
        update = scores[:, t, None]
        if not replaced:
            update = update * (1 - torch.sigmoid(of_x[:, t, hidden:-hidden] + of_h[:, hidden:-hidden]))
        h = h + update * (new - h)
        out.append(h)
    return torch.stack(out, 1)


@_attentive_gru.register_fake
def _(x: Tensor, scores: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor, replaced: bool) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], w_h.shape[1])


def attentive_gru(
    x: Tensor, scores: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor, gate: Literal["scaled", "replaced"]
) -> Tensor:
    """The hidden states, [n, steps, hidden], from zeros on: h + a u (n - h), with "replaced" h + a (n - h).

    Args:
        x: [n, steps, inputs]. scores: a of each step, [n, steps].
        w_x, w_h, b_x, b_h: of the gates as torch.nn.GRU orders them, r, z = 1 - u and n; with "replaced" r and n.
    """
    made: Tensor = _attentive_gru(x, scores, w_x, w_h, b_x, b_h, gate == "replaced")
    return made


def lowered(e: Emitter, a: Arguments) -> Strided:
    """One node of a call.

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
