"""Which values of a graph stay float32 on a GPU at any precision. Plain data: knows no tensor."""

from dpiframe_core.fusion.passes import PLAIN_LOGITS
from dpiframe_core.graph.graph import Graph, Node


def exact_values(graph: Graph) -> set[str]:
    """Sums that feed the head's logits, and the scores: everything else that a product may read has the dense dtype."""
    return (
        {
            n.outputs[-1] if n.op == "lookup" else n.outputs[0]
            for node in graph.nodes
            for n in (node.attrs.members or (node,))
            if (n.op == "lookup" and n.attrs.total) or n.op in ("fm", "cross_v1_head", "head", "sum")
        }
        | {graph.output}
        | _kept_exact(graph)
    )


def _kept_exact(graph: Graph) -> set[str]:
    """Values that stay float32 and unpadded beside those of known operators: logits of a head that operators of torch make, and
    what generic ones hand to generic ones alone (logarithms and sums do not bear bfloat16 in between).
    """
    members = [m for n in graph.nodes for m in (n.attrs.members or (n,))]
    heads, made_by = [m for m in members if m.op == "head"], {o: m for m in members for o in m.outputs}
    readers: dict[str, list[Node]] = {}
    for m in members:
        for i in m.inputs:
            readers.setdefault(i, []).append(m)
    logits = {i for head in heads for i in head.inputs[len(head.attrs.columns) :]}
    generic = {o for m in members if m.op == "aten" for o in m.outputs}
    return {v for v in logits if made_by[v].op in PLAIN_LOGITS} | {
        v for v in generic if all(n.op == "aten" for n in readers.get(v, []))
    }
