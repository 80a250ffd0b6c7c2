"""Rewrites copies of a lookup's columns (FinalMLP's gates, Mao et al. 2023, read two fields each) as outputs of the lookup: it
writes those columns once more, and no kernel copies them. Graph in, graph out; nothing executable.
"""

from dataclasses import replace
from math import prod

from dpiframe_core.graph.aten import Window, contiguous
from dpiframe_core.graph.graph import Graph, Node, Source


def fuse_column_copies(graph: Graph) -> Graph:
    """A clone of some features' whole columns, side by side in one output of a lookup, becomes an output of that lookup."""
    made_by = graph.producers()
    for n in graph.nodes:
        lookup = made_by.get(n.inputs[0]) if len(n.inputs) == 1 else None
        sources = _copied(n, lookup) if lookup and lookup.op == "lookup" else ()
        if not lookup or not sources or n.outputs[0] == graph.output:
            continue
        own = lookup.attrs.outputs_of_concat()
        attrs = replace(lookup.attrs, concat=(*lookup.attrs.concat, *sources), splits=(*map(len, own), len(sources)))
        outputs = (*lookup.outputs[: len(own)], n.outputs[0], *lookup.outputs[len(own) :])  # a total stays the last
        wider = replace(lookup, outputs=outputs, attrs=attrs)
        nodes = tuple(wider if m is lookup else m for m in graph.nodes if m is not n)
        return fuse_column_copies(replace(graph, nodes=nodes))
    return graph


def _copied(node: Node, lookup: Node) -> tuple[Source, ...]:
    """The sources of a lookup whose columns a node copies as they lie; () if it does anything else."""
    call, outputs = node.attrs.aten, lookup.attrs.outputs_of_concat()
    if not call or call.op != "aten.clone" or node.inputs[0] not in lookup.outputs[: len(outputs)]:
        return ()
    (window,) = call.operands
    if not isinstance(window, Window) or window.strides != contiguous(window.sizes):
        return ()
    width = prod(window.sizes)
    at, found = 0, list[Source]()
    for source in outputs[lookup.outputs.index(node.inputs[0])]:
        if window.offset <= at and at + source.width <= window.offset + width:
            found.append(source)
        at += source.width
    return tuple(found) if sum(s.width for s in found) == width else ()
