"""DCN: Wang et al., "Deep & Cross Network for Ad Click Predictions", 2017, equations 3 and 6."""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DCN
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.layers import click_scores, first_order, mlp, model_input


def dcn(schema: FeatureSchema, p: DCN, tasks: int) -> Graph:
    """x_{l+1} = x_0 (x_l^T w_l) + b_l + x_l beside an MLP; score = sigmoid(W [x_L, h] + b), W x_L + b without units."""
    g = GraphBuilder(schema)
    x0 = xl = model_input(g)
    for layer in range(p.cross_layers):
        s = g.linear(xl, 1, f"cross.{layer}", "cross", bias=False, vector=True)
        crossed = g.mul(x0, s, f"cross.{layer}.mul", "cross")
        biased = g.bias(crossed, f"cross.{layer}.bias", f"cross.{layer}.bias", "cross")
        xl = g.add([biased, xl], f"cross.{layer}.out", "cross")
    deep = [mlp(g, x0, p.hidden_units, p.activation)] if p.hidden_units else []
    return g.finish(click_scores(g, [xl, *deep], [first_order(g)] if p.first_order else [], tasks))
