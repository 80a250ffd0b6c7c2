"""Models of the zoo in which fields look at one another: attention, graphs, and two streams that meet in a bilinear product.

Every function gives the logit, [n, 1]; names and defaults are those of FuxiCTR's `model_zoo/*/src/*.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.errors import InputError
from dpiframe_core.importers.networks.layers import attend, heads, mlp, unheads, weighted_sum
from dpiframe_core.importers.networks.net import Net


def autoint(m: Net) -> Tensor:
    """Song et al. 2019: layers of self-attention over the fields; with an MLP it is AutoInt+."""
    fields = m.fields()
    x = fields
    for i in m.children("self_attention"):
        x = _interacting_layer(m, f"self_attention.{i}", x)
    logit = m.linear("fc", x.flatten(1))
    if m.has("dnn"):
        logit = logit + mlp(m, "dnn", fields.flatten(1), "dnn_activations")
    return logit + m.first_order("lr_layer") if m.flag("use_wide", False) else logit


def dssm(m: Net) -> Tensor:
    """Huang et al. 2013: a tower of the user's fields and one of the item's; their inner product."""
    m.skip(*(f"embedding_layer.embedding_layers.{f.name}" for f in m.features if f.source not in ("user", "item")))
    user, item = (torch.cat(m.of_source(source), 1) for source in ("user", "item"))
    user, item = mlp(m, "user_tower", user, "user_tower_activations"), mlp(m, "item_tower", item, "item_tower_activations")
    return (user * item).sum(1, keepdim=True)


def _interacting_layer(m: Net, name: str, x: Tensor) -> Tensor:
    """relu(layer_norm(attention + W_res x)) (eq. 8); FuxiCTR's norm stands ahead of the ReLU."""
    count = m.count("num_heads", 1)
    query, key, value = (heads(m.linear(f"{name}.W_{part}", x), count) for part in "qkv")
    out = unheads(attend(query, key, value, query.shape[-1] ** 0.5 if m.flag("use_scale", False) else None))
    if m.flag("use_residual", True):
        out = out + (m.linear(f"{name}.W_res", x) if m.has(f"{name}.W_res") else x)
    return torch.relu(m.layer_norm(f"{name}.layer_norm", out) if m.has(f"{name}.layer_norm") else out)


def _mixed_heads(x: Tensor, count: int) -> Tensor:
    """[n, fields, count * d] -> [n, count, fields, d], as a plain view: some of FuxiCTR's models split heads across fields."""
    return torch.unflatten(x.flatten(1), 1, (count, x.shape[1], -1))


def _unmixed_heads(x: Tensor, fields: int) -> Tensor:
    return torch.unflatten(x.flatten(1), 1, (fields, -1))


def interhat(m: Net) -> Tensor:
    """Li et al. 2020: attention, then one aggregation for each order of interactions."""
    x0 = m.fields()
    x1 = _feed_forward(m, "feedforward", _interhat_attention(m, "multi_head_attention", x0))
    aggregated, x, order = [], x1, m.count("order", 2)
    for i in range(order):
        u = weighted_sum(m, f"aggregation_layers.{i}.agg", x)
        aggregated.append(u)
        x = u.unsqueeze(1) * x1 + x if i + 1 < order else x
    pooled = weighted_sum(m, "attentional_score.agg", torch.stack(aggregated, 1))
    return mlp(m, "mlp", pooled, "hidden_activations", "relu")


def _interhat_attention(m: Net, name: str, x: Tensor) -> Tensor:
    count = m.count("num_heads", 1)
    query, key, value = (_mixed_heads(m.linear(f"{name}.W_{part}", x), count) for part in "qkv")
    out = _unmixed_heads(attend(query, key, value, query.shape[-1] ** 0.5), x.shape[1])
    out = torch.relu(m.linear(f"{name}.W_res", out) if m.has(f"{name}.W_res") else out)
    out = out + x if m.flag("use_residual", True) else out
    return m.layer_norm(f"{name}.layer_norm", out) if m.has(f"{name}.layer_norm") else out


