"""Who writes where on a GPU: a `joined` node is a concat for which nothing runs, as its inputs are made side by side in the
columns of one matrix. Plain data; whoever binds buffers follows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dpiframe_core.graph.graph import JOINED, Graph, Node

ALIGNMENT = 8  # columns at which a value begins, and to a multiple of which it is padded; 16 for fp8
# Their kernels write into columns of any matrix. (What makes a logit writes float32; what torch may compute is left to it.)
_WRITERS = {
    "lookup", "linear", "gated", "norm", "cross_v1", "cross_v2", "cross_low_rank", "dot", "cin", "attention", "field_attention",
    "mixture", "gru", "lstm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Matrix:
    """Values that lie in one matrix. name: of the lookup that makes several of them at once, else of the joined value.

    columns: of the matrix, all in all. spans: by value, the first column and the one behind the last, padding included.
    """

    name: str
    columns: int
    spans: Mapping[str, tuple[int, int]]


def place(graph: Graph, align: int = ALIGNMENT) -> Graph:
    """The graph with `joined` in the place of each concat whose inputs can be written where the concat lies."""
    made_by = graph.producers()
    heads = [m for n in graph.nodes for m in (n.attrs.members or (n,)) if m.op == "head"]
    exact = {i for head in heads for i in head.inputs[len(head.attrs.columns) :]} | {graph.output}  # float32, unpadded
    taken, nodes = set[str](), list[Node]()
    for n in graph.nodes:
        if n.op == "concat" and not exact.intersection((*n.inputs, *n.outputs)) and not taken.intersection(n.inputs):
            makers = [made_by[i] for i in n.inputs]
            several = {m.name for m in makers if m.attrs.splits}  # a lookup writes all its outputs into one matrix
            even = all(graph.widths[i] % align == 0 for i in n.inputs[:-1])
            apart = len(set(n.inputs)) == len(n.inputs) and len(several) < 2
            if even and apart and all(_writes(m, i) for m, i in zip(makers, n.inputs, strict=True)):
                taken.update(n.inputs)
                n = replace(n, op=JOINED)
        nodes.append(n)
    return replace(graph, nodes=tuple(nodes))


def _writes(maker: Node, value: str) -> bool:
    if maker.op == "lookup":
        return value in maker.outputs[: len(maker.attrs.outputs_of_concat())]  # but its sum, which is float32
    return maker.op in _WRITERS


def matrices(graph: Graph, align: int = ALIGNMENT) -> tuple[Matrix, ...]:
    """The matrices that hold more than one value: of each lookup with several outputs, and of each joined node."""
    joined = [n for n in graph.nodes if n.op == JOINED]
    found = []
    for lookup in (n for n in graph.nodes if n.op == "lookup" and n.attrs.splits):
        outputs = lookup.outputs[: len(lookup.attrs.outputs_of_concat())]
        own = [n for n in joined if set(n.inputs) & set(outputs)]
        joined = [n for n in joined if n not in own]
        inside = {i for n in own for i in n.inputs}
        found.append(_matrix(graph, align, lookup.name, own, [o for o in outputs if o not in inside]))
    return (*found, *(_matrix(graph, align, n.outputs[0], [n], []) for n in joined))


def _matrix(graph: Graph, align: int, name: str, joined: Sequence[Node], alone: Sequence[str]) -> Matrix:
    spans, end = dict[str, tuple[int, int]](), 0

    def put(value: str, first: int) -> int:
        spans[value] = first, first + -(-graph.widths[value] // align) * align
        return spans[value][1]

    for n in joined:
        at = end
        end = put(n.outputs[0], at)
        for i in n.inputs:
            put(i, at)
            at += graph.widths[i]
    for value in alone:
        end = put(value, end)
    return Matrix(name, end, spans)
