"""Models of the zoo that read a user's history step by step. Histories are [n, longest, dim], padded as FuxiCTR pads them.

Every function gives the logit, [n, 1]; names and defaults are those of FuxiCTR's `model_zoo/*/src/*.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.errors import InputError
from dpiframe_core.importers.networks.histories import beside
from dpiframe_core.importers.networks.layers import attend, heads, mlp, stack, unheads
from dpiframe_core.importers.networks.net import PADDING, Net

_LOWEST = float("-inf")


def groups(m: Net, key: str) -> list[list[str]]:
    """A setting that names one field, or a list of fields and of groups of them, as groups.

    Raises:
        InputError: it names no feature of the run.
    """
    given = m.setting(key, None, str, list, tuple, type(None))
    listed = given if isinstance(given, list) else [given]
    out = [list(g) if isinstance(g, list | tuple) else [g] for g in listed]
    known = {f.name for f in m.features}
    for name in (name for group in out for name in group):
        if name not in known:
            raise InputError(f"{m.where}: {key}", name, "a feature of the run, or lists of them")
    return [[str(name) for name in group] for group in out]


def beside_sequences(m: Net, sequences: list[list[str]], negatives_key: str) -> list[Tensor]:
    """The features that are of no sequence. What training alone needs, auxiliary network and negative samples, is skipped."""
    negatives = groups(m, negatives_key) if m.setting(negatives_key, None, str, list, tuple, type(None)) else []
    m.skip("aux_net", *(f"embedding_layer.embedding_layers.{name}" for group in negatives for name in group))
    left_out = {name for group in (*sequences, *negatives) for name in group}
    return [m.joined([f.name]) for f in m.features if f.name not in left_out]


def bst(m: Net) -> Tensor:
    """Chen et al. 2019 (Alibaba): transformer blocks over the history and the target behind it."""
    targets, sequences = groups(m, "bst_target_field"), groups(m, "bst_sequence_field")
    pooling = m.choice("seq_pooling_type", "mean", "mean", "sum", "target", "concat")
    pooled = []
    for i, (target, sequence) in enumerate(zip(targets, sequences, strict=True)):
        history = torch.cat([m.joined(sequence), m.joined(target).unsqueeze(1)], 1)
        there = m.values[sequence[0]] != PADDING
        there = torch.cat([there, torch.ones_like(there[:, :1])], 1)
        length = there.shape[1]
        seen = there.unsqueeze(1) | torch.eye(length).bool()
        if m.flag("use_causal_mask", False):
            seen = seen & torch.ones(length, length).tril().bool()
        if m.flag("use_position_emb", True):
            places = m.parameter(f"transformer_encoders.{i}.position_emb")
            history = torch.cat([history, places.expand(history.shape[0], -1, -1)], 2)
        for j in m.children(f"transformer_encoders.{i}.transformer_blocks"):
            history = _transformer(m, f"transformer_encoders.{i}.transformer_blocks.{j}", history, seen)
        pooled.append(_pooled(history, there.float().unsqueeze(2), pooling))
    read = {name for group in sequences for name in group}
    rest = [m.joined([f.name]) for f in m.features if f.name not in read]
    return mlp(m, "dnn", torch.cat([*rest, *pooled], 1), "dnn_activations")


def _pooled(x: Tensor, there: Tensor, pooling: str) -> Tensor:
    match pooling:
        case "mean":
            return (x * there).sum(1) / (there.sum(1) + 1e-12)
        case "sum":
            return (x * there).sum(1)
        case "target":
            return x[:, -1]
    return x.flatten(1)


def _transformer(m: Net, name: str, x: Tensor, seen: Tensor) -> Tensor:
    out = _multi_head(m, f"{name}.attention", x, lambda scores: scores.masked_fill(~seen.unsqueeze(1), _LOWEST))
    residual = m.flag("use_residual", True)
    out = out + x if residual else out
    out = m.layer_norm(f"{name}.layer_norm1", out) if m.has(f"{name}.layer_norm1") else out
    inner = functional.leaky_relu(m.linear(f"{name}.ffn.0", out), 0.01)
    inner = m.linear(f"{name}.ffn.2", inner)
    inner = inner + out if residual else inner
    return m.layer_norm(f"{name}.layer_norm2", inner) if m.has(f"{name}.layer_norm2") else inner


def _multi_head(m: Net, name: str, x: Tensor, masked: Callable[[Tensor], Tensor]) -> Tensor:
    """Vaswani et al. 2017, as nn.MultiheadAttention stores it; `masked` changes the scores, [n, heads, length, length]."""
    projected = functional.linear(x, m.parameter(f"{name}.in_proj_weight"), m.parameter(f"{name}.in_proj_bias"))
    query, key, value = (heads(part, m.count("num_heads", 2)) for part in projected.chunk(3, 2))
    scores = masked(query @ key.transpose(2, 3) / query.shape[-1] ** 0.5)
    return m.linear(f"{name}.out_proj", unheads(scores.softmax(-1) @ value))


def dmin(m: Net) -> Tensor:
    """Xiao et al. 2020: a refined history, one interest a head, each pooled by attention to the target."""
    targets, sequences = groups(m, "target_field"), groups(m, "sequence_field")
    parts = []
    for i, (target, sequence) in enumerate(zip(targets, sequences, strict=True)):
        history, wanted = m.joined(sequence), m.joined(target)
        there = m.values[sequence[0]] != PADDING
        length = there.shape[1]
        seen = (there.unsqueeze(1) | torch.eye(length).bool()) & torch.ones(length, length).tril().bool()
        refined = _refined(m, f"behavior_refiner.{i}", history, seen) if m.flag("use_behavior_refiner", True) else history
        parts += _interests(m, f"multi_interest_extractor.{i}", refined, wanted, seen, there)
        if m.flag("enable_sum_pooling", False):
            total = history.sum(1)
            parts += [total, wanted * total]
    parts += beside_sequences(m, sequences, "neg_seq_field")
    return mlp(m, "dnn", torch.cat(parts, 1), "dnn_activations", "Dice")


def _refined(m: Net, name: str, x: Tensor, seen: Tensor) -> Tensor:
    """FuxiCTR adds the mask to the scores as a number: 1 where a step must not be seen, 0 where it may."""
    hidden = 1 - seen.float().unsqueeze(1)
    out = _multi_head(m, f"{name}.attention", x, lambda scores: scores + hidden) + x
    out = m.layer_norm(f"{name}.layer_norm", out) if m.has(f"{name}.layer_norm") else out
    return m.linear(f"{name}.ffn.2", torch.relu(m.linear(f"{name}.ffn.0", out))) + out


def _interests(m: Net, name: str, x: Tensor, target: Tensor, seen: Tensor, there: Tensor) -> list[Tensor]:
    count = m.count("num_heads", 4)
    query, key, value = (heads(part, count) for part in m.linear(f"{name}.W_qkv", x).chunk(3, 2))
    mixed = attend(query, key, value, query.shape[-1] ** 0.5, seen.unsqueeze(1))
    out = []
    for i in range(count):
        step = m.linear(f"{name}.W_o.{i}", mixed[:, i]) + x
        step = m.layer_norm(f"{name}.layer_norm.{i}", step) if m.has(f"{name}.layer_norm") else step
        step = m.linear(f"{name}.ffn.{i}.2", torch.relu(m.linear(f"{name}.ffn.{i}.0", step))) + step
        out.append(_target_attention(m, f"{name}.target_attention.{i}", step, target, there))
    return out


def _target_attention(m: Net, name: str, x: Tensor, target: Tensor, there: Tensor) -> Tensor:
    query = target.unsqueeze(1).expand(-1, x.shape[1], -1)
    if m.has(f"{name}.pos_emb"):
        places = m.parameter(f"{name}.pos_emb").expand(x.shape[0], -1, -1)
        query = m.linear(f"{name}.W_proj", torch.cat([query, places], 2))
    return _attended(_query_scores(m, name, query, x), x, there)


def _query_scores(m: Net, name: str, query: Tensor, x: Tensor) -> Tensor:
    """[n, steps]: an MLP's, of each step beside a query for it."""
    given = m.setting("attention_activation", "ReLU", str, list, type(None))
    return stack(m, f"{name}.attn_mlp.mlp", beside(query, x), given, "attention_activation", output=True).squeeze(2)


