"""DIEN (Zhou et al. 2019): interests that evolve along a history, by recurrences with attention to the target.

FuxiCTR packs each history: it reads as many steps as the history has values, from the first place on. So do these masks.
"""

import torch
from torch import Tensor

from dpiframe_core.importers.fuxictr.zoo.sequences import groups
from dpiframe_core.importers.networks.layers import mlp, stack
from dpiframe_core.importers.networks.net import PADDING, Net
from kernels.recurrent.attentive_gru import attentive_gru


def dien(m: Net) -> Tensor:
    """Defaults and names are those of FuxiCTR's `model_zoo/DIEN`."""
    targets, sequences = groups(m, "dien_target_field"), groups(m, "dien_sequence_field")
    negatives = groups(m, "dien_neg_seq_field") if m.setting("dien_neg_seq_field", None, str, list, tuple, type(None)) else []
    parts = []
    for i, (target, sequence) in enumerate(zip(targets, sequences, strict=True)):
        history, wanted = m.joined(sequence), m.joined(target)
        there = (m.values[sequence[0]] != PADDING).to(history.dtype)
        count = there.sum(1, keepdim=True)
        read = (torch.arange(there.shape[1]) < count).to(history.dtype)
        interests = _gru(m, f"extraction_modules.{i}", history) * read.unsqueeze(2)
        parts.append(_evolved(m, i, interests, wanted, there, read))
        if m.flag("enable_sum_pooling", False):
            total = history.sum(1)
            parts += [total, wanted * total]
    left_out = {name for group in (*sequences, *negatives) for name in group}
    parts += [m.joined([f.name]) for f in m.features if f.name not in left_out]
    m.skip("aux_net", *(f"embedding_layer.embedding_layers.{name}" for group in negatives for name in group))
    return mlp(m, "dnn", torch.cat(parts, 1), "dnn_activations")


def _evolved(m: Net, i: int, interests: Tensor, target: Tensor, there: Tensor, read: Tensor) -> Tensor:
    """[n, dim]: the state behind the last step that is read; zeros of a history without values.

    FuxiCTR's AIGRU is left out: its scores meet the interests along other dimensions, so the library's own forward fails.
    """
    name, kind = f"evolving_modules.{i}", m.choice("gru_type", "AUGRU", "GRU", "AGRU", "AUGRU")
    if kind == "GRU":
        states = _gru(m, name, interests)
    else:
        scores = _scores(m, f"attention_modules.{i}", interests, target, there) * read
        states = _attentive(m, name, interests, scores, kind)
    last = (torch.arange(1, read.shape[1] + 1) == read.sum(1, keepdim=True)).to(read.dtype)
    return (states * last.unsqueeze(2)).sum(1)


def _scores(m: Net, name: str, interests: Tensor, target: Tensor, there: Tensor) -> Tensor:
    """[n, steps]: of each step with the target, by a dot, a bilinear form or DIN's MLP; a softmax over those that are there."""
    match m.choice("attention_type", "bilinear_attention", "bilinear_attention", "dot_attention", "din_attention"):
        case "dot_attention":
            scores = (interests * target.unsqueeze(1)).sum(2)
        case "bilinear_attention":
            scores = ((interests @ m.parameter(f"{name}.W_kernel")) * target.unsqueeze(1)).sum(2)
        case _:
            query = target.unsqueeze(1).expand(-1, interests.shape[1], -1)
            both = torch.cat([query, interests, query - interests, query * interests], 2)
            given = m.setting("attention_activation", "Dice", str, list, type(None))
            scores = stack(m, f"{name}.attn_mlp.mlp", both, given, "attention_activation", output=True).squeeze(2)
    scores = scores * there
    return (scores - 1e9 * (1 - there)).softmax(1) if m.flag("use_attention_softmax", True) else scores


def _gru(m: Net, name: str, x: Tensor) -> Tensor:
    """[n, steps, hidden]: nn.GRU of one layer."""
    weights = [m.parameter(f"{name}.{part}_l0") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    first = torch.zeros(1, x.shape[0], weights[1].shape[1], dtype=x.dtype)
    return torch.gru(x, first, weights, True, 1, 0.0, False, False, True)[0]


def _attentive(m: Net, name: str, x: Tensor, scores: Tensor, kind: str) -> Tensor:
    """FuxiCTR orders the gates u, r, n; r, z = 1 - u and n is what a GRU has, and 1 - sigmoid(s) is sigmoid(-s)."""
    cell = [m.parameter(f"{name}.gru_cell.{part}") for part in ("x2h.weight", "h2h.weight", "x2h.bias", "h2h.bias")]
    (xu, xr, xn), (hu, hr, hn), (bu, br, bn), (cu, cr, cn) = (torch.chunk(p, 3, 0) for p in cell)
    if kind == "AGRU":
        parts = [torch.cat(p) for p in ((xr, xn), (hr, hn), (br, bn), (cr, cn))]
        return attentive_gru(x, scores, parts[0], parts[1], parts[2], parts[3], "replaced")
    parts = [torch.cat(p) for p in ((xr, -xu, xn), (hr, -hu, hn), (br, -bu, bn), (cr, -cu, cn))]
    return attentive_gru(x, scores, parts[0], parts[1], parts[2], parts[3], "scaled")