def _feed_forward(m: Net, name: str, x: Tensor) -> Tensor:
    out = m.linear(f"{name}.ffn.2", torch.relu(m.linear(f"{name}.ffn.0", x)))
    out = out + x if m.flag("use_residual", True) else out
    return m.layer_norm(f"{name}.layer_norm", out) if m.has(f"{name}.layer_norm") else out


def destine(m: Net) -> Tensor:
    """Xu et al. 2021: attention taken apart into pairs, of whitened queries and keys, and single fields."""
    fields = m.fields()
    mode = m.choice("residual_mode", "each_layer", "each_layer", "last_layer")
    x = fields
    for i in m.children("self_attns"):
        x = _disentangled(m, f"self_attns.{i}", x)
    if mode == "last_layer":
        x = x + m.linear("W_res", fields)
    logit = m.linear("attn_fc", x.flatten(1))
    logit = logit + m.first_order("lr") if m.has("lr") else logit
    return logit + mlp(m, "dnn", fields.flatten(1), "dnn_activations") if m.has("dnn") else logit


def _disentangled(m: Net, name: str, x: Tensor) -> Tensor:
    count, parts = m.count("num_heads", 2), [m.linear(f"{name}.W_{part}", x) for part in "qkv"]
    if m.flag("relu_before_att", False):
        parts = [torch.relu(part) for part in parts]
    query, key, value = (_mixed_heads(part, count) for part in parts)
    scores = (query - query.mean(2, keepdim=True)) @ (key - key.mean(2, keepdim=True)).transpose(2, 3)
    scores = scores / query.shape[-1] ** 0.5 if m.flag("use_scale", False) else scores
    single = torch.unflatten(m.linear(f"{name}.W_unary", x).softmax(1).flatten(1), 1, (count, 1, -1))
    out = _unmixed_heads((scores.softmax(3) + single) @ value, x.shape[1])
    return out + m.linear(f"{name}.W_res", x) if m.has(f"{name}.W_res") else out


def aoanet(m: Net) -> Tensor:
    """Lang et al. 2021: generalized interactions, products of the fields with the subspaces of the layer before."""
    fields = m.fields()
    x = fields
    for i in m.children("gin.layers"):
        x = _generalized(m, f"gin.layers.{i}", fields, x)
    deep = mlp(m, "dnn", fields.flatten(1), "dnn_hidden_activations", output=False)
    return m.linear("fc", torch.cat([deep, x.flatten(1)], 1))


def _generalized(m: Net, name: str, fields: Tensor, x: Tensor) -> Tensor:
    """z_o = sum over subspaces s and fields f of alpha[s f, o] v_f * (W_o diag(h_o) x_s): [n, outputs, dim]."""
    weight, alpha, h = (m.parameter(f"{name}.{part}") for part in ("W", "alpha", "h"))
    projected = torch.einsum("nsd,ohd->nosh", x, weight * h.transpose(1, 2))
    mixed = torch.einsum("nosh,sfo->nofh", projected, alpha.reshape(x.shape[1], fields.shape[1], -1))
    return (mixed * fields.unsqueeze(1)).sum(2)


def sam(m: Net) -> Tensor:
    """Cheng & Xue 2021: products of embeddings weighed by their dots, of second or, in layers, third order."""
    fields = m.fields()
    kind = m.choice("interaction_type", "SAM2E", "SAM2A", "SAM2E", "SAM3A", "SAM3E")
    x = fields
    for i in m.children("block.layers") if kind in ("SAM2A", "SAM3A", "SAM3E") else [0]:
        x = _sam_layer(m, f"block.layers.{i}", x, kind)
    match m.choice("aggregation", "concat", "concat", "weighted_pooling", "mean_pooling", "sum_pooling"):
        case "concat":
            x = x.flatten(1)
        case "weighted_pooling":
            x = (x * m.parameter("block.weight")).sum(1)
        case "mean_pooling":
            x = x.mean(1)
        case _:
            x = x.sum(1)
    return m.linear("fc", x)


