"""FuxiCTR's DIN and DLRM, under the attribute names of its model zoo: target attention over sequences, dots of embeddings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.graph.architecture import DIN, DLRM, TargetAttention
from dpiframe_core.importers.fuxictr.files import FuxiRun
from dpiframe_core.importers.fuxictr.layers import FuxiReader
from dpiframe_core.importers.source_interactions import Attention, pairs, pairs_from
from dpiframe_core.importers.source_layers import Mlp, with_columns
from dpiframe_core.importers.source_model import Inputs, SourceLayers, SourceModel
from dpiframe_core.importers.state_dict import StateDict


def din(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    """model_zoo/DIN: attention pools each group of sequences in the place of their embeddings; an MLP on all."""
    where = str(run.files.config)
    targets, sequences = (_groups(run, key) for key in ("din_target_field", "din_sequence_field"))
    if list(map(len, targets)) != list(map(len, sequences)):
        raise InputError(f"{where}: din_sequence_field", sequences, f"as many fields as in {targets}")
    r = FuxiReader(run, weights, unpooled=[name for group in sequences for name in group])
    r.embeddings("embedding_layer")
    dim, softmax = r.count("embedding_dim"), bool(run.config.get("din_use_softmax", False))
    units = [
        Attention(*r.attention(f"attention_layers.{i}.attention_layer", dim * len(group)), softmax)
        for i, group in enumerate(targets)
    ]
    mlp, head = r.tower("dnn", "dnn_hidden_units", "dnn_activations")
    dense = mlp.parameters("deep") | head.parameters("head")
    attention = []
    for i, (unit, target, sequence) in enumerate(zip(units, targets, sequences, strict=True)):
        dense |= unit.parameters(f"attention.{i}")
        kinds = unit.mlp.activations
        if isinstance(kinds, tuple):
            raise InputError(f"{where}: attention_hidden_activations", list(kinds), "one activation for all layers")
        attention.append(
            TargetAttention(
                targets=tuple(target),
                sequences=tuple(sequence),
                hidden_units=unit.mlp.units,
                activation=kinds,
                output_activation=unit.output_kind,
                softmax=softmax,
            )
        )
    architecture = DIN(attention=tuple(attention), hidden_units=mlp.units, activation=mlp.activations)

    def logit(i: Inputs) -> Tensor:
        interests: dict[str, Tensor] = {}
        for unit, target, sequence in zip(units, targets, sequences, strict=True):
            query = torch.cat([i.named(name) for name in target], 1)
            keys = torch.cat([i.sequence(name)[0] for name in sequence], 2)
            pooled = unit(query, keys, i.sequence(sequence[0])[1])
            interests |= dict(zip(sequence, torch.split(pooled, dim, 1), strict=True))
        parts = [interests[f.name] if f.name in interests else i.named(f.name) for f in r.fields]
        return head(mlp(torch.cat(parts, 1)))

    return r.model("DIN", SourceLayers(architecture, dense, logit), context, first_order=False)


def dlrm(run: FuxiRun, weights: StateDict, context: Sequence[str]) -> SourceModel:
    """model_zoo/DLRM: an MLP on the numbers, dots of it and all embeddings, an MLP on the dots and it."""
    r = FuxiReader(run, weights)
    operation = r.setting("interaction_op", str)
    if operation != "dot":
        raise InputError(f"{r.where}: interaction_op", operation, "dot")
    numbers = [f.name for f in r.fields if f.kind == "numeric"]
    if not numbers:
        raise InputError(f"{run.files.feature_map}: features", "no numeric ones", "some for the bottom MLP")
    r.embeddings("embedding_layer.embedding_layer", skip=numbers)
    dim, fields = r.count("embedding_dim"), len(r.fields) - len(numbers) + 1
    hidden, last = r.tower("bottom_mlp", "bottom_mlp_units", "bottom_mlp_activations", len(numbers), outputs=dim)
    bottom = Mlp((*hidden.layers, r.activated(last, "bottom_mlp_activations")))
    weights.drop("interact.triu_mask")
    top, head = r.tower("top_mlp", "top_mlp_units", "top_mlp_activations", fields * (fields - 1) // 2 + dim)
    kinds = Mlp(bottom.layers + top.layers).activations
    if isinstance(kinds, tuple):
        raise InputError(f"{r.where}: top_mlp_activations", list(kinds), "the same activation in both MLPs")
    # FuxiCTR's vectors are the embeddings and then the numbers', its pairs go along rows of the upper triangle.
    order = pairs_from([fields - 1, *range(fields - 1)], upper=True)
    columns = [*range(len(order), len(order) + dim), *order]
    ours, our_head = with_columns(top, head, columns)
    dense = bottom.parameters("bottom") | ours.parameters("deep") | our_head.parameters("head")
    architecture = DLRM(bottom_units=bottom.units, hidden_units=top.units, activation=kinds)

    def logit(i: Inputs) -> Tensor:
        z = bottom(torch.cat([i.named(name) for name in numbers], 1))
        vectors = torch.cat([i.fields(), z[:, None]], 1)
        return head(top(torch.cat([pairs(vectors, upper=True), z], 1)))

    return r.model("DLRM", SourceLayers(architecture, dense, logit), context, first_order=False, numbers=False)


def _groups(run: FuxiRun, key: str) -> list[list[str]]:
    """A field, or a list of fields and groups of them."""
    where, given = f"{run.files.config}: {key}", run.config.get(key)
    groups = [list(g) if isinstance(g, list) else [g] for g in (given if isinstance(given, list) else [given])]
    for name in (name for group in groups for name in group):
        if name not in run.features:
            raise InputError(where, name, "a feature of the run, or lists of them")
    return [[str(name) for name in group] for group in groups]
