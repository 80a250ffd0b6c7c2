"""Graphs with generic operators as a CPU runs them (`row_tiles`): the same values by fewer passes over memory."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from dpiframe_core.graph.aten import AtenCall, Constant, Window, contiguous
from dpiframe_core.graph.graph import Graph, Node
from kernels.lookup.plan import Kind, LookupPlan, Slot

# "aten.sub", "aten.mul" or "", the node that makes it, and of what: values and what is read of them.
_Term = tuple[str, Node, tuple[tuple[str, Window], ...]]
_LEAST_STEPS = 4  # of a list, that pay for weights of its own


def summed_masks(graph: Graph, params: Mapping[str, torch.Tensor]) -> tuple[dict[str, Node], dict[str, torch.Tensor]]:
    """The nodes by name, and parameters. A choice by a constant between x + inf and x, as attention's masks are written, is
    one sum, of a parameter that is infinite.
    """
    nodes, made_by, read_by = {n.name: n for n in graph.nodes}, graph.producers(), graph.consumers()
    more = dict[str, torch.Tensor]()
    for n in graph.nodes:
        call = n.attrs.aten
        if call is None or call.op != "aten.where" or not isinstance(call.operands[0], Constant):
            continue
        _, yes, no = call.operands
        if not (isinstance(yes, Window) and isinstance(no, Window)):
            continue
        summed = made_by[n.inputs[yes.value]]
        own = summed.attrs.aten
        if own is None or own.op != "aten.add.Scalar" or own.args[0] not in ("inf", "-inf"):
            continue
        alike = replace(yes, value=no.value) == no and summed.inputs == (n.inputs[no.value],)
        if alike and own.operands == (Window(0, own.sizes, (1,)),) and len(read_by[summed.outputs[0]]) == 1:
            name = f"{n.name}.infinite"
            more[name] = torch.where(params[n.params[0]] != 0, float(own.args[0]), 0.0)
            sum_of = AtenCall("aten.add", (replace(no, value=0), Constant(0)), (), call.sizes)
            nodes[n.name] = replace(n, inputs=summed.inputs, params=(name,), attrs=replace(n.attrs, aten=sum_of))
            del nodes[summed.name]
    return nodes, more


def weighted_sums(graph: Graph, nodes: dict[str, Node]) -> None:
    """In `nodes` a product of vectors [L, dim] and weights [L, 1] that is summed over L, and read by nothing else, becomes a
    matrix product [1, L] [L, dim], in the place of the first: means of histories under a mask, and what attention gives.
    """
    made_by, read_by = graph.producers(), graph.consumers()
    for n in graph.nodes:
        call = n.attrs.aten
        if call is None or call.op != "aten.sum" or call.args[0] != (1,) or not isinstance(call.operands[0], Window):
            continue
        product = made_by[n.inputs[call.operands[0].value]]
        own = product.attrs.aten
        if own is None or own.op != "aten.mul" or len(own.sizes) != 2 or len(read_by[product.outputs[0]]) != 1:
            continue
        length, dim = own.sizes
        windows = [w for w in own.operands if isinstance(w, Window)]
        vectors = next((w for w in windows if (w.sizes, w.strides[1:]) == (own.sizes, (1,))), None)
        weights = next((w for w in windows if w.sizes == (length, 1) and w is not vectors), None)
        if vectors is None or weights is None or call.operands[0] != Window(0, own.sizes, (dim, 1)):
            continue
        row = replace(weights, sizes=(1, length), strides=(0, weights.strides[0]))
        matmul = AtenCall("aten.matmul", (row, vectors), (), (1, dim))
        nodes[product.name] = replace(product, outputs=n.outputs, attrs=replace(product.attrs, aten=matmul))
        del nodes[n.name]


def pooled_lookup(lookup: Node, plan: LookupPlan, nodes: dict[str, Node]) -> LookupPlan:
    """The plan of a lookup, that sums the vectors of a list where `nodes` sum them times the list's own marks (`weighted_sums`)
    and read them nowhere else: no step is written. In `nodes` a copy of the sum takes that place.
    """
    readers = [n for n in nodes.values() if lookup.outputs[0] in n.inputs]
    if len(lookup.attrs.outputs_of_concat()) > 1:
        return plan
    for n in readers:
        call = n.attrs.aten
        if call is None or call.op != "aten.matmul" or {*n.inputs} != {lookup.outputs[0]} or len(call.sizes) != 2:
            continue
        marks, vectors = call.operands
        if not (isinstance(marks, Window) and isinstance(vectors, Window)) or len(vectors.sizes) != 2 or marks.sizes[0] != 1:
            continue
        (length, dim), slots, columns = vectors.sizes, {s.out: s for s in plan.x_slots}, plan.columns
        places, first = [vectors.offset + i * dim for i in range(length)], slots.get(vectors.offset)
        own, of_marks = [slots.get(p) for p in places], [slots.get(marks.offset + i * marks.strides[1]) for i in range(length)]
        if first is None or own != [Slot(Kind.GATHER, dim, p, first.first + i, 1) for i, p in enumerate(places)]:
            continue
        read = columns[first.first : first.first + length]
        marked = [columns[m.first].source for m in of_marks if m is not None and m.kind == Kind.MASK]
        alone = all(_apart(other, lookup.outputs[0], places[0], places[-1] + dim) for other in readers if other is not n)
        if vectors.strides != (dim, 1) or [c.source for c in read] != marked or not all(c.may_pad for c in read) or not alone:
            continue
        pooled = replace(
            plan, x_slots=tuple(replace(s, columns=length) if s == first else s for s in slots.values() if s not in own[1:])
        )
        if pooled.x_width == plan.x_width:
            copy = AtenCall("aten.clone", (replace(vectors, sizes=(1, dim)),), (), (1, dim))
            nodes[n.name], plan = replace(n, attrs=replace(n.attrs, aten=copy)), pooled
    return plan


def _apart(n: Node, value: str, start: int, stop: int) -> bool:
    """Whether a node reads none of columns [start, stop) of a value."""
    if n.attrs.aten is None:
        return False
    own = [o for o in n.attrs.aten.operands if isinstance(o, Window) and n.inputs[o.value] == value]
    ends = [1 + w.offset + sum((size - 1) * step for size, step in zip(w.sizes, w.strides, strict=True)) for w in own]
    return all(w.offset >= stop or end <= start for w, end in zip(own, ends, strict=True))


def split_linears(graph: Graph, nodes: dict[str, Node], params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In `nodes` linear layers of [q, k, q - k, q * k] or some of these, of one vector q[dim] beside each k[L, dim], as DIN's
    attention has them, read q and k alone. Gives their parameters.

    W_q q + W_k k + W_d (q - k) + W_p (q * k) + b = (W_q + W_d) q + b + (W_k - W_d + W_p diag(q)) k: a quarter of the products,
    and nothing is joined. As an `aten.linear` of the windows q and k, the weights of q, k and q * k, [dim, units] each, and b.
    """
    made_by, read_by, more = graph.producers(), graph.consumers(), dict[str, torch.Tensor]()
    for joined in graph.nodes:
        call, readers = joined.attrs.aten, read_by.get(joined.outputs[0], [])
        if call is None or call.op != "aten.cat" or call.args != (2,) or len(call.sizes) != 2 or call.sizes[0] < _LEAST_STEPS:
            continue
        found = [_term(joined, operand, made_by) for operand in call.operands]
        terms = [t for t in found if t is not None]
        pair = {s for *_, of in terms for s in of}
        query = next((s for s in pair if s[1].strides[0] == 0), None)
        key = next((s for s in pair if s[1].strides[0] and s[1].sizes[0] == call.sizes[0]), None)
        products = [{*of} == pair for op, _, of in terms if op == "aten.mul"]
        if len(terms) < len(found) or query is None or key is None or len(pair) != 2 or not products or not all(products):
            continue
        dim, whole = key[1].sizes[1], _whole(call)
        fits = dim * len(terms) == call.sizes[1] and query[1].sizes[1] == dim
        if not fits or not all(n.inputs == joined.outputs and _is_linear(n, whole) for n in readers):
            continue
        windows = Window(0, (dim,), (1,), query[1].offset), replace(key[1], value=1)
        for n in readers:
            weight, *bias = (params[p] for p in n.params)
            of_query, of_key, of_product = (torch.zeros(dim, len(weight), dtype=torch.float64) for _ in range(3))
            for (op, _, of), part in zip(terms, torch.split(weight.double().t(), dim), strict=True):
                for s, sign in zip(of, (1, -1), strict=False):
                    (of_query if s == query else of_key).add_(part, alpha=sign * (op != "aten.mul"))
                of_product.add_(part, alpha=int(op == "aten.mul"))
            names = tuple(f"{n.name}.of_{what}" for what in ("query", "key", "product", "neither"))
            given = of_query, of_key, of_product, *(bias or [torch.zeros(len(weight))])
            more |= zip(names, (t.float() for t in given), strict=True)
            of_two = AtenCall("aten.linear", (*windows, *map(Constant, range(4))), (), (call.sizes[0], len(weight)))
            nodes[n.name] = replace(n, inputs=(query[0], key[0]), params=names, attrs=replace(n.attrs, aten=of_two))
        for gone in [joined, *(made for op, made, _ in terms if op and read_by[made.outputs[0]] == [joined])]:
            nodes.pop(gone.name, None)
    return more


