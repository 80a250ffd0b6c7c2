"""Puts a narrow MLP of the lookup's numbers, and the dots that read its output, into one launch (kernels/interaction/tower.cu).
Plain data. DLRM's bottom is one: three waves that hold few products, each of which waits for the one before it.
"""

from dataclasses import replace

from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.waves import grouped

MOST_LAYERS = 4  # of one launch


def group_tower(waves: Graph) -> Graph | None:
    """The graph (of `group_waves`) with a `tower` in the place of two to four waves of a lone linear layer each, one behind the
    other from the lookup on, and of a `dot` of the last one's output and one other value, if that alone reads it. None if it
    has none. A tower's members are these layers and the dot; its inputs what the first layer reads, then the dot's other value.
    """
    made_by, consumers = waves.producers(), waves.consumers()
    for first in waves.nodes:
        layers = list[Node]()
        node: Node | None = first
        while node and len(layers) < MOST_LAYERS and _lone_layer(node):
            layers.append(node)
            users = consumers.get(node.outputs[0], [])
            node = users[0] if len(users) == 1 else None
        if len(layers) < 2 or made_by[first.inputs[0]].op != "lookup":
            continue
        members, gone, out = [n.attrs.members[0] for n in layers], [n.name for n in layers], layers[-1].outputs
        if node and node.op == "dot" and len(node.inputs) == 2 and node.inputs[0] == out[0] != node.inputs[1]:
            members, gone, out = [*members, node], [*gone, node.name], node.outputs
        *gone, last = gone
        kept = [n for n in waves.nodes if n.name not in gone]
        return replace(waves, nodes=tuple(grouped("tower", "tower", members, out) if n.name == last else n for n in kept))
    return None


def _lone_layer(node: Node) -> bool:
    return node.op == "wave" and [m.op for m in node.attrs.members] == ["linear"]
