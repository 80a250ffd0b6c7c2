"""Rewrites of an op graph that join operators into the fused ones the kernels offer. Graph in, graph out; nothing executable.

This is the intra-module half of dual-level parallelism: fewer, wider operators before the scheduler spreads modules over
streams. Each pass can be left out (`passes`), which is how the ablation measures it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dpiframe_core.fusion.column_copies import fuse_column_copies
from dpiframe_core.fusion.compressed_interaction import fuse_cin
from dpiframe_core.fusion.field_attention import fuse_field_attention
from dpiframe_core.fusion.target_attention import fuse_target_attention
from dpiframe_core.graph.graph import Attrs, Graph, Node

# What the head kernel takes (kernels/dense/head.cu).
MAX_PARTS, MAX_LOGITS = 3, 3
# Values of these are float32 without padding where a head adds them, and nothing else reads them: others may not want that.
PLAIN_LOGITS = {"add", "mul", "bias", "activation", "concat", "aten"}


def fuse_lookup(graph: Graph) -> Graph:
    """All lookups become one: what a concat of lookups joins is one of its outputs, a first-order sum of some another, and
    every other lookup keeps its own.
    """
    consumers, made_by = graph.consumers(), graph.producers()
    concats, total, gone = list[tuple[Node, list[Node]]](), None, set[str]()
    for n in graph.nodes:
        parts = [made_by[i] for i in n.inputs]
        if n.op != "concat" or any(p.op != "lookup" or len(consumers[p.outputs[0]]) > 1 for p in parts):
            continue
        (user, *others) = consumers.get(n.outputs[0], [n])
        if user.op == "sum" and not others and total is None and all(graph.widths[i] == 1 for i in n.inputs):
            total, gone = (user, parts), gone | {n.name, user.name, *(p.name for p in parts)}
        elif user.op != "sum":
            concats, gone = [*concats, (n, parts)], gone | {n.name, *(p.name for p in parts)}
    alone = [n for n in graph.nodes if n.op == "lookup" and n.name not in gone]
    if not concats and not total and len(alone) < 2:
        return graph
    concats, gone = [*concats, *((n, [n]) for n in alone)], gone | {n.name for n in alone}
    found = [*concats, *([total] if total else [])]
    sources = [[s for p in parts for s in p.attrs.concat] for _, parts in concats]
    attrs = Attrs(
        concat=tuple(s for own in sources for s in own),
        splits=tuple(map(len, sources)) if len(sources) > 1 else (),
        total=tuple(s for p in total[1] for s in p.attrs.concat) if total else (),
    )
    fused = Node("lookup", "lookup", (), tuple(node.outputs[0] for node, _ in found), "embedding", attrs=attrs)
    return rebuilt(graph, gone, [fused]) if sealed(graph, gone, [fused]) else graph


def fuse_linear_activation(graph: Graph) -> Graph:
    """linear then activation -> one linear with an activation epilogue (the sigmoid of the scores is left to the head)."""
    consumers = graph.consumers()
    for n in graph.nodes:
        users = consumers.get(n.outputs[0], [])
        if n.attrs.activation != "identity" or n.outputs[0] == graph.output:
            continue
        if n.op != "linear" or len(users) != 1 or users[0].op != "activation" or users[0].outputs[0] == graph.output:
            continue
        of = users[0]
        attrs = replace(n.attrs, activation=of.attrs.activation, slope=of.attrs.slope)
        fused = replace(n, outputs=of.outputs, params=(*n.params, *of.params), attrs=attrs)
        return fuse_linear_activation(rebuilt(graph, {n.name, of.name}, [fused]))
    return graph


def fuse_linear_bias(graph: Graph) -> Graph:
    """linear without a bias, then bias -> one linear."""
    consumers = graph.consumers()
    for n in graph.nodes:
        bias = only(consumers, n, "bias")
        if bias and n.op == "linear" and len(n.params) == 1 and n.outputs[0] != graph.output:
            fused = replace(n, outputs=bias.outputs, params=(*n.params, *bias.params))
            return fuse_linear_bias(rebuilt(graph, {n.name, bias.name}, [fused]))
    return graph


def fuse_cross_v2(graph: Graph) -> Graph:
    """x0 * (W xl + b) + xl, three nodes a layer, or x0 * (W xl) + b + xl, four -> cross_v2; with another value, V xl, in the
    product: cross_low_rank.
    """
    consumers = graph.consumers()
    for n in graph.nodes:
        if n.op != "linear" or len(graph.params[n.params[0]]) != 2 or n.attrs.activation != "identity":
            continue
        mul = only(consumers, n, "mul")
        bias = only(consumers, mul, "bias") if mul and len(n.params) == 1 else None
        last = bias or mul
        add = last and only(consumers, last, "add")
        v = n.inputs[0]
        if not mul or not last or not add or mul.inputs[1] != n.outputs[0] or len(add.inputs) != 2 or len(set(add.inputs)) != 2:
            continue
        (xl,) = (i for i in add.inputs if i != last.outputs[0])
        op, inputs = ("cross_v2", (mul.inputs[0], xl)) if xl == v else ("cross_low_rank", (mul.inputs[0], xl, v))
        params = (*n.params, *(bias.params if bias else ()))
        fused = Node(n.name, op, inputs, add.outputs, n.module, params, Attrs(outer_bias=bias is not None))
        gone = {n.name, mul.name, last.name, add.name}
        if graph.widths[n.outputs[0]] == graph.widths[xl] and sealed(graph, gone, [fused]):
            return fuse_cross_v2(rebuilt(graph, gone, [fused]))
    return graph


def fuse_cross_v1(graph: Graph) -> Graph:
    """All layers x0 (xl^T w) + b + xl of DCN -> one cross_v1."""
    consumers = graph.consumers()
    for n in graph.nodes:
        x0 = xl = n.inputs[0] if n.inputs else ""
        params: list[str] = []
        gone: set[str] = set()
        while layer := _cross_v1_layer(graph, consumers, x0, xl):
            params += [layer[0].params[0], layer[2].params[0]]
            gone |= {step.name for step in layer}
            xl = layer[3].outputs[0]
            if any(user.name not in gone and user.op == "linear" for user in consumers.get(xl, [])):
                continue
            break
        if gone and n.name in gone:
            fused = Node("cross", "cross_v1", (x0,), (xl,), n.module, tuple(params), Attrs(layers=len(params) // 2))
            if sealed(graph, gone, [fused]):
                return rebuilt(graph, gone, [fused])
    return graph


def _cross_v1_layer(graph: Graph, consumers: dict[str, list[Node]], x0: str, xl: str) -> tuple[Node, Node, Node, Node] | None:
    for linear in consumers.get(xl, []):
        plain = linear.op == "linear" and len(linear.params) == 1 and linear.attrs.activation == "identity"
        if not plain or len(graph.params[linear.params[0]]) != 1:  # a vector of weights
            continue
        mul = only(consumers, linear, "mul")
        bias = mul and only(consumers, mul, "bias")
        add = bias and only(consumers, bias, "add")
        if mul and bias and add and mul.inputs == (x0, linear.outputs[0]) and add.inputs == (bias.outputs[0], xl):
            return linear, mul, bias, add
    return None


def fuse_head(graph: Graph) -> Graph:
    """concat + final linear + added logits + sigmoid -> head; a DCN cross network read by it alone becomes a logit of its own.

    The latter never writes x_L: with x_l = a_l x_0 + c_l, every x_l^T w_l is a_l (x_0^T w_l) + c_l^T w_l, so all that the head
    needs is the dot products of x_0 with the layers' weights and with the head's.
    """
    made_by, consumers = graph.producers(), graph.consumers()
    score = made_by[graph.output]
    if score.op != "activation" or score.attrs.activation != "sigmoid":
        return graph
    above = made_by[score.inputs[0]]
    linear, logits = above, list[str]()
    if above.op == "add":
        linears = [made_by[i] for i in above.inputs if made_by[i].op == "linear" and made_by[i].attrs.activation == "identity"]
        if len(linears) != 1:
            return graph
        linear = linears[0]
        logits = [i for i in above.inputs if i != linear.outputs[0]]
    if linear.op != "linear" or len(linear.params) != 2 or linear.attrs.activation != "identity":
        return graph
    if any(not _may_be_logit(graph, made_by[i], i, consumers) for i in logits):
        return graph
    joined = made_by[linear.inputs[0]]
    alone = joined.op == "concat" and len(consumers[joined.outputs[0]]) == 1
    parts = list(joined.inputs) if alone else [linear.inputs[0]]
    columns = [sum(graph.widths[p] for p in parts[:i]) for i in range(len(parts))]
    gone = {score.name, above.name, linear.name} | ({joined.name} if alone else set())
    new = []
    for part, column in list(zip(parts, columns, strict=True)):
        cross = made_by[part]
        if cross.op == "cross_v1" and len(consumers[part]) == 1 and parts.count(part) == 1:
            attrs = replace(cross.attrs, offset=column)
            weight = linear.params[0]
            name = f"{cross.name}.logit"
            new.append(replace(cross, op="cross_v1_head", outputs=(name,), params=(*cross.params, weight), attrs=attrs))
            gone.add(cross.name)
            at = parts.index(part)
            del parts[at], columns[at]
            logits.append(name)
    attrs = Attrs(columns=tuple(columns))
    head = Node("head", "head", (*parts, *logits), (graph.output,), "head", linear.params, attrs)
    if len(parts) > MAX_PARTS or len(logits) > MAX_LOGITS or not sealed(graph, gone, [*new, head]):
        return graph
    widths = dict(graph.widths) | {n.outputs[0]: graph.widths[graph.output] for n in new}
    return rebuilt(replace(graph, widths=widths), gone, [*new, head])


def _may_be_logit(graph: Graph, maker: Node, value: str, consumers: dict[str, list[Node]]) -> bool:
    if graph.widths[value] not in (1, graph.widths[graph.output]):
        return False
    if maker.op == "lookup":  # of its outputs the sum alone is float32 at every precision
        return bool(maker.attrs.total) and value == maker.outputs[-1]
    return maker.op in ("fm", "sum") or (maker.op in PLAIN_LOGITS and len(consumers[value]) == 1)


PASSES: dict[str, Callable[[Graph], Graph]] = {
    "lookup": fuse_lookup,
    "column_copies": fuse_column_copies,
    "cin": fuse_cin,
    "attention": fuse_target_attention,
    "field_attention": fuse_field_attention,
    "linear_bias": fuse_linear_bias,
    "linear_activation": fuse_linear_activation,
    "cross_v2": fuse_cross_v2,
    "cross_v1": fuse_cross_v1,
    "head": fuse_head,
}


def fuse(graph: Graph, passes: Iterable[str] = tuple(PASSES)) -> Graph:
    """Applies the named passes in their fixed order. Every pass keeps the graph's values for all inputs, up to rounding.

    Raises:
        ValueError: an unknown pass.
    """
    wanted = set(passes)
    if unknown := wanted - set(PASSES):
        raise ValueError(f"fusion passes: got {sorted(unknown)}, expected some of {list(PASSES)}")
    for name, one in PASSES.items():
        if name in wanted:
            graph = one(graph)
    return graph


def sealed(graph: Graph, gone: set[str], new: Sequence[Node]) -> bool:
    """Whether nothing that stays needs a value that only the nodes `gone` make."""
    lost = {o for n in graph.nodes if n.name in gone for o in n.outputs} - {o for n in new for o in n.outputs}
    stays = [*new, *(n for n in graph.nodes if n.name not in gone)]
    return graph.output not in lost and not any(i in lost for n in stays for i in n.inputs)


def only(consumers: dict[str, list[Node]], node: Node, op: str) -> Node | None:
    """The one consumer of a node's output if it is an `op`, else None."""
    users = consumers.get(node.outputs[0], [])
    return users[0] if len(users) == 1 and users[0].op == op else None


def rebuilt(graph: Graph, gone: set[str], new: Sequence[Node]) -> Graph:
    """The graph without the nodes `gone` and with `new`, in a topological order that keeps the old one where it can."""
    waiting = [*new, *(n for n in graph.nodes if n.name not in gone)]
    place = {o: i for i, n in enumerate(graph.nodes) for o in n.outputs}
    waiting.sort(key=lambda n: min(place.get(o, len(place)) for o in n.outputs))
    made: set[str] = set()
    nodes: list[Node] = []
    while waiting:
        node = next(n for n in waiting if made.issuperset(n.inputs))
        waiting.remove(node)
        nodes.append(node)
        made.update(node.outputs)
    params = {p: graph.params[p] for n in nodes for p in n.params}
    return Graph(tuple(nodes), {v: w for v, w in graph.widths.items() if v in made}, params, graph.output)
