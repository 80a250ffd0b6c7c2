"""Puts a narrow MLP of the lookup's numbers and the dots that read its output into one launch (kernels/interaction/tower.cu).
Plain data. DLRM has one: three waves that hold few products, each of which waits for the one before it.
"""

from dataclasses import replace

from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.waves import grouped

MOST_LAYERS = 4  # of one launch


def group_tower(waves: Graph) -> Graph | None:
    """The graph (of `group_waves`) with a `tower` in the place of a `dot` of two values and of the one to four waves of a lone
    linear layer each that lead from the lookup to the first of these, which nothing else reads. None if it has none. A tower's
    members are the layers and the dot; its inputs what the first layer reads, then the dot's other value.
    """
    made_by, consumers = waves.producers(), waves.consumers()
    for dot in waves.nodes:
        if dot.op != "dot" or len(dot.inputs) != 2:
            continue
        layers, value = list[Node](), dot.inputs[0]
        while _lone_layer(made_by[value]) and len(consumers[value]) == 1 and dot.inputs[1] != value:
            layers.insert(0, made_by[value])
            (value,) = layers[0].inputs
        if 1 <= len(layers) <= MOST_LAYERS and made_by[value].op == "lookup":
            tower = grouped("tower", "tower", [*(n.attrs.members[0] for n in layers), dot], dot.outputs)
            return replace(waves, nodes=tuple(tower if n is dot else n for n in waves.nodes if n not in layers))
    return None


def _lone_layer(node: Node) -> bool:
    return node.op == "wave" and [m.op for m in node.attrs.members] == ["linear"]
