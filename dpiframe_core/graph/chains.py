"""Puts layers that follow one another into one launch. Plain data.

A chain is all waves of a graph (kernels/waves/chain.cu), for the few rows that it takes. Every value of it but its scores
stays within it, so only a graph of one lookup, waves, mixtures, a dot and the head can be one. A tower is a narrow MLP of the
lookup's numbers and the dots that read its output (kernels/interaction/tower.cu). DLRM has one: three waves that hold few
products, each of which waits for the one before it.
"""

from dataclasses import replace

from dpiframe_core.graph.graph import JOINED, Graph, Node
from dpiframe_core.graph.placement import ALIGNMENT
from dpiframe_core.graph.waves import CROSS_LAYERS, LAYERS, MAX_LOGITS, MAX_TASKS, grouped

MAX_LINKS, MAX_EXPERTS = 24, 64  # of one launch (kernels/waves/chain_links.py)
MOST_LAYERS = 4  # of a tower


def group_chain(waves: Graph) -> Graph | None:
    """The graph (of `group_waves`) as a lookup and a `chain`; None if it is another."""
    first, *rest = waves.nodes
    members = [m for n in rest for m in (n.attrs.members or (n,))]
    if (
        first.op != "lookup"
        or not members
        or members[-1].op != "head"
        or any(n.op not in ("wave", "head", "dot", "mixture", JOINED) for n in rest)
    ):
        return None
    *links, head = members
    rows = {n.outputs[0]: n.inputs for n in links if n.op == JOINED}
    links, row_of = [n for n in links if n.op != JOINED], dict[str, tuple[str, ...]]()
    layers, dots, logits = set[str](), set[str](), set(first.outputs)
    for link in links:
        if link.op in LAYERS or link.op == "norm":
            *others, x = link.inputs
            x0, known = link.inputs[0] if link.op in CROSS_LAYERS else first.outputs[0], layers.union(dots, first.outputs)
            if x0 not in first.outputs or not known.issuperset(others):
                return None
            if x not in known and not (x in rows and layers.issuperset(rows[x])):
                return None
            row = rows.get(x, (x,))  # a link's words lie in one row
            if any(row_of.setdefault(part, row) != row for part in row):
                return None
            layers.add(link.outputs[0])
        elif link.op == "mixture":  # what reads it mixes as it reads
            few = link.attrs.fields <= MAX_EXPERTS and waves.widths[link.outputs[0]] % ALIGNMENT == 0
            if not few or not layers.issuperset(link.inputs):
                return None
            rows[link.outputs[0]] = link.inputs[:1]
        elif link.op == "dot":  # of a layer's output and a value of the lookup's
            one, *others = link.inputs
            if dots or one not in layers or len(others) != 1 or others[0] not in first.outputs:
                return None
            dots.add(link.outputs[0])
        elif link.inputs[0] in first.outputs:
            logits.add(link.outputs[0])
        else:
            return None
    parts, added = head.inputs[: len(head.attrs.columns)], head.inputs[len(head.attrs.columns) :]
    crosses = sum(link.op == "cross_v1_head" for link in links)  # its sizes are the kernel's constants
    if not layers.issuperset(parts) or len(set(parts)) < len(parts) or not logits.issuperset(added):
        return None
    links = [n for n in links if n.op != "mixture"]
    if len(links) > MAX_LINKS or crosses > 1 or len(added) > MAX_LOGITS or waves.widths[waves.output] > MAX_TASKS:
        return None
    return replace(waves, nodes=(first, grouped("chain", "chain", members, head.outputs)))


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
