"""Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016, equation 3."""

from dpiframe_core.architecture import WideDeep
from dpiframe_core.graph import Graph
from dpiframe_core.graph_builder import GraphBuilder
from dpiframe_core.layers import click_scores, first_order, mlp, model_input
from dpiframe_core.schema import FeatureSchema


def wide_deep(schema: FeatureSchema, p: WideDeep, tasks: int) -> Graph:
    """P(y = 1 | x) = sigmoid(w_wide^T x + w_deep^T a^(L) + b)."""
    g = GraphBuilder(schema)
    x = model_input(g)
    wide = first_order(g)
    deep = mlp(g, x, p.hidden_units, p.activation)
    return g.finish(click_scores(g, [deep], [wide], tasks))
