"""What generic nodes of a graph compute and read, for those that find known operators among them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from dpiframe_core.graph.aten import AtenCall, Window, contiguous
from dpiframe_core.graph.aten_rules import Shape
from dpiframe_core.graph.graph import Graph, Node

Read = tuple[str, Window]  # a value, and a window of it as if it were a node's first input


def call_of(node: Node) -> AtenCall:
    """What a generic node computes."""
    assert node.attrs.aten is not None
    return node.attrs.aten


def is_call(node: Node, op: str) -> bool:
    """Whether a node is a generic one of this function."""
    return node.op == "aten" and call_of(node).op == f"aten.{op}"


def factor_of(node: Node) -> float | None:
    """What a node multiplies by, if it does nothing else."""
    if not (is_call(node, "mul.Scalar") or is_call(node, "div.Scalar")):
        return None
    (by,) = call_of(node).args
    if not isinstance(by, int | float) or not by:
        return None
    return float(by) if is_call(node, "mul.Scalar") else 1.0 / by


def reads_of(node: Node) -> list[Read]:
    """What a generic node's operands are windows of."""
    return [(node.inputs[w.value], replace(w, value=0)) for w in call_of(node).operands if isinstance(w, Window)]


def whole(sizes: Shape) -> Window:
    return Window(0, sizes, contiguous(sizes))


def fuse_ends(graph: Graph, found: Callable[[Mapping[str, Node], Node], tuple[list[Node], Node] | None]) -> Graph:
    """The graph with one node in the place of each that `found` says (the others of it, and the new one) in which a group of
    nodes ends that nothing else reads.
    """
    made_by, read_by, gone, fused = graph.producers(), graph.consumers(), set[str](), dict[str, Node]()
    for last in graph.nodes:
        nodes, node = found(made_by, last) or ([], last)
        inside = {n.name for n in nodes}
        if nodes and all(r.name in inside or r is last for n in nodes for r in read_by[n.outputs[0]]):
            gone, fused[last.name] = gone | inside, node
    return replace(graph, nodes=tuple(fused.get(n.name, n) for n in graph.nodes if n.name not in gone))
