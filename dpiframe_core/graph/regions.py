"""Groups the generic operators of a graph into regions, of each of which a compiler makes few kernels. Plain data.

An `aten` node alone is a launch of one of torch's kernels, and a trip of its values through memory: AutoInt's three attention
layers are 30. What such nodes hand to one another, and the small operators between them, form a region. Every other operator
has a kernel of its own, and stays; linear layers too, which waves run side by side.
"""

from dataclasses import replace

from dpiframe_core.graph.graph import Graph, Node
from dpiframe_core.graph.waves import grouped

# What a region may hold; `operators.region` has what each computes.
REGION_OPS = frozenset({"aten", "concat", "add", "mul", "sum", "bias", "activation"})


def group_regions(graph: Graph) -> Graph:
    """The graph with a `region` node in the place of each connected group of `REGION_OPS` nodes that has an `aten` node in it.

    No path leads from a region out of it and back: members have the same number of changes, between operators that a region may
    hold and others, on the longest way to them. Members keep their order; values that only members read are gone.
    """
    read_by, regions = graph.consumers(), list[Node]()
    for members in _connected(graph):
        if not any(n.op == "aten" for n in members):
            continue
        inside = {n.name for n in members}
        read = {o for o, readers in read_by.items() if any(r.name not in inside for r in readers)} | {graph.output}
        kept = tuple(o for n in members for o in n.outputs if o in read)
        regions.append(grouped(f"region.{len(regions)}", "region", members, kept))
    gone = {m.name for r in regions for m in r.attrs.members}
    return replace(graph, nodes=_ordered([*regions, *(n for n in graph.nodes if n.name not in gone)], graph))


def _connected(graph: Graph) -> list[list[Node]]:
    """Nodes that may join a region, in groups that hand values to one another within one stage, in the graph's order."""
    made_by, stage = graph.producers(), dict[str, int]()
    group_of: dict[str, str] = {}  # node -> the first node of its group
    for n in graph.nodes:
        joins, before = n.op in REGION_OPS, [made_by[i] for i in n.inputs]
        stage[n.name] = max((stage[p.name] + ((p.op in REGION_OPS) != joins) for p in before), default=0)
        if not joins:
            continue
        met = {group_of[p.name] for p in before if p.op in REGION_OPS and stage[p.name] == stage[n.name]}
        group_of[n.name] = n.name
        group_of |= {name: n.name for name, group in group_of.items() if group in met}
    groups: dict[str, list[Node]] = {}
    for n in graph.nodes:
        if n.name in group_of:
            groups.setdefault(group_of[n.name], []).append(n)
    return list(groups.values())


def _ordered(nodes: list[Node], graph: Graph) -> tuple[Node, ...]:
    """The nodes again in a topological order: by their first members', but not before all that they read is there."""
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    waiting = sorted(nodes, key=lambda n: place[(n.attrs.members or (n,))[0].name])
    there, out = set[str](), list[Node]()
    while waiting:
        n = next(n for n in waiting if there.issuperset(n.inputs))
        waiting.remove(n)
        out.append(n)
        there |= set(n.outputs)
    return tuple(out)
