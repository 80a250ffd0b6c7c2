"""Decides in which order and on which CUDA stream each operator of a graph is issued, and where streams must wait for one
another. Pure functions on plain data: no torch, no CuPy, testable anywhere. The executor runs exactly what stands here.

Breadth-first issue (the DPIFrame paper's scheduler): operators are issued level by level across all modules, so that every
branch starts as early as it can. Depth-first issues one branch to its end before the next; sequential uses one stream.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dpiframe_core.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Step:
    """One operator to issue. `waits`: events that `stream` waits for first; `records`: the event recorded after it, if any."""

    node: str
    stream: int
    level: int
    waits: tuple[int, ...] = ()
    records: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the executor does, in order. Stream 0 is the caller's; event 0 is recorded there before the first step.

    Attributes:
        steps: in issue order.
        streams: number of streams used, 1 or more.
        events: number of events used, event 0 included.
        joins: events that stream 0 waits for after the last step, so that waiting for stream 0 waits for everything.
        policy: the function that made it.
    """

    steps: tuple[Step, ...]
    streams: int
    events: int
    joins: tuple[int, ...]
    policy: str


Predecessors = Mapping[str, Sequence[str]]  # node -> nodes it reads from; in a topological order


def breadth_first(graph: Graph | Predecessors, max_streams: int = 4) -> Plan:
    """Issues level by level; within a level the operator with the longest way still to go first, to keep its stream."""
    before = _predecessors(graph)
    level, height = levels(before), levels(_reversed(before))
    return _assign(before, sorted(before, key=lambda n: (level[n], -height[n])), level, max_streams, "breadth_first")


def depth_first(graph: Graph | Predecessors, max_streams: int = 4) -> Plan:
    """Issues each branch as far as it goes before the next one begins."""
    before = _predecessors(graph)
    after = {n: list(reversed(users)) for n, users in _reversed(before).items()}
    missing = {n: len(inputs) for n, inputs in before.items()}
    stack = [n for n in reversed(list(before)) if missing[n] == 0]
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        for follower in reversed(after[node]):
            missing[follower] -= 1
            if missing[follower] == 0:
                stack.append(follower)
    return _assign(before, order, levels(before), max_streams, "depth_first")


def sequential(graph: Graph | Predecessors, max_streams: int = 1) -> Plan:
    """Issues everything on one stream, in the graph's order."""
    before = _predecessors(graph)
    return _assign(before, list(before), levels(before), 1, "sequential")


POLICIES: dict[str, Callable[[Graph | Predecessors, int], Plan]] = {
    "breadth_first": breadth_first,
    "depth_first": depth_first,
    "sequential": sequential,
}


def _predecessors(graph: Graph | Predecessors) -> dict[str, tuple[str, ...]]:
    found = graph.predecessors() if isinstance(graph, Graph) else graph
    return {n: tuple(inputs) for n, inputs in found.items()}


def _reversed(before: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Every edge turned round; nodes (and the users of each) last to first, so again in a topological order."""
    after: dict[str, list[str]] = {n: [] for n in reversed(list(before))}
    for node in after:
        for i in before[node]:
            after[i].append(node)
    return after


def levels(before: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Length of the longest path that leads to each node: the earliest wave in which it can start."""
    level: dict[str, int] = {}
    for node, inputs in before.items():
        level[node] = 1 + max((level[i] for i in inputs), default=-1)
    return level


def _assign(
    before: Mapping[str, Sequence[str]], order: Iterable[str], level: Mapping[str, int], max_streams: int, policy: str
) -> Plan:
    """Gives streams and events to an issue order.

    A node goes on the stream of the predecessor it follows directly, if that one is still its stream's last; else on an unused
    stream; else on the one whose last operator finished its level first. An event is recorded only for an edge that crosses
    streams and is not already implied: `seen[s][t]` is how many operators of stream t are known to be done before whatever
    stream s runs next, so waiting for an event brings along all that its stream had waited for.
    """
    if max_streams < 1:
        raise ValueError(f"max_streams: got {max_streams}, expected at least 1")
    stream_of: dict[str, int] = {}
    position: dict[str, int] = {}  # 1-based place of a node on its stream
    streams: list[list[str]] = []
    seen: list[list[int]] = []
    clock_at: dict[str, list[int]] = {}
    waits: dict[str, tuple[int, ...]] = {}
    records: dict[str, int] = {}
    issued: list[str] = []

    def record(node: str) -> int:
        return records.setdefault(node, 1 + len(records))

    def wait(stream: int, node: str) -> None:
        known, gained = seen[stream], clock_at[node]
        for t, count in enumerate(gained):
            known[t] = max(known[t], count)

    for node in order:
        inputs = before[node]
        s = _pick(inputs, streams, stream_of, level, max_streams, node)
        if s == len(streams):
            streams.append([])
            for known in seen:
                known.append(0)
            seen.append([0] * len(streams))
        pending = []
        # Latest first: its event may already imply the earlier ones.
        for i in sorted(inputs, key=lambda n: -issued.index(n)):
            if seen[s][stream_of[i]] < position[i]:
                pending.append(record(i))
                wait(s, i)
        if s != 0 and not streams[s] and not pending:
            pending.append(0)  # a side stream's first operator starts after the caller's earlier work on stream 0
        streams[s].append(node)
        stream_of[node], position[node] = s, len(streams[s])
        seen[s][s] = len(streams[s])
        clock_at[node] = list(seen[s])
        waits[node] = tuple(sorted(pending))
        issued.append(node)

    joins = []
    for s in sorted(range(1, len(streams)), key=lambda s: -issued.index(streams[s][-1])):
        last = streams[s][-1]
        if seen[0][s] < position[last]:
            joins.append(record(last))
            wait(0, last)
    steps = tuple(Step(n, stream_of[n], level[n], waits[n], records.get(n)) for n in issued)
    return Plan(steps, max(1, len(streams)), 1 + len(records), tuple(sorted(joins)), policy)


def _pick(
    inputs: Sequence[str],
    streams: Sequence[Sequence[str]],
    stream_of: Mapping[str, int],
    level: Mapping[str, int],
    max_streams: int,
    node: str,
) -> int:
    tails = [i for i in inputs if streams[stream_of[i]][-1] == i]
    if tails:
        return stream_of[max(tails, key=lambda i: (level[i], -stream_of[i]))]
    if len(streams) < max_streams:
        return len(streams)
    return min(range(len(streams)), key=lambda s: (level[streams[s][-1]], len(streams[s]), s))
