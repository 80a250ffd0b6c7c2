"""Linear nodes one after the other, which a CPU computes in one call of C where rows are few: which they are, and how their
operators come to it. Small models spend their time on calls and not on products.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from dpiframe_core.graph.graph import Node
from dpiframe_core.operators.executor import Operator, Values
from kernels.cpu.dense import Layers, scores_of

Readers = Mapping[str, Sequence[Node]]  # of each value


def series_from(first: Node, readers: Readers) -> list[Node]:
    """What `Layers` computes from `first` on: linear nodes, each the only reader of the one before, and a head that reads no
    other.
    """
    found: list[Node] = []
    node = first
    while node.op == "linear" and node.attrs.activation in ("identity", "relu"):
        found.append(node)
        if len(own := readers.get(node.outputs[0], ())) != 1:
            return found
        node = own[0]
    alone = node.op == "head" and len(node.attrs.columns) == 1 and found and node.inputs[0] == found[-1].outputs[0]
    return [*found, node] if alone else found


def series_layers(
    series: Sequence[Node], weights: Mapping[str, torch.Tensor], widths: Mapping[str, int]
) -> list[tuple[torch.Tensor, torch.Tensor | None, bool]]:
    """Weight, bias and whether a ReLU follows, of each node of a series. widths: of values."""
    found = []
    for n in series:
        weight, *bias = [weights[p] for p in n.params]
        if n.op == "head":
            weight = weight[:, n.attrs.columns[0] :][:, : widths[n.inputs[0]]]
        found.append((weight.reshape(-1, weight.shape[-1]), bias[0] if bias else None, n.attrs.activation == "relu"))
    return found


def bind_series(
    operators: dict[str, Operator],
    begun: Collection[Sequence[Node]],
    nodes: Sequence[Node],
    readers: Readers,
    weights: Mapping[str, torch.Tensor],
    widths: Mapping[str, int],
) -> None:
    """Has all of a series computed where it begins, of few rows; the operators of its other nodes then find that.

    `begun`: those that lookups begin, along with which their first nodes are computed.
    """
    ends = {n.name: series[-1].outputs[0] for series in begun for n in series}
    for node in nodes:
        if node.name in operators and node.name not in ends and len(series := series_from(node, readers)) > 1:
            layers = Layers(series_layers(series, weights, widths))
            if layers.few:
                end = series[-1].outputs[0]
                ends |= {n.name: end for n in series[1:]}
                operators[node.name] = _at_once(layers, node.inputs[0], end, operators[node.name])
    for node in nodes:
        if node.name in ends and node.name in operators:
            operators[node.name] = _unless_done(node, ends[node.name], operators[node.name])


def _at_once(layers: Layers, value: str, end: str, one_by_one: Operator) -> Operator:
    """A series' first node."""

    def run(values: Values) -> None:
        if len(values[value]) <= layers.few:
            values[end] = layers(values[value])
        else:
            one_by_one(values)

    return run


def _unless_done(node: Node, end: str, compute: Operator) -> Operator:
    """Another node of a series, whose end is there if it was computed at once: of a head the sum without its logits."""
    logits = node.inputs[1:] if node.op == "head" else None

    def run(values: Values) -> None:
        if end not in values:
            compute(values)
        elif logits is not None:
            values[end] = scores_of(values[end], [values[i] for i in logits])

    return run
