"""A GRU whose update gate attention scales or replaces (DIEN; Zhou et al. 2019, eq. 12 to 14), as an operator of torch's.

So `dpiframe_core.compile` finds one call: torch has none, and written out it is a dozen calls a step.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

OPERATOR = "dpiframe.attentive_gru.default"


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
