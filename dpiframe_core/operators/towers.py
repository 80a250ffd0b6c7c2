"""Whether a graph's narrow MLP is to be a tower, and what its kernel takes."""

from collections.abc import Mapping

import torch

from dpiframe_core.graph.chains import group_tower
from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.interactions import linear_params
from dpiframe_core.operators.wave_operands import pairs_of
from kernels.interaction.tower import Tower, TowerLayer, takes
from kernels.runtime.launch import shared_limit


def tower_graph(waves: Graph, precision: str, device: torch.device) -> Graph | None:
    """`group_tower`'s, if there is a kernel for its tower."""
    graph = group_tower(waves)
    if graph is None:
        return None
    (tower,) = (n for n in graph.nodes if n.op == "tower")
    *layers, dot = tower.attrs.members
    widths = [graph.widths[value] for value in (tower.inputs[0], *(n.outputs[0] for n in layers))]
    return (
        graph if takes(widths, [n.attrs.activation for n in layers], pairs_of(dot), precision, shared_limit(device)) else None
    )


def tower_kernel(node: Node, dense: Mapping[str, torch.Tensor], precision: str, device: torch.device) -> Tower:
    """The kernel of a `tower` node."""
    *layers, dot = node.attrs.members
    own = []
    for n in layers:
        weight, bias, _ = linear_params(n.attrs, [dense[p] for p in n.params])
        own.append(TowerLayer(weight.reshape(-1, weight.shape[-1]), bias, n.attrs.activation))
    return Tower(own, pairs_of(dot), precision, device)
