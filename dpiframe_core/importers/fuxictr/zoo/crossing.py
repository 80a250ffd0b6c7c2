"""Models of the zoo that cross all embeddings at once, side by side or in parallel with an MLP.

Every function gives the logit, [n, 1]; names and defaults are those of FuxiCTR's `model_zoo/*/src/*.py`.
"""

import torch
from torch import Tensor

from dpiframe_core.errors import InputError
from dpiframe_core.importers.networks.layers import activation, activations, cross, mlp, stack
from dpiframe_core.importers.networks.net import Net


def dnn(m: Net) -> Tensor:
    """An MLP on all embeddings."""
    return mlp(m, "mlp", m.x(), "hidden_activations")


def dual_mlp(m: Net) -> Tensor:
    """Mao et al. 2023: the sum of two MLPs."""
    x = m.x()
    return mlp(m, "mlp1", x, "mlp1_hidden_activations") + mlp(m, "mlp2", x, "mlp2_hidden_activations")


def deep_crossing(m: Net) -> Tensor:
    """Shan et al. 2016: residual blocks of two layers. One activation serves within a block and at its end."""
    x = m.x()
    *blocks, last = m.children("crossing_layer")
    for i, name in zip(blocks, activations(m, "hidden_activations", len(blocks)), strict=True):
        at = f"crossing_layer.{i}"
        out = activation(m, name, m.linear(f"{at}.layer.0", x), "hidden_activations")
        out = m.linear(f"{at}.layer.2", out)
        out = out + x if m.flag("use_residual", True) else out
        out = m.batch_norm(f"{at}.batch_norm", out) if m.has(f"{at}.batch_norm") else out
        x = activation(m, name, out, "hidden_activations")
    return m.linear(f"crossing_layer.{last}", x)


def gdcn(m: Net) -> Tensor:
    """Wang et al. 2023, gated cross layers, then an MLP."""
    return mlp(m, "dnn", _gated_cross(m, m.x()), "dnn_activations")


def gdcn_p(m: Net) -> Tensor:
    """The same in parallel with the MLP."""
    x = m.x()
    return m.linear("fc", torch.cat([_gated_cross(m, x), mlp(m, "dnn", x, "dnn_activations", output=False)], 1))


def _gated_cross(m: Net, x0: Tensor) -> Tensor:
    """x0 * (W x + b) * sigmoid(G x) + x (eq. 4)."""
    x = x0
    for i in m.children("cross_net.w"):
        gate = torch.sigmoid(m.linear(f"cross_net.wg.{i}", x))
        x = x0 * (m.linear(f"cross_net.w.{i}", x) + m.parameter(f"cross_net.b.{i}")) * gate + x
    return x


def ecn(m: Net) -> Tensor:
    """Li et al. 2024, the exponential cross network alone: each layer crosses with the one before; the mean over heads."""
    return m.linear("ECN.fc", _self_masked_cross(m, "ECN", _split_fields(m), exponential=True)).mean(1)


def dcn_v3(m: Net) -> Tensor:
    """The same, beside a linear one, whose layers cross with the first: the mean of the two."""
    x = _split_fields(m)
    deep = m.linear("ECN.dfc", _self_masked_cross(m, "ECN", x, exponential=True)).mean(1)
    shallow = m.linear("LCN.sfc", _self_masked_cross(m, "LCN", x, exponential=False)).mean(1)
    return 0.5 * (deep + shallow)


def _split_fields(m: Net) -> Tensor:
    """[n, heads, width]: a head's share of every field, first halves of all, then second ones."""
    fields = m.fields("embedding_layer.embedding_layer")
    by_head = torch.unflatten(fields, 2, (m.count("num_heads", 1), -1)).transpose(1, 2)
    return torch.cat([half.flatten(2) for half in by_head.chunk(2, 3)], 2)


def _self_masked_cross(m: Net, name: str, x0: Tensor, *, exponential: bool) -> Tensor:
    """x * ([c | c mask] + b) + x, c = W x of half the width, mask = relu(norm(c)); of a linear one x0 * (..) + x."""
    x = x0
    for i in m.children(f"{name}.w"):
        c = m.linear(f"{name}.w.{i}", x)
        c = m.batch_norm(f"{name}.batch_norm.{i}", c) if m.has(f"{name}.batch_norm.{i}") else c
        mask = torch.relu(m.layer_norm(f"{name}.layer_norm.{i}", c) if m.has(f"{name}.layer_norm.{i}") else c)
        x = (x if exponential else x0) * (torch.cat([c, c * mask], 2) + m.parameter(f"{name}.b.{i}")) + x
    return x


