"""xDeepFM: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions for Recommender Systems", 2018."""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import XDeepFM
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.interactions import cin
from dpiframe_core.models.layers import activation_kind, click_scores, embedded_columns, first_order, mlp, model_input


def xdeepfm(schema: FeatureSchema, p: XDeepFM, tasks: int) -> Graph:
    """y = sigmoid(w_linear^T a + w_dnn^T x_dnn + w_cin^T p+ + b), equation 10; the head's weight is [w_cin, w_dnn]."""
    g = GraphBuilder(schema)
    x = model_input(g)
    linear = first_order(g)
    kind, slope = activation_kind(p.cin_activation)
    span = embedded_columns(g, "compressed interaction network")
    pooled = cin(g, x, *span, p.cin_units, "cin", "cin", activation=kind, slope=slope, halves=p.cin_halves)
    deep = [mlp(g, x, p.hidden_units, p.activation)] if p.hidden_units else []
    return g.finish(click_scores(g, [pooled, *deep], [linear], tasks))
