"""Models of the zoo whose layers differ from row to row: scaled by gates, or with weights that a network makes.

Every function gives the logit, [n, 1]; names and defaults are those of FuxiCTR's `model_zoo/*/src/*.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.importers.networks.layers import activation, activations, dice, pair_sum, stack
from dpiframe_core.importers.networks.net import Net


def ppnet(m: Net) -> Tensor:
    """Chang et al. 2023, PEPNet's parameter part: gates of priors and embeddings scale every hidden layer by 0 to 2."""
    x = m.x()
    given = m.setting("gate_priors", [], list)
    assert isinstance(given, list)
    gated = torch.cat([x, *m.vectors("gate_embed_layer", only=[str(name) for name in given])], 1)
    *layers, last = m.children("ppn.mlp_layers")
    for i, name in zip(layers, activations(m, "hidden_activations", len(layers)), strict=True):
        x = stack(m, f"ppn.mlp_layers.{i}", x, name, "hidden_activations", output=False)
        x = x * 2 * stack(m, f"ppn.gate_layers.{i}.gate", gated, "relu", "", output=True, last="sigmoid")
    return m.linear(f"ppn.mlp_layers.{last}", x)


def qnn_alpha(m: Net) -> Tensor:
    """Li et al. 2025: x times the sum of a few ReLU layers of x, head by head, and x."""
    fields = m.fields()
    x, count, rows = fields.flatten(1), m.count("num_heads", 1), m.count("num_row", 2)
    for i in m.children("qnn.layer"):
        made = stack(m, f"qnn.layer.{i}.linear", x, "relu", "", output=False)
        scales = torch.unflatten(made, 1, (count, rows, -1)).sum(2)
        by_head = torch.unflatten(x, 1, (fields.shape[1], count, -1)).transpose(1, 2).flatten(2)
        x = (by_head * scales).flatten(1) + x
    return m.linear("qnn.fc", x)


def apg_deep_fm(m: Net) -> Tensor:
    """Yan et al. 2022, adaptive parameter generation, of DeepFM's MLP."""
    fields = m.fields()
    deep = _generated_mlp(m, "mlp", fields.flatten(1), "hidden_activations")
    return m.first_order("fm.lr_layer") + pair_sum(fields) + m.linear("mlp.dense_layers.out_proj", deep)


def apg_dcn_v2(m: Net) -> Tensor:
    """The same, of DCNv2's MLPs, behind the cross network, beside it, or both."""
    x, key = m.x(), "dnn_activations"
    crossed = _mixed_cross(m, "crossnet", x) if m.flag("use_low_rank_mixture", False) else _cross(m, "crossnet", x)
    structure = m.choice("model_structure", "parallel", "crossnet_only", "stacked", "parallel", "stacked_parallel")
    if structure.startswith("stacked"):
        crossed = _generated_mlp(m, "stacked_dnn", crossed, key)
    if structure.endswith("parallel"):
        crossed = torch.cat([crossed, _generated_mlp(m, "parallel_dnn", x, key)], 1)
    return m.linear("fc", crossed)


def _cross(m: Net, name: str, x0: Tensor) -> Tensor:
    """x + x0 * (W x + b) (Wang et al. 2021, eq. 1)."""
    x = x0
    for i in m.children(f"{name}.cross_layers"):
        x = x + x0 * m.linear(f"{name}.cross_layers.{i}", x)
    return x


def _mixed_cross(m: Net, name: str, x0: Tensor) -> Tensor:
    """x + sum over experts of gate * x0 * (U tanh(C tanh(V^T x)) + b) (eq. 3 and 4)."""
    x, experts = x0, m.children(f"{name}.gating")
    for i in m.children(f"{name}.U_list"):
        u, v, c = (m.parameter(f"{name}.{part}_list.{i}") for part in "UVC")  # [experts, width, rank], C [experts, rank, rank]
        bias = m.parameter(f"{name}.bias.{i}").squeeze(1)
        gates = torch.cat([m.linear(f"{name}.gating.{e}", x) for e in experts], 1).softmax(1)
        inner = [torch.tanh(torch.tanh(x @ v[e]) @ c[e].t()) for e in experts]
        crossed = torch.stack([(inner[e] @ u[e].t() + bias) * x0 for e in experts], 1)
        x = x + (gates.unsqueeze(2) * crossed).sum(1)
    return x


def _generated_mlp(m: Net, name: str, x: Tensor, key: str) -> Tensor:
    """Layers whose core [rank, rank] a network makes of each row's condition: the layer's own input, or some features."""
    condition = None
    if m.choice("condition_mode", "self-wise", "self-wise", "group-wise", "mix-wise") != "self-wise":
        given = m.setting("condition_features", [], list)
        assert isinstance(given, list)
        own = m.flag("new_condition_emb", False)
        condition = torch.cat(m.vectors("condition_emb_layer" if own else "embedding_layer", only=[str(f) for f in given]), 1)
    layers = [i for i in range(1, 100) if m.has(f"{name}.dense_layers.linear_{i}")]
    for i, given in zip(layers, activations(m, key, len(layers)), strict=True):
        x = _generated_layer(m, f"{name}.dense_layers.linear_{i}", x, x if condition is None else condition)
        norm, act = (f"{name}.dense_layers.{part}_{i}" for part in ("bn", "act"))
        x = m.batch_norm(norm, x) if m.has(norm) else x
        if m.has(f"{act}.alpha"):
            x = dice(m, act, x)
        else:
            x = functional.prelu(x, m.parameter(f"{act}.weight")) if m.has(act) else activation(m, given, x, key)
    return x


def _generated_layer(m: Net, name: str, x: Tensor, condition: Tensor) -> Tensor:
    """x U S(z) V + b(z) (eq. 4 to 7); without a rank x S(z)."""
    config = m.setting("hypernet_config", {}, dict)
    assert isinstance(config, dict)
    given = config.get("hidden_activations", "ReLU")
    made = stack(m, f"{name}.hypernet.mlp", condition, given, "hypernet_config.hidden_activations", output=True)
    low = m.has(f"{name}.V") or m.has(f"{name}.V_r")
    u = v = None
    if low and m.has(f"{name}.U_l"):
        u, v = (m.parameter(f"{name}.{part}_l") @ m.parameter(f"{name}.{part}_r") for part in "UV")
        m.skip(f"{name}.U", f"{name}.V")
    elif low:
        u, v = m.parameter(f"{name}.U"), m.parameter(f"{name}.V")
    x = x if u is None else x @ u
    bias = m.parameter(f"{name}.bias") if m.has(f"{name}.bias") else None
    if m.flag("generate_bias", True):
        outputs = v.shape[1] if v is not None else made.shape[1] // (x.shape[1] + 1)
        bias, made = made[:, :outputs], made[:, outputs:]
    x = (x.unsqueeze(1) @ torch.unflatten(made, 1, (x.shape[1], -1))).squeeze(1)
    x = x if v is None else x @ v
    return x if bias is None else x + bias
