"""Building blocks that the models share: joined input, first-order term, FM, cross network, MLP, output. Graph nodes only."""

from collections.abc import Iterable, Sequence

from dpiframe_core.features.schema import Feature
from dpiframe_core.graph.architecture import Activation, Activations, LeakyReLU
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.interactions import mixture


def model_input(g: GraphBuilder, features: Iterable[Feature] | None = None, name: str = "x") -> str:
    """The embeddings and plain numbers of all features side by side, in the schema's order. `float[B, D]`."""
    found = g.schema.features if features is None else features
    return g.concat([g.lookup(f.name, f.table, f"emb.{f.name}", "embedding") for f in found], name, "embedding")


def first_order(g: GraphBuilder) -> str:
    """sum_i w_i[id_i], plus w_j * x_j for numbers: the linear model of Wide&Deep and DeepFM. `float[B, 1]`.

    Raises:
        ValueError: no feature has a first-order table.
    """
    terms = [
        g.lookup(f.name, f.first_order_table, f"w.{f.name}", "wide")
        for f in g.schema.features
        if f.first_order_table is not None
    ]
    if not terms:
        raise ValueError("features: got none with a first_order_table, expected at least one for a first-order term")
    return g.sum(g.concat(terms, "w", "wide"), "first_order", "wide")


def factorization_machine(g: GraphBuilder, x: str) -> str:
    """1/2 sum_d ((sum_i v_id)^2 - sum_i v_id^2) over all features that have a table (Rendle 2010, eq. 5). `float[B, 1]`.

    Raises:
        ValueError: those features differ in dim or are not side by side in x.
    """
    return g.fm(x, *embedded_columns(g, "factorization machine"), "fm", "fm")


def embedded_columns(g: GraphBuilder, where: str) -> tuple[int, int, int]:
    """The first column in x, the number and the dim of the features that have a table.

    Raises:
        ValueError: they differ in dim or are not side by side.
    """
    offset, spans = 0, []
    for f in g.schema.features:
        width = g.schema.columns_read(f.name, f.table)
        if f.table is not None:
            spans.append((offset, width))
        offset += width
    dims = {width for _, width in spans}
    if len(dims) != 1:
        raise ValueError(f"{where}: got table dims {sorted(dims)}, expected one dim for all features")
    (dim,) = dims
    if any(at != spans[0][0] + i * dim for i, (at, _) in enumerate(spans)):
        raise ValueError(f"{where}: got plain numbers between embedded features, expected them first or last")
    return spans[0][0], len(spans), dim


def cross_network(
    g: GraphBuilder, x0: str, layers: int, rank: int | None = None, experts: int | None = None, *, outer_bias: bool = False
) -> str:
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l (Wang et al. 2021, eq. 1), W_l = U_l V_l with a rank (eq. 2).

    With experts: x_{l+1} = x_0 * (sum_i G(x_l)_i U_i tanh(C_i tanh(V_i x_l)) + b_l) + x_l, G the softmax of the gates (eq. 3
    and 4). The experts' V lie below one another, C is block-diagonal, U side by side; the gates serve all layers. With
    `outer_bias` b_l is added behind the product with x_0.
    """
    xl, width = x0, g.width(x0)
    for layer in range(layers):
        name, v = f"cross.{layer}", xl
        if rank is not None:
            v = g.linear(xl, rank * (experts or 1), f"{name}.v", "cross", bias=False)
        if experts is not None:
            v = g.activation(v, "tanh", f"{name}.v.tanh", "cross")
            v = g.activation(g.linear(v, g.width(v), f"{name}.c", "cross", bias=False), "tanh", f"{name}.c.tanh", "cross")
            gates = g.linear(xl, experts, "cross.gates", "cross", bias=False, name=f"{name}.gates")
            v = mixture(g, v, gates, f"{name}.mixture", "cross")
        crossed = g.mul(x0, g.linear(v, width, name, "cross", bias=not outer_bias), f"{name}.mul", "cross")
        if outer_bias:
            crossed = g.bias(crossed, f"{name}.bias", f"{name}.outer", "cross")
        xl = g.add([crossed, xl], f"{name}.out", "cross")
    return xl


def mlp(g: GraphBuilder, x: str, hidden_units: Sequence[int], activation: Activations, prefix: str = "deep") -> str:
    """h_{i+1} = activation_i(W_i h_i + b_i). `float[B, hidden_units[-1]]`, x itself without units.

    Raises:
        ValueError: activations are given for another number of layers.
    """
    each = activation if isinstance(activation, tuple) else (activation,) * len(hidden_units)
    if len(each) != len(hidden_units):
        raise ValueError(f"activation: got {len(each)}, expected one for all or for each of the {len(hidden_units)} layers")
    for i, (units, own) in enumerate(zip(hidden_units, each, strict=True)):
        name, (kind, slope) = f"{prefix}.{i}", activation_kind(own)
        x = g.activation(g.linear(x, units, name, prefix), kind, f"{name}.{kind}", prefix, prefix=name, slope=slope)
    return x


def activation_kind(activation: Activation) -> tuple[str, float]:
    """The kind as the graph names it, and the slope."""
    return (activation.type, activation.slope) if isinstance(activation, LeakyReLU) else (activation, 0.0)


def click_scores(g: GraphBuilder, parts: Sequence[str], logits: Sequence[str], tasks: int) -> str:
    """sigmoid(W concat(parts) + b + sum(logits)). `float[B, tasks]`.

    Raises:
        ValueError: there are logits (width 1) and more than one task.
    """
    logit = g.linear(g.concat(parts, "head.input", "head"), tasks, "head", "head")
    return g.activation(g.add([logit, *logits], "logit", "head"), "sigmoid", "score", "head")