def _term(joined: Node, operand: Window | Constant, made_by: Mapping[str, Node]) -> _Term | None:
    """What an operand is of: of the difference or product that it is all of; else itself."""
    if not isinstance(operand, Window):
        return None
    made, n, operands, op = made_by[joined.inputs[operand.value]], joined, tuple[Window | Constant, ...]([operand]), ""
    own, read = made.attrs.aten, replace(operand, value=0)
    if own is not None and own.op in ("aten.sub", "aten.mul") and not own.args and read == _whole(own):
        n, operands, op = made, own.operands, own.op
    seen = [(n.inputs[o.value], replace(o, value=0)) for o in operands if isinstance(o, Window)]
    if len(seen) < len(operands) or not all(len(w.sizes) == 2 and w.strides[1] == 1 for _, w in seen):
        return None
    for i, (value, w) in enumerate(seen):
        if not w.strides[0] or w.sizes[0] == 1:  # a vector for all steps, however it is spelled
            seen[i] = value, Window(0, (1, w.sizes[1]), (0, 1), w.offset)
    return op, made, tuple(seen)


def _whole(call: AtenCall) -> Window:
    return Window(0, call.sizes, contiguous(call.sizes))


def _is_linear(n: Node, of: Window) -> bool:
    """Whether it is a linear layer of that, with parameters in order."""
    call = n.attrs.aten
    return call is not None and (call.op, call.operands) == ("aten.linear", (of, *map(Constant, range(len(n.params)))))
