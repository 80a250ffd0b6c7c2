"""Histories step by step, float32[n, steps, dim]: against a target, through a GRU, to the state behind the last step.

Masks are [n, steps], 1 where there is a step and else 0; a step's score is a number, [n, steps].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpiframe_core.importers.networks.net import PADDING, Net
from kernels.recurrent.attentive_gru import attentive_gru


def masks(m: Net, sequence: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where there are values, and as many steps from the first place on."""
    there = (m.values[sequence] != PADDING).to(like.dtype)
    return there, (torch.arange(there.shape[1]) < there.sum(1, keepdim=True)).to(like.dtype)


def against(target: Tensor, x: Tensor) -> Tensor:
    """[n, steps, 4 dim]: the target, each step, their difference and their product (Zhou et al. 2018, in code)."""
    return beside(target.unsqueeze(1).expand(-1, x.shape[1], -1), x)


def beside(query: Tensor, x: Tensor) -> Tensor:
    """The same of a query for each step, [n, steps, dim]."""
    return torch.cat([query, x, query - x, query * x], 2)


def softmax_over(scores: Tensor, there: Tensor) -> Tensor:
    """Over the steps that are there; even where none is."""
    return (scores * there - 1e9 * (1 - there)).softmax(1)


def last_state(states: Tensor, read: Tensor) -> Tensor:
    """[n, dim]: behind the last step that is read; zeros of a history without values."""
    last = (torch.arange(1, read.shape[1] + 1) == read.sum(1, keepdim=True)).to(read.dtype)
    return (states * last.unsqueeze(2)).sum(1)


def gru(m: Net, name: str, x: Tensor) -> Tensor:
    """[n, steps, hidden]: nn.GRU of one layer."""
    weights = [m.parameter(f"{name}.{part}_l0") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    first = torch.zeros(1, x.shape[0], weights[1].shape[1], dtype=x.dtype)
    return torch.gru(x, first, weights, True, 1, 0.0, False, False, True)[0]


def gru_of_scores(m: Net, cell: Sequence[str], gates: str, x: Tensor, scores: Tensor, kind: str) -> Tensor:
    """[n, steps, hidden] of an "AGRU" or "AUGRU" (Zhou et al. 2019, eq. 12 to 14).

    Args:
        cell: names of W_x, W_h, b_x and b_h. gates: the order of theirs, such as "run"; r, z = 1 - u and n is what a GRU has,
            and 1 - sigmoid(s) is sigmoid(-s).
    """
    parts = [dict(zip(gates, torch.chunk(m.parameter(name), 3, 0), strict=True)) for name in cell]
    if kind == "AGRU":
        w_x, w_h, b_x, b_h = (torch.cat([p["r"], p["n"]]) for p in parts)
        return attentive_gru(x, scores, w_x, w_h, b_x, b_h, "replaced")
    w_x, w_h, b_x, b_h = (torch.cat([p["r"], -p["u"], p["n"]]) for p in parts)
    return attentive_gru(x, scores, w_x, w_h, b_x, b_h, "scaled")
