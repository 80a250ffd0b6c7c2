"""Building blocks that the models share: concatenated input, first-order term, FM, MLP, output. Graph nodes only."""

from collections.abc import Sequence

from dpiframe_core.graph import GraphBuilder


def model_input(g: GraphBuilder) -> str:
    """x: the embeddings and plain numbers of all features side by side, in the schema's order. `float[B, D]`."""
    return g.concat([g.lookup(f.name, f.table, f"emb.{f.name}", "embedding") for f in g.schema.features], "x", "embedding")


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
    offset, spans = 0, []
    for f in g.schema.features:
        width = 1 if f.table is None else g.schema.table(f.table).dim
        if f.table is not None:
            spans.append((offset, width))
        offset += width
    dims = {width for _, width in spans}
    if len(dims) != 1:
        raise ValueError(f"factorization machine: got table dims {sorted(dims)}, expected one dim for all features")
    (dim,) = dims
    if any(at != spans[0][0] + i * dim for i, (at, _) in enumerate(spans)):
        raise ValueError("factorization machine: got plain numbers between embedded features, expected them first or last")
    return g.fm(x, spans[0][0], len(spans), dim, "fm", "fm")


def mlp(g: GraphBuilder, x: str, hidden_units: Sequence[int], activation: str) -> str:
    """h_{i+1} = activation(W_i h_i + b_i). `float[B, hidden_units[-1]]`."""
    for i, units in enumerate(hidden_units):
        x = g.activation(g.linear(x, units, f"deep.{i}", "deep"), activation, f"deep.{i}.{activation}", "deep")
    return x


def click_scores(g: GraphBuilder, parts: Sequence[str], logits: Sequence[str], tasks: int) -> str:
    """sigmoid(W concat(parts) + b + sum(logits)). `float[B, tasks]`.

    Raises:
        ValueError: there are logits (width 1) and more than one task.
    """
    logit = g.linear(g.concat(parts, "head.input", "head"), tasks, "head", "head")
    return g.activation(g.add([logit, *logits], "logit", "head"), "sigmoid", "score", "head")