def edcn(m: Net) -> Tensor:
    """Chen et al. 2021: a bridge joins the cross and the deep part after every layer, a regulation weighs the fields anew."""
    fields, layers = m.fields(), m.children("cross_layers")
    kind = m.choice(
        "bridge_type", "hadamard_product", "hadamard_product", "pointwise_addition", "concatenation", "attention_pooling"
    )
    x0, deep = _regulated(m, "regulation_modules.0", fields.flatten(1), fields.shape[2])
    crossed = x0
    for i in layers:
        crossed = cross(m, f"cross_layers.{i}", x0, crossed)
        deep = mlp(m, f"dense_layers.{i}", deep, "hidden_activations", output=False)
        bridge = _bridge(m, f"bridge_modules.{i}", crossed, deep, kind)
        if i + 1 < len(layers):
            crossed, deep = _regulated(m, f"regulation_modules.{i + 1}", bridge, fields.shape[2])
    return m.linear("fc", torch.cat([crossed, deep, bridge], 1))


def _regulated(m: Net, name: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """x weighed by a softmax over the fields, once for the cross part and once for the deep one (eq. 6)."""
    temperature = m.setting("temperature", 1, int, float)
    assert isinstance(temperature, int | float)
    parts = []
    for i in (1, 2):
        gate = (m.parameter(f"{name}.g{i}") / temperature).softmax(0).repeat_interleave(dim)
        part = gate * x
        parts.append(m.batch_norm(f"{name}.bn{i}", part) if m.has(f"{name}.bn{i}") else part)
    return parts[0], parts[1]


def _bridge(m: Net, name: str, crossed: Tensor, deep: Tensor, kind: str) -> Tensor:
    match kind:
        case "hadamard_product":
            return crossed * deep
        case "pointwise_addition":
            return crossed + deep
        case "concatenation":
            return torch.relu(m.linear(f"{name}.concat_pooling.0", torch.cat([crossed, deep], 1)))
    m.skip(f"{name}.attention2")  # the library makes it and reads the first one twice

    def weighed(x: Tensor) -> Tensor:
        return m.linear(f"{name}.attention1.2", torch.relu(m.linear(f"{name}.attention1.0", x))).softmax(1) * x

    return weighed(crossed) + weighed(deep)


def final_net(m: Net) -> Tensor:
    """Zhu et al. 2023: blocks of factorized layers, h2 + h1 * h2 or the two side by side; one branch or the mean of two."""
    fields = m.fields()
    gated = fields
    if m.flag("use_feature_gating", False):
        gates = m.linear("feature_gating.linear", fields.transpose(1, 2)).transpose(1, 2)
        gated = torch.cat([fields, fields * gates], 1)
    first = m.linear("fc1", _final_block(m, "block1", gated.flatten(1)))
    if m.choice("block_type", "2B", "1B", "2B") == "1B":
        return first
    return 0.5 * (first + m.linear("fc2", _final_block(m, "block2", fields.flatten(1))))


def _final_block(m: Net, block: str, x: Tensor) -> Tensor:
    layers, key = m.children(f"{block}.layer"), f"{block}_hidden_activations"
    side_by_side = m.choice("residual_type", "concat", "concat", "sum") == "concat"
    for i, name in zip(layers, activations(m, key, len(layers), None), strict=True):
        second, first = m.linear(f"{block}.layer.{i}.linear", x).chunk(2, 1)
        x = torch.cat([second, first * second], 1) if side_by_side else second + first * second
        x = m.batch_norm(f"{block}.norm.{i}", x) if m.has(f"{block}.norm.{i}") else x
        x = activation(m, name, x, key)
    return x


def afn(m: Net) -> Tensor:
    """Cheng et al. 2020: products with learned exponents, through logarithms; a second embedding feeds an MLP."""
    logs = m.batch_norm("log_batch_norm", m.fields().abs().clamp(min=1e-5).log())
    powers = m.linear("coefficient_W", logs.transpose(1, 2)).transpose(1, 2).exp()
    logit = mlp(m, "dense_layer", m.batch_norm("exp_batch_norm", powers).flatten(1), "afn_activations")
    if not m.flag("ensemble_dnn", True):
        return logit
    return m.linear("fc", torch.cat([logit, mlp(m, "dnn", m.x("embedding_layer2"), "dnn_activations")], 1))


def euler_net(m: Net) -> Tensor:
    """Tian et al. 2023: fields as complex numbers; orders are learned as sums of their logarithms and angles."""
    fields, scale = m.fields(), m.parameter("mu")
    dim = fields.shape[2]
    real, imaginary = scale * fields.cos(), scale * fields.sin()
    for i in m.children("Euler_interaction_layers"):
        real, imaginary = _euler_layer(m, f"Euler_interaction_layers.{i}", real, imaginary, dim)
    return m.linear("reg", imaginary.flatten(1)) + m.linear("reg", real.flatten(1))


def _euler_layer(m: Net, name: str, real: Tensor, imaginary: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Explicit: exp(sum alpha log r) at the angle sum alpha theta (eq. 8 and 9); implicit: relu(W x + b) on both parts."""
    orders = m.parameter(f"{name}.inter_orders")

    def mixed(x: Tensor, bias: str) -> Tensor:
        return (x.transpose(1, 2) @ orders + m.parameter(f"{name}.{bias}")).transpose(1, 2)

    radius = mixed(0.5 * (real**2 + imaginary**2 + 1e-8).log(), "bias_lam").exp()
    angle = mixed(torch.atan2(imaginary, real), "bias_theta")
    implicit = [torch.unflatten(torch.relu(m.linear(f"{name}.im", x.flatten(1))), 1, (-1, dim)) for x in (real, imaginary)]
    real, imaginary = implicit[0] + radius * angle.cos(), implicit[1] + radius * angle.sin()
    if m.flag("layer_norm", False):
        return m.layer_norm(f"{name}.norm_r", real), m.layer_norm(f"{name}.norm_p", imaginary)
    m.skip(f"{name}.norm_r", f"{name}.norm_p")
    return real, imaginary


def wukong(m: Net) -> Tensor:
    """Zhang et al. 2024: layers of a factorization machine block beside a linear compression of the fields."""
    fields = m.fields()
    for i in m.children("wukong_stack"):
        fields = _wukong_layer(m, f"wukong_stack.{i}", fields)
    return mlp(m, "fc", fields.flatten(1), "mlp_hidden_activations", "relu")


def _wukong_layer(m: Net, name: str, x: Tensor) -> Tensor:
    others = x.transpose(1, 2)
    if m.has(f"{name}.fmb.proj_Y"):
        others = others @ m.parameter(f"{name}.fmb.proj_Y")
    dots = m.layer_norm(f"{name}.fmb.layer_norm", (x @ others).flatten(1))
    given = m.setting("fmb_mlp_activations", "relu", str, list, type(None))
    machine = stack(m, f"{name}.fmb.mlp.mlp", dots, given, "fmb_mlp_activations", output=True, last="relu")
    compressed = m.linear(f"{name}.lcb.linear", x.transpose(1, 2)).transpose(1, 2)
    out = torch.cat([torch.unflatten(machine, 1, (-1, x.shape[2])), compressed], 1)
    rest = m.linear(f"{name}.residual_proj", x.transpose(1, 2)).transpose(1, 2) if out.shape[1] != x.shape[1] else x
    m.skip(*([] if out.shape[1] != x.shape[1] else [f"{name}.residual_proj"]))
    return m.layer_norm(f"{name}.layer_norm", out + rest) if m.has(f"{name}.layer_norm") else out + rest


def masknet(m: Net) -> Tensor:
    """Wang et al. 2021: blocks whose input is multiplied by a mask made of all embeddings, in a row or in parallel."""
    kind = m.choice("model_type", "SerialMaskNet", "SerialMaskNet", "ParallelMaskNet")
    vectors = m.vectors()
    x = torch.cat(vectors, 1)
    hidden = torch.cat([m.layer_norm(f"emb_norm.{i}", v) for i, v in enumerate(vectors)], 1) if m.has("emb_norm") else x
    key = "dnn_hidden_activations"
    given = m.setting(key, "ReLU", str, list, type(None))
    blocks = m.children("mask_net.mask_blocks")
    if kind == "SerialMaskNet":
        names = given if isinstance(given, list) else [given] * len(blocks)
        for i, name in zip(blocks, names, strict=True):
            hidden = _mask_block(m, f"mask_net.mask_blocks.{i}", x, hidden, name, key)
        return m.linear("mask_net.fc.0", hidden)
    if isinstance(given, list):
        raise InputError(f"{m.where}: {key}", given, "one activation for the blocks and the MLP")
    outputs = [_mask_block(m, f"mask_net.mask_blocks.{i}", x, hidden, given, key) for i in blocks]
    return mlp(m, "mask_net.dnn", torch.cat(outputs, 1), key)


def _mask_block(m: Net, name: str, x: Tensor, hidden: Tensor, given: object, key: str) -> Tensor:
    mask = m.linear(f"{name}.mask_layer.2", torch.relu(m.linear(f"{name}.mask_layer.0", x)))
    return stack(m, f"{name}.hidden_layer", mask * hidden, given, key, output=False)
