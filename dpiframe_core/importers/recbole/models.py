"""RecBole's context-aware models as functions of their parameters, to the logit, [n, 1].

Names are those of recbole/model/context_aware_recommender. Hidden layers have ReLU but for NFM's, which have the sigmoid.
Embeddings come as the library joins them: lists, tokens, numbers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from dpiframe_core.importers.networks.layers import attend, bi_interaction, heads, pair_sum, stack, unheads
from dpiframe_core.importers.networks.net import Logit, Net

FIRST_ORDER = "first_order_linear"


def fm(m: Net) -> Tensor:
    """Rendle 2010."""
    return m.first_order(FIRST_ORDER) + pair_sum(m.fields())


def nfm(m: Net) -> Tensor:
    """He & Chua 2017, a batch norm on the pooled products."""
    hidden = stack(m, "mlp_layers.mlp_layers", m.batch_norm("bn", bi_interaction(m.fields())), "sigmoid", "", output=False)
    return m.linear("predict_layer", hidden) + m.first_order(FIRST_ORDER)


def deepfm(m: Net) -> Tensor:
    """Guo et al. 2017."""
    return m.first_order(FIRST_ORDER) + pair_sum(m.fields()) + _deep(m)


def wide_deep(m: Net) -> Tensor:
    """Cheng et al. 2016."""
    return m.first_order(FIRST_ORDER) + _deep(m)


def dcn(m: Net) -> Tensor:
    """Wang et al. 2017. The library makes first-order weights for it, too, which it does not read."""
    m.skip(FIRST_ORDER)
    x0 = m.x()
    x = x0
    for i in m.children("cross_layer_w"):
        x = x0 * (x * m.parameter(f"cross_layer_w.{i}")).sum(1, keepdim=True) + m.parameter(f"cross_layer_b.{i}") + x
    return m.linear("predict_layer", torch.cat([x, _hidden(m, x0)], 1))


def xdeepfm(m: Net) -> Tensor:
    """Lian et al. 2018. Its CIN's layers have ReLU, and so has the MLP's last one."""
    fields, direct = m.fields(), m.flag("direct", False)
    x, layers, kept = fields, m.children("conv1d_list"), []
    for i in layers:
        weight, bias = m.parameter(f"conv1d_list.{i}.weight"), m.parameter(f"conv1d_list.{i}.bias")
        products = torch.einsum("nhd,nmd->nhmd", x, fields).flatten(1, 2)
        out = torch.relu(functional.conv1d(products, weight, bias))
        if direct or i == layers[-1]:
            kept.append(out)
            x = out
        else:
            x, own = torch.chunk(out, 2, 1)
            kept.append(own)
    summed = torch.cat([torch.cat(kept, 1).sum(2), _hidden(m, fields.flatten(1))], 1)
    weight = functional.pad(m.parameter("cin_linear.weight"), (0, 1), value=1.0)  # one product for both: a head takes it
    return m.first_order(FIRST_ORDER) + functional.linear(summed, weight, m.parameter("cin_linear.bias"))


def autoint(m: Net) -> Tensor:
    """Song et al. 2019, by torch's attention: one residual, and a ReLU, behind the last of its layers."""
    fields, count = m.fields(), m.count("num_heads", 2)
    x = m.linear("att_embedding", fields)
    for i in m.children("self_attns"):
        name = f"self_attns.{i}"
        projected = functional.linear(x, m.parameter(f"{name}.in_proj_weight"), m.parameter(f"{name}.in_proj_bias"))
        query, key, value = (heads(part, count) for part in torch.chunk(projected, 3, 2))
        x = m.linear(f"{name}.out_proj", unheads(attend(query, key, value, query.shape[-1] ** 0.5)))
    if m.has("v_res_embedding"):
        x = x + m.linear("v_res_embedding", fields)
    return m.first_order(FIRST_ORDER) + m.linear("attn_fc", torch.relu(x).flatten(1)) + _deep(m)


def _hidden(m: Net, x: Tensor) -> Tensor:
    return stack(m, "mlp_layers.mlp_layers", x, "relu", "", output=False)


def _deep(m: Net) -> Tensor:
    return m.linear("deep_predict_layer", _hidden(m, m.x()))


MODELS: Mapping[str, Logit] = {
    "AutoInt": autoint, "DCN": dcn, "DeepFM": deepfm, "FM": fm, "NFM": nfm, "WideDeep": wide_deep, "xDeepFM": xdeepfm,
}  # fmt: skip
SETTINGS: Mapping[str, tuple[str, ...]] = {"AutoInt": ("num_heads",), "DIEN": ("gru_type",), "xDeepFM": ("direct",)}
# Of the library, but not imported.
STAYS_OUT: Mapping[str, str] = {
    "FwFM": "it keeps the weights of its pairs outside of its state_dict, so no checkpoint has them"
}
