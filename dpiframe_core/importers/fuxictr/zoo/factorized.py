"""Models of the zoo that multiply embeddings in pairs: factorization machines and what grew from them.

Every function gives the logit, [n, 1], from FuxiCTR's parameters; names and defaults are those of its `model_zoo/*/src/*.py`.
"""

from math import pi

import torch
from torch import Tensor

from dpiframe_core.importers.networks.layers import (
    bi_interaction,
    inner_products,
    mlp,
    pair_products,
    pair_sum,
    pairs_of,
    symmetric_sums,
    weighted_sum,
)
from dpiframe_core.importers.networks.net import Net


def lr(m: Net) -> Tensor:
    """Logistic regression."""
    return m.first_order("lr_layer")


def fm(m: Net) -> Tensor:
    """Rendle 2010."""
    return m.first_order("fm.lr_layer") + pair_sum(m.fields())


def nfm(m: Net) -> Tensor:
    """He & Chua 2017: an MLP on the pooled products."""
    return m.first_order("lr_layer") + mlp(m, "dnn", bi_interaction(m.fields()), "hidden_activations")


def afm(m: Net) -> Tensor:
    """Xiao et al. 2017: attention over the products."""
    products = pair_products(m.fields())
    if m.flag("use_attention", True):
        pooled = m.linear("weight_p", weighted_sum(m, "attention", products))
    else:
        m.skip("attention", "weight_p")
        pooled = products.flatten(1).sum(1, keepdim=True)
    return m.first_order("lr_layer") + pooled


def pnn(m: Net) -> Tensor:
    """Qu et al. 2016, inner products."""
    m.choice("product_type", "inner", "inner")
    fields = m.fields()
    return mlp(m, "dnn", torch.cat([fields.flatten(1), inner_products(fields)], 1), "hidden_activations")


def fwfm(m: Net) -> Tensor:
    """Pan et al. 2018: a weight for each pair of fields; three kinds of linear terms (section 4.1)."""
    fields = m.fields()
    products = m.linear("interaction_weight", inner_products(fields))
    match m.choice("linear_type", "FiLV", "LW", "FeLV", "FiLV"):
        case "LW":
            return products + m.first_order("linear_weight_layer")
        case "FeLV":
            return products + (fields * m.fields("linear_weight_layer")).flatten(1).sum(1, keepdim=True)
        case _:
            return products + m.linear("linear_weight_layer", fields.flatten(1))


def fmfm(m: Net) -> Tensor:
    """Sun et al. 2021: v_i M_ij v_j with a matrix, or a diagonal, for each pair of fields."""
    fields = m.fields()
    left, right = pairs_of(fields.shape[1])
    weight = m.parameter("interaction_weight")
    if m.choice("field_interaction_type", "matrixed", "matrixed", "vectorized") == "vectorized":
        projected = fields[:, left] * weight
    else:
        projected = torch.einsum("npd,pde->npe", fields[:, left], weight)
    return (projected * fields[:, right]).flatten(1).sum(1, keepdim=True) + m.first_order("lr_layer")


def ffm(m: Net) -> Tensor:
    """Juan et al. 2016: feature i has a vector of its own for each other field."""
    return _field_aware(_by_layer(m, m.children("embedding_layers"))).sum(1, keepdim=True) + m.first_order("lr_layer")


def _by_layer(m: Net, layers: list[int]) -> Tensor:
    """[n, fields, layers, dim]: each feature's vectors for others, from as many embedding layers."""
    each = [m.vectors(f"embedding_layers.{i}") for i in layers]
    return torch.stack([torch.stack(own, 1) for own in zip(*each, strict=True)], 1)


def _field_aware(vectors: Tensor) -> Tensor:
    """[n, pairs]: <v_ij, v_ji> for i < j, of [n, fields, fields - 1, dim]: a feature has no vector for itself."""
    left, right = pairs_of(vectors.shape[1])
    return (vectors[:, left, [j - 1 for j in right]] * vectors[:, right, left]).sum(2)


def ffm_v2(m: Net) -> Tensor:
    """The same with the vectors of a feature side by side in one table."""
    fields = m.fields()
    vectors = torch.unflatten(fields, 2, (fields.shape[1] - 1, -1))
    return _field_aware(vectors).sum(1, keepdim=True) + m.first_order("lr_layer")


def onn(m: Net) -> Tensor:
    """Yang et al. 2020 (NFFM): dots of field-aware vectors and a plain embedding into an MLP."""
    first, *others = m.children("embedding_layers")
    dots = _field_aware(_by_layer(m, others))
    return mlp(m, "dnn", torch.cat([m.x(f"embedding_layers.{first}"), dots], 1), "hidden_activations")


def onn_v2(m: Net) -> Tensor:
    """The same with the vectors of a feature side by side in one table."""
    fields = m.fields()
    count = fields.shape[1]
    by_field = torch.unflatten(fields, 2, (count, -1))
    left, right = pairs_of(count)
    own = by_field[:, list(range(count)), list(range(count))].flatten(1)
    dots = (by_field[:, left, right] * by_field[:, right, left]).sum(2)
    return mlp(m, "dnn", torch.cat([own, dots], 1), "hidden_activations")


