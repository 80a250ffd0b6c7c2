"""Groups the operators of a graph that can run at the same time into waves, each one launch (waves/wave.cu). Plain data.

A wave is the breadth-first schedule taken to its end: all operators of one level, whatever their module, side by side on the
GPU's processors rather than on streams, so that nothing forks or joins and each wave may load its weights while the one
before it still runs. The head joins the last wave if that makes all it reads.
"""

from collections.abc import Sequence
from dataclasses import replace

from dpiframe_core.graph.graph import JOINED, Attrs, Graph, Node
from dpiframe_core.graph.schedule import levels

MAX_TASKS, MAX_DOTS = 8, 16  # a thread keeps a sum for each in a register
# What one launch takes (kernels/waves/wave.py).
MAX_JOBS, MAX_LOGITS = 8, 3
CROSS_LAYERS = ("cross_v2", "cross_low_rank")
LAYERS = ("linear", "gated", *CROSS_LAYERS)
ACTIVATIONS = ("identity", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "leaky_relu", "prelu", "dice")


def group_waves(graph: Graph) -> Graph:
    """The graph with a `wave` node for each level's linear and DCN-V2 layers (of any rank), FMs and folded cross networks.

    Nodes of other kinds stay as they are. A wave's members keep their order; values keep their names.
    """
    by_level: dict[int, list[Node]] = {}
    level = levels(graph.predecessors())
    for node in graph.nodes:
        if node.op != JOINED:
            by_level.setdefault(level[node.name], []).append(node)
    nodes: list[Node] = []
    for number in sorted(by_level):
        waiting = sorted((n for n in by_level[number] if _fits(n, graph)), key=lambda n: n.op == "norm")  # products begin first
        nodes += [n for n in by_level[number] if n not in waiting]
        while waiting:
            members = _first_wave(waiting)
            waiting = [n for n in waiting if n not in members]
            nodes.append(_wave(f"wave.{len(nodes)}", members))
    grouped = replace(graph, nodes=_with_joined(nodes, [n for n in graph.nodes if n.op == JOINED]))
    return _with_head(grouped)


def _with_joined(nodes: Sequence[Node], joined: Sequence[Node]) -> tuple[Node, ...]:
    """Each joined node as soon as its inputs are there."""
    made, out = set[str](), list[Node]()
    for node in nodes:
        out.append(node)
        made.update(node.outputs)
        out += [n for n in joined if n not in out and made.issuperset(n.inputs)]
    return tuple(out)


def _fits(node: Node, graph: Graph) -> bool:
    match node.op:
        case "linear":
            return node.attrs.activation in ACTIVATIONS
        case "cross_v1_head":
            return node.attrs.layers + graph.widths[node.outputs[0]] <= MAX_DOTS
    return node.op in (*CROSS_LAYERS, "gated", "norm", "fm")


def _first_wave(nodes: Sequence[Node]) -> list[Node]:
    """As many as one launch takes; a folded cross network's sizes are the kernel's constants, so there is at most one."""
    members: list[Node] = []
    for node in nodes:
        crosses = node.op == "cross_v1_head" and any(m.op == "cross_v1_head" for m in members)
        if len(members) < MAX_JOBS and not crosses:
            members.append(node)
    return members


def _wave(name: str, members: Sequence[Node]) -> Node:
    return grouped(name, "wave", members, tuple(o for m in members for o in m.outputs))


def grouped(name: str, op: str, members: Sequence[Node], outputs: tuple[str, ...]) -> Node:
    """One node in the place of several; it reads what they do not make themselves."""
    made = {o for m in members for o in m.outputs}
    inputs = tuple(dict.fromkeys(i for m in members for i in m.inputs if i not in made))
    modules = "+".join(dict.fromkeys(m.module for m in members))
    params = tuple(p for m in members for p in m.params)
    return Node(name, op, inputs, outputs, modules, params, Attrs(members=tuple(members)))


def _with_head(graph: Graph) -> Graph:
    """The head put behind the wave that makes its parts, which then need not be written where nothing else reads them."""
    head, made_by = graph.nodes[-1], graph.producers()
    if head.op != "head" or len(graph.nodes) < 2:
        return graph
    wave, parts = graph.nodes[-2], head.inputs[: len(head.attrs.columns)]
    products = {m.outputs[0] for m in wave.attrs.members if m.op in LAYERS}
    logits = head.inputs[len(parts) :]
    if not products.issuperset(parts) or len(set(parts)) < len(parts) or not parts:
        return graph
    if any(made_by[i] is wave for i in logits) or len(logits) > MAX_LOGITS or graph.widths[head.outputs[0]] > MAX_TASKS:
        return graph
    return replace(graph, nodes=(*graph.nodes[:-2], _wave(wave.name, (*wave.attrs.members, head))))
