"""DIEN (Zhou et al. 2019): interests that evolve along a history, by recurrences with attention to the target.

FuxiCTR packs each history: it reads as many steps as the history has values, from the first place on. So do these masks.
"""

import torch
from torch import Tensor

from dpiframe_core.importers.fuxictr.zoo.sequences import beside_sequences, groups
from dpiframe_core.importers.networks.histories import against, gru, gru_of_scores, last_state, masks, softmax_over
from dpiframe_core.importers.networks.layers import mlp, stack
from dpiframe_core.importers.networks.net import Net

_CELL = ("x2h.weight", "h2h.weight", "x2h.bias", "h2h.bias")


def dien(m: Net) -> Tensor:
    """Defaults and names are those of FuxiCTR's `model_zoo/DIEN`."""
    targets, sequences = groups(m, "dien_target_field"), groups(m, "dien_sequence_field")
    parts = []
    for i, (target, sequence) in enumerate(zip(targets, sequences, strict=True)):
        history, wanted = m.joined(sequence), m.joined(target)
        there, read = masks(m, sequence[0], history)
        interests = gru(m, f"extraction_modules.{i}", history) * read.unsqueeze(2)
        parts.append(_evolved(m, i, interests, wanted, there, read))
        if m.flag("enable_sum_pooling", False):
            total = history.sum(1)
            parts += [total, wanted * total]
    parts += beside_sequences(m, sequences, "dien_neg_seq_field")
    return mlp(m, "dnn", torch.cat(parts, 1), "dnn_activations")


def _evolved(m: Net, i: int, interests: Tensor, target: Tensor, there: Tensor, read: Tensor) -> Tensor:
    """[n, dim]: the state behind the last step that is read; zeros of a history without values.

    FuxiCTR's AIGRU is left out: its scores meet the interests along other dimensions, so the library's own forward fails.
    """
    name, kind = f"evolving_modules.{i}", m.choice("gru_type", "AUGRU", "GRU", "AGRU", "AUGRU")
    if kind == "GRU":
        states = gru(m, name, interests)
    else:
        scores = _scores(m, f"attention_modules.{i}", interests, target, there) * read
        states = gru_of_scores(m, [f"{name}.gru_cell.{part}" for part in _CELL], "urn", interests, scores, kind)
    return last_state(states, read)


def _scores(m: Net, name: str, interests: Tensor, target: Tensor, there: Tensor) -> Tensor:
    """[n, steps]: of each step with the target, by a dot, a bilinear form or DIN's MLP; a softmax over those that are there."""
    match m.choice("attention_type", "bilinear_attention", "bilinear_attention", "dot_attention", "din_attention"):
        case "dot_attention":
            scores = (interests * target.unsqueeze(1)).sum(2)
        case "bilinear_attention":
            scores = ((interests @ m.parameter(f"{name}.W_kernel")) * target.unsqueeze(1)).sum(2)
        case _:
            given = m.setting("attention_activation", "Dice", str, list, type(None))
            both = against(target, interests)
            scores = stack(m, f"{name}.attn_mlp.mlp", both, given, "attention_activation", output=True).squeeze(2)
    return softmax_over(scores, there) if m.flag("use_attention_softmax", True) else scores * there
