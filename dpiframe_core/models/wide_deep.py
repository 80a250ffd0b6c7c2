"""Wide & Deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016, equation 3."""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import WideDeep
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.layers import click_scores, first_order, mlp, model_input


def wide_deep(schema: FeatureSchema, p: WideDeep, tasks: int) -> Graph:
    """P(y = 1 | x) = sigmoid(w_wide^T x + w_deep^T a^(L) + b)."""
    g = GraphBuilder(schema)
    x = model_input(g)
    wide = first_order(g)
    deep = mlp(g, x, p.hidden_units, p.activation)
    return g.finish(click_scores(g, [deep], [wide], tasks))
