"""DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", 2017, equations 1 to 4."""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DeepFM
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.models.layers import click_scores, factorization_machine, first_order, mlp, model_input


def deepfm(schema: FeatureSchema, p: DeepFM, tasks: int) -> Graph:
    """y = sigmoid(y_FM + y_DNN), y_FM = <w, x> + sum_{i<j} <v_i, v_j> x_i x_j; FM and MLP share the embeddings."""
    g = GraphBuilder(schema)
    x = model_input(g)
    linear = first_order(g)
    pairs = factorization_machine(g, x)
    deep = mlp(g, x, p.hidden_units, p.activation)
    return g.finish(click_scores(g, [deep], [linear, pairs], tasks))