def hofm(m: Net) -> Tensor:
    """Blondel et al. 2016: products of up to `order` fields."""
    order, shared = m.count("order", 3), m.flag("reuse_embedding", False)
    logit = m.first_order("lr_layer")
    for size in range(2, order + 1):
        fields = m.fields("embedding_layer" if shared else f"embedding_layers.{size - 2}")
        logit = logit + symmetric_sums(fields, size)[-1].sum(1, keepdim=True)
    return logit


def hfm(m: Net) -> Tensor:
    """Tay et al. 2019: holographic products of pairs, circular convolution or correlation, into an MLP."""
    fields = m.fields()
    m.skip("hfm_layer")
    left, right = pairs_of(fields.shape[1])
    kind = m.choice(
        "interaction_type", "circular_convolution", "hadamard_product", "circular_convolution", "circular_correlation"
    )
    if kind == "hadamard_product":
        products = fields[:, left] * fields[:, right]
    else:  # products of the fields' discrete Fourier transforms, which are products with constant matrices
        real, imaginary = _fourier(fields.shape[2], fields.dtype)
        a, b = fields @ real, fields @ imaginary
        sign = 1 if kind == "circular_convolution" else -1  # correlation: the conjugate of the first
        of_left, of_right = (a[:, left], sign * b[:, left]), (a[:, right], b[:, right])
        product = of_left[0] * of_right[0] - of_left[1] * of_right[1], of_left[0] * of_right[1] + of_left[1] * of_right[0]
        products = (product[0] @ real + product[1] @ imaginary) / fields.shape[2]
    use_dnn = m.flag("use_dnn", True)
    pooled = mlp(m, "dnn", products.flatten(1), "hidden_activations") if use_dnn else m.linear("proj_h", products.sum(1))
    return pooled + m.first_order("lr_layer")


def _fourier(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and -sin of 2 pi k t / dim, [dim, dim]: v @ them are the real and the imaginary part of v's transform. The inverse
    of (a, b), where its imaginary part vanishes, is (a @ cos + b @ -sin) / dim.
    """
    angle = torch.arange(dim, dtype=torch.float64)[:, None] * torch.arange(dim) * (2 * pi / dim)
    return angle.cos().to(dtype), -angle.sin().to(dtype)


def lorentz_fm(m: Net) -> Tensor:
    """Xu et al. 2020: pairs by the triangle inequality in hyperbolic space."""
    fields = m.fields()
    left, right = pairs_of(fields.shape[1])
    zeroth = ((fields**2).sum(2) + 1).sqrt()
    u, v = zeroth[:, left], zeroth[:, right]
    return (1 + (1 - inner_products(fields) - u - v) / (u * v)).sum(1, keepdim=True)


def flen(m: Net) -> Tensor:
    """Chen et al. 2019: products between and within the user's, the item's and the context's fields."""
    groups = [m.of_source(name) for name in ("user", "item", "context")]
    sums = torch.stack([torch.stack(g, 1).sum(1) for g in groups], 1)
    between = m.linear("r_ij", pair_products(sums).transpose(1, 2))
    within = m.linear("r_mm", torch.stack([bi_interaction(torch.stack(g, 1)) for g in groups], 2))
    products = torch.cat([m.first_order("lr_layer"), (between + within).squeeze(2)], 1)
    deep = mlp(m, "dnn", m.x(), "dnn_activations", output=False)
    return m.linear("w_F", torch.cat([torch.relu(m.linear("w_FwBI.0", products)), deep], 1))


def fibinet(m: Net) -> Tensor:
    """Huang et al. 2019: bilinear products of the embeddings, and of them weighed by squeeze and excitation."""
    fields = m.fields()
    gate = torch.relu(m.linear("senet_layer.excitation.0", fields.mean(2)))
    gate = m.linear("senet_layer.excitation.2", gate)
    ends = m.choice("excitation_activation", "ReLU", "ReLU", "relu", "Sigmoid", "sigmoid").lower()
    weighed = fields * (torch.relu(gate) if ends == "relu" else torch.sigmoid(gate)).unsqueeze(2)
    kind = m.choice("bilinear_type", "field_interaction", "field_all", "field_each", "field_interaction")
    products = [_bilinear(m, f"bilinear_interaction{i}", x, kind) for i, x in ((1, fields), (2, weighed))]
    return m.first_order("lr_layer") + mlp(m, "dnn", torch.cat(products, 1).flatten(1), "hidden_activations")


def _bilinear(m: Net, name: str, fields: Tensor, kind: str) -> Tensor:
    """(v_i W) * v_j for i < j, W one for all, one a field, or one a pair."""
    left, right = pairs_of(fields.shape[1])
    weight = m.parameter(f"{name}.bilinear_W")
    if kind == "field_interaction":
        projected = torch.einsum("npd,pde->npe", fields[:, left], weight)
    elif kind == "field_each":
        projected = torch.einsum("nfd,fde->nfe", fields, weight)[:, left]
    else:
        projected = torch.matmul(fields, weight)[:, left]
    return projected * fields[:, right]


def deep_im(m: Net) -> Tensor:
    """Yu et al. 2020: products of up to five fields from their power sums, and an MLP."""
    fields = m.fields()
    joined = torch.cat(symmetric_sums(fields, m.count("im_order", 2)), 1)
    if m.has("im_layer.bn"):
        joined = m.batch_norm("im_layer.bn", joined)
    logit = m.linear("im_layer.fc", joined)
    return logit + mlp(m, "dnn", fields.flatten(1), "hidden_activations") if m.has("dnn") else logit
