"""DCN-V2: Wang et al., "DCN V2: Improved Deep & Cross Network", 2021, equation 1 and figure 1."""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DCNv2
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.layers import click_scores, cross_network, first_order, mlp, model_input


def dcnv2(schema: FeatureSchema, p: DCNv2, tasks: int) -> Graph:
    """x_L = cross network(x_0); then an MLP on x_L (stacked), or one on x_0 with [x_L, h] joined (parallel), or both joined."""
    g = GraphBuilder(schema)
    x0 = model_input(g)
    xl = cross_network(g, x0, p.cross_layers, p.rank, p.experts, outer_bias=p.outer_bias)
    match p.structure:
        case "crossnet_only":
            parts = [xl]
        case "stacked":
            parts = [mlp(g, xl, p.hidden_units, p.activation)]
        case "parallel":
            parts = [xl, mlp(g, x0, p.hidden_units, p.activation)]
        case "stacked_parallel":
            parts = [mlp(g, xl, p.hidden_units, p.activation), mlp(g, x0, p.parallel_hidden_units, p.activation, "parallel")]
    return g.finish(click_scores(g, parts, [first_order(g)] if p.first_order else [], tasks))
