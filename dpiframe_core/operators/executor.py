"""Runs a plan: its steps in order, on its streams, with its events, and nothing else. What an operator does is bound elsewhere
(`operators.cpu`, `operators.cuda`); in which order and where it runs was decided by `graph.schedule`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

import torch

from dpiframe_core.graph.graph import Graph
from dpiframe_core.graph.schedule import Plan
from kernels.runtime.launch import overlapping

_NONE: Mapping[str, Sequence[str]] = MappingProxyType({})

Values = dict[str, torch.Tensor]  # value name -> float[B, width]
Operator = Callable[[Values], None]  # reads its inputs from the values and puts (or writes in place) its outputs there


def execute(
    plan: Plan, operators: Mapping[str, Operator], values: Values, no_more: Mapping[str, Sequence[str]] = _NONE
) -> None:
    """Runs the steps one after the other in the calling thread (CPU, or a single stream).

    `no_more`: see `last_reads`. Those values go at once, so that the next ones lie where the caches still hold the memory.
    """
    for step in plan.steps:
        operators[step.node](values)
        for name in no_more.get(step.node, ()):
            values.pop(name, None)  # an operator may have computed its readers along, and kept nothing


def last_reads(plan: Plan, graph: Graph) -> dict[str, list[str]]:
    """Node -> the values that no later step reads, but for the graph's output."""
    nodes, last = {n.name: n for n in graph.nodes}, dict[str, str]()
    for step in plan.steps:
        node = nodes[step.node]
        last.update(dict.fromkeys((*node.inputs, *node.outputs), step.node))
    last.pop(graph.output, None)
    found: dict[str, list[str]] = {}
    for value, node_name in last.items():
        found.setdefault(node_name, []).append(value)
    return found


def execute_on_streams(
    plan: Plan,
    operators: Mapping[str, Operator],
    values: Values,
    streams: Sequence[torch.cuda.Stream],
    *,
    overlap: bool = False,
) -> None:
    """Issues the steps on CUDA streams; also while `streams[0]` is being captured. Waiting for streams[0] waits for all.

    `overlap`: see `kernels.runtime.launch.overlapping`; only for plans of one stream and operators that are our kernels alone.
    Values must be fixed buffers that outlive the work: nothing is allocated or freed here.

    Raises:
        ValueError: fewer streams than the plan uses.
    """
    if len(streams) < plan.streams:
        raise ValueError(f"streams: got {len(streams)}, expected at least {plan.streams}")
    events = [torch.cuda.Event() for _ in range(plan.events)]  # type: ignore[no-untyped-call]
    events[0].record(streams[0])
    for step in plan.steps:
        stream = streams[step.stream]
        for event in step.waits:
            stream.wait_event(events[event])
        with torch.cuda.stream(stream), overlapping() if overlap else nullcontext():
            operators[step.node](values)
        if step.records is not None:
            events[step.records].record(stream)
    for event in plan.joins:
        streams[0].wait_event(events[event])