def _attended(scores: Tensor, x: Tensor, there: Tensor) -> Tensor:
    return (scores.masked_fill(~there, -1e9).softmax(1).unsqueeze(2) * x).sum(1)


def dmr(m: Net) -> Tensor:
    """Lyu et al. 2020: how near the target is to the user, as the history foretells the next item, and to each step of it."""
    context = m.setting("context_field", "btag", str, list, tuple, type(None))
    if context is not None:
        raise InputError(f"{m.where}: context_field", context, "null: the library's own class fails with one")
    parts, sequences = [], groups(m, "sequence_field")
    for i, (target, sequence) in enumerate(zip(groups(m, "target_field"), sequences, strict=True)):
        history, wanted, there = m.joined(sequence), m.joined(target), m.values[sequence[0]] != PADDING
        scores = _step_scores(m, f"i2i_net.{i}", history, wanted)
        parts.append(_attended(scores, history, there))
        if m.flag("enable_i2i_rel", False):
            parts.append((scores * there).sum(1, keepdim=True))
        if m.flag("enable_u2i_rel", True):
            parts.append(_user_to_item(m, f"u2i_net.{i}", history, there, target))
        if m.flag("enable_sum_pooling", False):
            total = history.sum(1)
            parts += [total, wanted * total]
    m.skip(*([] if m.flag("enable_u2i_rel", True) else ["output_emb_layer"]))
    parts += beside_sequences(m, sequences, "neg_seq_field")
    return mlp(m, "dnn", torch.cat(parts, 1), "dnn_activations")


def _user_to_item(m: Net, name: str, history: Tensor, there: Tensor, target: list[str]) -> Tensor:
    """[n, 1]: the item that is to follow the last step, by attention over all, times the target's second embedding."""
    scores = _step_scores(m, name, history, None)
    seen = there | (torch.arange(there.shape[1]) == there.shape[1] - 1)
    user = _attended(scores, history, seen)
    tables = [m.parameter(f"output_emb_layer.{feature}.weight") for feature in target]
    item = torch.cat([functional.embedding(m.values[f], t) for f, t in zip(target, tables, strict=True)], 1)
    return (torch.relu(m.linear(f"{name}.W_o.0", user)) * item).sum(1, keepdim=True)


def _step_scores(m: Net, name: str, x: Tensor, target: Tensor | None) -> Tensor:
    """[n, steps]: an MLP's, of each step against a query of its place and, if there is one, the target."""
    known = [] if target is None else [target.unsqueeze(1).expand(-1, x.shape[1], -1)]
    if m.has(f"{name}.pos_emb"):
        known.append(m.parameter(f"{name}.pos_emb").expand(x.shape[0], -1, -1))
    return _query_scores(m, name, torch.relu(m.linear(f"{name}.W_q.0", torch.cat(known, 2))), x)
