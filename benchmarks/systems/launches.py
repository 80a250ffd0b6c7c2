"""How many kernels of a graph have to run one after the other."""

from dpiframe_core.graph.graph import Graph


def dependent_launches(graph: Graph) -> int:
    """The most kernels of which each needs the one before it."""
    before, depth = graph.predecessors(), {}
    for name in (n.name for n in graph.nodes if n.name in before):
        depth[name] = 1 + max((depth[p] for p in before[name]), default=0)
    return max(depth.values())
