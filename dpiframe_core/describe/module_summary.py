"""What became of a compiled module, in text: its operators by kind, and how fast they are beside the module on this CPU."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from dpiframe_core.describe.plan_launches import operator_text
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.graph import Graph, Node

_LEAST_RUNS, _MOST_RUNS, _SECONDS = 3, 200, 0.3


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians of calls in turns. rows: of the batch; module_ms, compiled_ms: from prepared inputs to scores."""

    rows: int
    module_ms: float
    compiled_ms: float


def module_summary(name: str, graph: Graph, tasks: tuple[str, ...], deviation: float, times: list[Timed]) -> str:
    """A few lines for people. graph: before fusion."""
    fused = fuse(graph)
    kinds = operator_kinds(graph)
    lines = [
        f"{name}: {len(graph.nodes)} operators, {len(fused.nodes)} after fusion; {_counted(len(tasks), 'task')} "
        f"({', '.join(tasks)}); scores within {deviation:.1e} of the module's own",
        *(f"  {kind:8} {', '.join(texts)}" for kind, texts in kinds.items() if texts),
    ]
    for t in times:
        rows = _counted(t.rows, "row")
        times_as_fast = t.module_ms / t.compiled_ms
        lines.append(f"  {rows:8} {t.compiled_ms:.3f} ms on this CPU, the module {t.module_ms:.3f} ms: {times_as_fast:.2f}x")
    return "\n".join(lines)


def operator_kinds(graph: Graph) -> Mapping[str, list[str]]:
    """What runs after fusion, each text once, with how many there are: `fused` of several operators of the module, `plain` as
    they were, `generic` a torch function each.
    """
    before = set(graph.nodes)
    texts: dict[str, Counter[str]] = {"fused": Counter(), "plain": Counter(), "generic": Counter()}
    for node in fuse(graph).nodes:
        texts[_kind(node, before)][operator_text(node)] += 1
    return {kind: [text if n == 1 else f"{n} {text}" for text, n in found.items()] for kind, found in texts.items()}


def in_turns(rows: int, module: Callable[[], object], compiled: Callable[[], object]) -> Timed:
    """Both, called in turns after a first call each, so that a busy machine slows both down."""
    module(), compiled()
    own: list[float] = []
    ours: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(own) < _LEAST_RUNS or (len(own) < _MOST_RUNS and time.perf_counter() < end):
        for call, seconds in ((module, own), (compiled, ours)):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return Timed(rows, median(own) * 1e3, median(ours) * 1e3)


def _kind(node: Node, before: set[Node]) -> str:
    if node.attrs.aten is not None:
        return "generic"
    return "plain" if node in before else "fused"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
