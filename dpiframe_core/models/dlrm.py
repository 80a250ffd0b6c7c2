"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019; and the
DLRM-DCNv2 of MLPerf and TorchRec, whose interaction is a cross network of low rank.
"""

from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import DLRM, DLRMDCNv2
from dpiframe_core.graph.builder import GraphBuilder
from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.interactions import dot
from dpiframe_core.models.layers import click_scores, cross_network, mlp, model_input


def dlrm(schema: FeatureSchema, p: DLRM, tasks: int) -> Graph:
    """z = [bottom MLP of the numbers, embeddings]; score = sigmoid(top MLP of [z_0, all <z_i, z_j>])."""
    g = GraphBuilder(schema)
    z0, embedded, dim = _inputs(g, p)
    pairs = dot(g, [z0, *embedded], dim, "dot", "dot", keep=dim, diagonal=p.self_interaction)
    return g.finish(click_scores(g, [mlp(g, pairs, p.hidden_units, p.activation)], [], tasks))


def dlrm_dcnv2(schema: FeatureSchema, p: DLRMDCNv2, tasks: int) -> Graph:
    """score = sigmoid(top MLP of cross network([bottom MLP of the numbers, embeddings]))."""
    g = GraphBuilder(schema)
    z0, embedded, _ = _inputs(g, p)
    crossed = cross_network(g, g.concat([z0, *embedded], "x0", "cross"), p.cross_layers, p.rank)
    return g.finish(click_scores(g, [mlp(g, crossed, p.hidden_units, p.activation)], [], tasks))


def _inputs(g: GraphBuilder, p: DLRM | DLRMDCNv2) -> tuple[str, list[str], int]:
    """z_0 [B, dim], the embeddings (one value, or none) and dim.

    Raises:
        ValueError: there are no plain numbers, or widths differ.
    """
    numbers = [f for f in g.schema.features if f.table is None]
    tables = [f for f in g.schema.features if f.table is not None]
    widths = {g.schema.columns_read(f.name, f.table) for f in tables} | {p.bottom_units[-1]}
    if not numbers or len(widths) > 1:
        raise ValueError(f"{p.type}: got {len(numbers)} plain numbers and widths {sorted(widths)}, expected some and one width")
    embedded = [model_input(g, tables)] if tables else []
    z0 = mlp(g, model_input(g, numbers, "numbers"), p.bottom_units, p.activation, "bottom")
    return z0, embedded, p.bottom_units[-1]
