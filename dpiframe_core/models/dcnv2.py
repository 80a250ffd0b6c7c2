"""DCN-V2: Wang et al., "DCN V2: Improved Deep & Cross Network", 2021, equation 1 and figure 1."""

from dpiframe_core.architecture import DCNv2
from dpiframe_core.graph import Graph, GraphBuilder
from dpiframe_core.layers import click_scores, mlp, model_input
from dpiframe_core.schema import FeatureSchema


def dcnv2(schema: FeatureSchema, p: DCNv2, tasks: int) -> Graph:
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l; then the MLP on x_L (stacked), or on x_0 with [x_L, h] joined (parallel)."""
    g = GraphBuilder(schema)
    x0 = xl = model_input(g)
    for layer in range(p.cross_layers):
        projected = g.linear(xl, g.width(x0), f"cross.{layer}", "cross")
        crossed = g.mul(x0, projected, f"cross.{layer}.mul", "cross")
        xl = g.add([crossed, xl], f"cross.{layer}.out", "cross")
    if p.structure == "stacked":
        return g.finish(click_scores(g, [mlp(g, xl, p.hidden_units, p.activation)], [], tasks))
    deep = mlp(g, x0, p.hidden_units, p.activation)
    return g.finish(click_scores(g, [xl, deep], [], tasks))