def _sam_layer(m: Net, name: str, x: Tensor, kind: str) -> Tensor:
    """[n, fields, fields, dim] of second order, [n, fields, dim] of third."""
    second = kind.startswith("SAM2")
    dots = x @ (x if second else m.linear(f"{name}.K", x)).transpose(1, 2)
    if second:
        return dots.unsqueeze(3) * (m.parameter(f"{name}.W") if kind == "SAM2A" else x.unsqueeze(2) * x.unsqueeze(1))
    pooled = torch.einsum("nij,ijd->nid", dots, m.parameter(f"{name}.W")) if kind == "SAM3A" else x * (dots @ x)
    return pooled + m.linear(f"{name}.Q", x) if m.has(f"{name}.Q") else pooled


def fignn(m: Net) -> Tensor:
    """Li et al. 2019: messages between fields along a graph weighed by attention, taken in by a gated recurrent unit."""
    fields = m.fields()
    count, dim = fields.shape[1], fields.shape[2]
    source, target = torch.split(m.parameter("fignn.W_attn.weight"), dim, 1)
    edges = functional.leaky_relu(functional.linear(fields, source) + functional.linear(fields, target).transpose(1, 2), 0.01)
    graph = edges.masked_fill(torch.eye(count).bool(), float("-inf")).softmax(2)
    reused = m.flag("reuse_graph_layer", False)
    h = fields
    for i in range(m.count("gnn_layers", 3)):
        layer = "fignn.gnn" if reused else f"fignn.gnn.{i}"
        sent = torch.einsum("fed,nfd->nfe", m.parameter(f"{layer}.W_out"), h)
        got = torch.einsum("fed,nfd->nfe", m.parameter(f"{layer}.W_in"), graph @ sent) + m.parameter(f"{layer}.bias_p")
        h = _gru_cell(m, "fignn.gru", got, h) if m.flag("use_gru", True) else got + h
        h = h + fields if m.flag("use_residual", True) else h
    score = m.linear("fc.mlp1", h).squeeze(2)
    return (torch.sigmoid(m.linear("fc.mlp2.0", h.flatten(1))) * score).sum(1, keepdim=True)


def _gru_cell(m: Net, name: str, x: Tensor, h: Tensor) -> Tensor:
    """Cho et al. 2014, as torch's GRUCell: gates in the order reset, update, new."""
    of_x, of_h = (
        functional.linear(v, m.parameter(f"{name}.weight_{p}"), m.parameter(f"{name}.bias_{p}")).chunk(3, -1)
        for v, p in ((x, "ih"), (h, "hh"))
    )
    reset, update = (torch.sigmoid(of_x[i] + of_h[i]) for i in (0, 1))
    return (1 - update) * torch.tanh(of_x[2] + reset * of_h[2]) + update * h


def finalmlp(m: Net) -> Tensor:
    """Mao et al. 2023: two MLPs on gated embeddings, joined by a bilinear product of several heads."""
    x = m.x()
    first, second = (_gated(m, i, x) for i in (1, 2)) if m.flag("use_fs", True) else (x, x)
    left = mlp(m, "mlp1", first, "mlp1_hidden_activations", output=False)
    right = mlp(m, "mlp2", second, "mlp2_hidden_activations", output=False)
    logit = m.linear("fusion_module.w_x", left) + m.linear("fusion_module.w_y", right)
    count = m.count("num_heads", 1)
    a, b = torch.unflatten(left, 1, (count, -1)), torch.unflatten(right, 1, (count, -1))
    weight = m.parameter("fusion_module.w_xy").reshape(count, a.shape[2], b.shape[2])
    products = torch.einsum("nha,hab->nhb", a, weight) * b
    return logit + products.flatten(1).sum(1, keepdim=True)


def _gated(m: Net, stream: int, x: Tensor) -> Tensor:
    """x times a gate made of a learned vector, or of context features: 2 sigmoid(MLP)."""
    key = f"fs{stream}_context"
    names = m.setting(key, [], list, type(None)) or []
    if not isinstance(names, list) or not all(name in {f.name for f in m.features} for name in names):
        raise InputError(f"{m.where}: {key}", names, "names of features of the run")
    if names:
        context = torch.cat(m.vectors(f"fs_module.fs{stream}_ctx_emb", names), 1)
    else:
        context = m.parameter(f"fs_module.fs{stream}_ctx_bias")
    gate = mlp(m, f"fs_module.fs{stream}_gate", context, "fs_hidden_activations", last="sigmoid")
    return x * (gate * 2)
