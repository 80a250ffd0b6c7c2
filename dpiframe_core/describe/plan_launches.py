"""A graph and its plan as the launches that a picture shows: one operator each, or the several of a wave or chain."""

from dataclasses import dataclass

from dpiframe_core.graph.graph import JOINED, Graph, Node
from dpiframe_core.graph.schedule import Plan, levels


@dataclass(frozen=True, slots=True)
class Operator:
    """One box. detail: what it computes, and how wide its values are. step: 0, or after how many of its launch it runs."""

    name: str
    module: str
    detail: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """What is issued at once. reads: the launches whose values it reads."""

    name: str
    operators: tuple[Operator, ...]
    stream: int
    level: int
    reads: tuple[str, ...]


def launches(graph: Graph, plan: Plan) -> tuple[Launch, ...]:
    """In the order in which the plan issues them."""
    nodes, before = {n.name: n for n in graph.nodes}, graph.predecessors()
    return tuple(Launch(s.node, _operators(nodes[s.node], graph), s.stream, s.level, before[s.node]) for s in plan.steps)


def operator_text(node: Node) -> str:
    """What an operator computes, in a few words."""
    a = node.attrs
    if node.op == "lookup":
        return f"lookup of {len({s.feature for s in a.concat})} features" + (
            f" + {len(a.total)} first-order terms" if a.total else ""
        )
    if node.op == JOINED:
        return "joined as it is written (a CPU copies)"
    if node.op == "linear" and a.activation != "identity":
        return f"linear + {a.activation}"
    if a.aten is not None:
        return a.aten.op
    return f"{node.op}, {a.layers} layers" if a.layers else node.op


def _operators(node: Node, graph: Graph) -> tuple[Operator, ...]:
    members = node.attrs.members or (node,)
    made_by = {o: m.name for m in members for o in m.outputs}
    step = levels({m.name: tuple(made_by[i] for i in m.inputs if i in made_by) for m in members})
    return tuple(Operator(m.name, m.module, _detail(m, graph), step[m.name]) for m in members)


def _detail(node: Node, graph: Graph) -> str:
    does = operator_text(node).removeprefix("lookup of ")
    if node.attrs.aten is not None:
        does = does.split(".")[1]  # without the library and the overload
    elif node.op == "activation":
        does = node.attrs.activation
    made = ", ".join(str(graph.widths[o]) for o in node.outputs)
    return f"→ {made}" if does == node.name else f"{does} → {made}"
