"""From the nodes of a lowering to a graph that fusion knows: lookups in front, one final linear layer, nothing that is dead."""

from dataclasses import replace

import torch

from dpiframe_core.compiler.lookups import Lookups
from dpiframe_core.compiler.operations.emit import Emitter
from dpiframe_core.compiler.patterns import join_norms, recognise_fm
from dpiframe_core.graph.graph import Attrs, Graph, Node, Source


def tidied(emitter: Emitter, lookups: Lookups, output: str) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph and its parameters."""
    nodes = [*_lookups(lookups), *emitter.nodes]
    params = dict(emitter.params)
    widths = {w: n for w, n in lookups.widths.items() if n} | emitter.widths
    widths |= {n.outputs[0]: n.attrs.concat[0].width for n in nodes if n.op == "lookup"}
    graph = Graph(tuple(nodes), widths, {name: tuple(t.shape) for name, t in params.items()}, output)
    graph, params = join_norms(_alive(recognise_fm(_alive(graph))), params)
    graph, params = _one_last_linear(graph, params)
    graph = _alive(graph)
    return graph, {name: params[name] for name in graph.params}


def _lookups(lookups: Lookups) -> list[Node]:
    """A lookup for each source, and what joins them to "x" and "w"."""
    nodes: list[Node] = []
    is_id = {f.name: f.is_id for f in lookups.schema.features}
    for base in ("x", "w"):
        own = [(key, slot) for key, slot in lookups.sources.items() if slot.base == base]
        for (feature, table), slot in own:
            kind = base if table is not None else "mask" if is_id[feature] else "number"
            name = base if len(own) == 1 else f"{kind}.{feature}"
            attrs = Attrs(concat=(Source(feature, table, slot.width),))
            nodes.append(Node(name, "lookup", (), (name,), "embedding" if base == "x" else "wide", attrs=attrs))
        if len(own) > 1:
            parts = tuple(n.name for n in nodes[-len(own) :])
            nodes.append(Node(base, "concat", parts, (base,), "embedding" if base == "x" else "wide"))
    return nodes


def _alive(graph: Graph) -> Graph:
    """Without the nodes that the scores do not need."""
    needed = {graph.output}
    for n in reversed(graph.nodes):
        if needed.intersection(n.outputs):
            needed.update(n.inputs)
    nodes = tuple(n for n in graph.nodes if needed.intersection(n.outputs))
    widths = {o: graph.widths[o] for n in nodes for o in n.outputs}
    return Graph(nodes, widths, {p: graph.params[p] for n in nodes for p in n.params}, graph.output)


def _one_last_linear(graph: Graph, params: dict[str, torch.Tensor]) -> tuple[Graph, dict[str, torch.Tensor]]:
    """sigmoid(W1 x1 + W2 x2 + .. + b + others) as sigmoid(W [x1, x2, ..] + b + others), which the fused head takes."""
    made_by, consumers = graph.producers(), graph.consumers()
    score = made_by[graph.output]
    if score.op != "activation" or score.attrs.activation != "sigmoid":
        return graph, params
    tasks = graph.widths[graph.output]
    linears, others, gone = list[Node](), list[str](), list[Node]()
    bias = torch.zeros(tasks, dtype=torch.float64)
    waiting = [score.inputs[0]]
    while waiting:
        value = waiting.pop(0)
        maker = made_by[value]
        uses = sum(n.inputs.count(value) for n in consumers[value])
        alone = uses == 1 and graph.widths[value] == tasks
        if alone and maker.op in ("add", "bias"):
            waiting[:0] = maker.inputs
            gone.append(maker)
            bias += params[maker.params[0]].double() if maker.op == "bias" else 0
        elif alone and maker.op == "linear" and maker.inputs[0] not in [n.inputs[0] for n in linears]:
            linears.append(maker)
            gone.append(maker)
            bias += params[maker.params[1]].double() if len(maker.params) == 2 else 0
        else:
            others.append(value)
    if not linears:
        return graph, params
    made: list[Node] = []
    parts = [n.inputs[0] for n in linears]
    widths = dict(graph.widths)
    for name in ("logit.rest", "logit.input"):  # at most two parts each, as the fused head takes them
        here = parts[1:] if name == "logit.rest" else parts
        if len(here) > 1:
            made.append(Node(name, "concat", tuple(here), (name,), "head"))
            widths[name] = sum(widths[p] for p in here)
            parts = [parts[0], name] if name == "logit.rest" else [name]
    weight = torch.cat([params[n.params[0]].reshape(tasks, -1) for n in linears], 1)
    params = params | {"logit.weight": weight, "logit.bias": bias.float()}
    made.append(Node("logit", "linear", (parts[0],), ("logit",), "head", ("logit.weight", "logit.bias")))
    widths["logit"] = tasks
    if others:
        made.append(Node("logit.sum", "add", ("logit", *others), ("logit.sum",), "head"))
        widths["logit.sum"] = tasks
    score = replace(score, inputs=(made[-1].outputs[0],))
    names = {n.name for n in gone}
    nodes = (*(n for n in graph.nodes if n.name not in names and n.name != score.name), *made, score)
    shapes = {p: tuple(params[p].shape) for n in nodes for p in n.params}
    return Graph(nodes, widths, shapes, graph.output), params
