"""The timeline of a request as plain data: read from the events of a torch profiler session, written as a Chrome trace.

A kernel finds its operator through the correlation id of the call that launched it, and the named range that was open then.
The kernels of a captured graph have one launch in common; `named_after` finds theirs. No torch here, so it is tested anywhere.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Event = Mapping[str, Any]  # a Chrome trace event as Kineto writes it; `ts` and `dur` in microseconds
Labels = Mapping[str, Mapping[str, object]]  # name of an operator's range -> what its spans tell (see `_ABOUT`)

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_ABOUT = ("node", "op", "module", "plan stream", "level")
_FACTS = ("grid", "block", "registers per thread", "shared memory", "bytes", "stream", "graph node id", "correlation")


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time in one request. Filled by `timeline`.

    Attributes:
        section: which of the runs of a trace. row: "host", "operators", or a stream of the GPU.
        start_us, end_us: microseconds since the request began.
        details: node, op, module, .. of an operator; kernel, grid, block, .. of work on a GPU.
    """

    section: str
    row: str
    name: str
    start_us: float
    end_us: float
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return str(self.details.get("module", ""))


@dataclass(frozen=True, slots=True)
class Trace:
    """One request, run in one way or several: a section each. `facts`: model, batch, device, versions."""

    facts: Mapping[str, object]
    spans: tuple[Span, ...]

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.section for s in self.spans))

    def rows(self, section: str) -> dict[str, list[Span]]:
        """The spans of a section by row, as they are drawn: host first, streams last, none overlapping another of its row.

        Programmatic launches begin before the kernel before them has ended: such spans get a further row of their stream.
        """
        rows: dict[str, list[Span]] = {}
        for row in sorted({s.row for s in self.spans if s.section == section}, key=lambda row: (row.startswith("stream"), row)):
            for s in sorted((s for s in self.spans if (s.section, s.row) == (section, row)), key=lambda s: s.start_us):
                k, name = 1, row
                while rows.get(name) and rows[name][-1].end_us > s.start_us:
                    k, name = k + 1, f"{row} ({k + 1})"
                rows.setdefault(name, []).append(s)
        return rows

    def chrome(self) -> dict[str, object]:
        """The JSON object that Perfetto (ui.perfetto.dev) and chrome://tracing read: a section is a process, a row a thread."""
        about: list[dict[str, object]] = []
        events: list[dict[str, object]] = []
        for pid, section in enumerate(self.sections, 1):
            about += _named("process", pid, 0, section)
            for tid, (row, spans) in enumerate(self.rows(section).items(), 1):
                about += _named("thread", pid, tid, row)
                for s in spans:
                    at, length = round(s.start_us, 3), round(s.end_us - s.start_us, 3)
                    place = {"pid": pid, "tid": tid, "ts": at, "dur": length}
                    events.append({"ph": "X", "cat": s.module or "host", "name": s.name, **place, "args": dict(s.details)})
        events.sort(key=lambda e: e["ts"])  # type: ignore[arg-type, return-value]
        return {"displayTimeUnit": "ns", "otherData": dict(self.facts), "traceEvents": about + events}


def timeline(events: Sequence[Event], section: str, labels: Labels) -> tuple[Span, ...]:
    """The spans of one of the requests recorded in ranges named `section`: of the one that took the median time.

    Raises:
        ValueError: there is no such range.
    """
    whole = [e for e in events if e.get("ph") == "X"]
    requests = sorted((e for e in whole if e["cat"] == "user_annotation" and e["name"] == section), key=lambda e: e["dur"])
    if not requests:
        raise ValueError(f"profiler session: got no range {section!r}, expected one a request")
    request = requests[len(requests) // 2]
    inside = sorted((e for e in whole if request["ts"] <= e["ts"] < _end(request)), key=lambda e: (e["ts"], -e["dur"]))
    operators = [e for e in inside if e["cat"] == "user_annotation" and e["name"] in labels]
    device = [e for e in inside if e["cat"] in _DEVICE]
    calls = {e["args"].get("correlation"): e for e in inside if e["cat"] in _CALLS}
    # Kineto's own account of a range's work on a stream, for launches by calls that it does not record (cooperative ones).
    ranges = [e for e in inside if e["cat"] == "gpu_user_annotation" and e["name"] in labels]

    def span(row: str, name: str, start: float, end: float, details: Mapping[str, object]) -> Span:
        return Span(section, row, name, start - request["ts"], end - request["ts"], details)

    spans = [span("operators", e["name"], e["ts"], _end(e), labels[e["name"]]) for e in operators]
    streams: dict[object, str] = {}
    for e in device:
        args = e.get("args", {})
        call = calls.get(args.get("correlation"))
        holders = [o for o in operators if _holds(o, call)] if call else []
        holders = holders or [r for r in ranges if r["tid"] == e["tid"] and _holds(r, e)]
        label = holders[0]["name"] if holders else ""
        details = {**labels.get(label, {}), "kernel": e["name"]} | {k: args[k] for k in _FACTS if k in args}
        row = streams.setdefault(e["tid"], f"stream {len(streams)}")
        spans.append(span(row, label or short(e["name"]), e["ts"], _end(e), details))
    launching = [calls[c] for c in {e.get("args", {}).get("correlation") for e in device} if c in calls]
    waits = [e for e in inside if e["cat"] in _CALLS and "Synchronize" in e["name"]]
    what = "launch" if not operators else "issue operators" if device else "run operators"
    phases = _phases(request, operators + launching, waits, device, what)
    host = [span("host", name, start, end, {}) for name, start, end in phases]
    return (*host, *sorted(spans, key=lambda s: (s.row, s.start_us)))


def named_after(captured: Sequence[Span], issued: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of a captured graph, its kernels named as those of the same work issued operator by operator.

    The k-th of a kind (kernel, grid and block) is the k-th of that kind. Kinds that do not occur equally often in both keep the
    kernels' own names: somebody else's guess would be worse than none.
    """
    known, unnamed = _by_kind(issued), _by_kind(captured)
    names: dict[int, Span] = {}
    for kind, spans in unnamed.items():
        if len(known.get(kind, ())) == len(spans):
            names |= {id(s): k for s, k in zip(spans, known[kind], strict=True)}
    out = []
    for s in captured:
        found = names.get(id(s))
        if found is not None and found.module:
            about = {k: v for k, v in found.details.items() if k in _ABOUT}
            s = replace(s, name=found.name, details={**about, **s.details})
        out.append(s)
    return tuple(out)


def describe(trace: Trace) -> str:
    """A line a section, for people: how long the request took, and what of it was work on the device."""
    lines = []
    for section in trace.sections:
        spans = [s for s in trace.spans if s.section == section]
        line = f"{section}: {max(s.end_us for s in spans):.1f} us from request to scores"
        kernels = [s for s in spans if "kernel" in s.details]
        if kernels:
            first, last = min(s.start_us for s in kernels), max(s.end_us for s in kernels)
            busy = sum(s.end_us - s.start_us for s in kernels)
            line += (
                f"; {len(kernels)} kernels on {len({s.row for s in kernels})} stream(s), {busy:.1f} us in {last - first:.1f} us"
            )
        lines.append(line)
    return "\n".join(lines)


def short(kernel: str) -> str:
    """A kernel's name without namespaces, template arguments, parameters and the type that it returns."""
    name, before = kernel.replace("(anonymous namespace)::", ""), ""
    while name != before:
        name, before = re.sub(r"<[^<>]*>", "", name), name
    name = name.split("(")[0].strip()
    return name if name.startswith("Mem") else name.split(" ")[-1].split("::")[-1]


def _phases(
    request: Event, work: Sequence[Event], waits: Sequence[Event], device: Sequence[Event], what: str
) -> list[tuple[str, float, float]]:
    """What the host does, (name, start, end) in order: until the first launch, launching, waiting, and the rest."""
    start, end = request["ts"], _end(request)
    if not work:
        return [("request", start, end)]
    first, last = min(e["ts"] for e in work), max(_end(e) for e in work)
    phases = [("prepare", start, first), (what, first, last)]
    later = [e for e in waits if e["ts"] >= last]
    begun = later[0]["ts"] if later else last
    done = max([_end(e) for e in (*later, *device)], default=last)  # a lane that polls makes no call to wait
    if begun < done < end:
        phases.append(("wait", begun, done))
        last = done
    return [*phases, ("hand over", last, end)]


def _by_kind(spans: Sequence[Span]) -> dict[str, list[Span]]:
    kinds: dict[str, list[Span]] = {}
    for s in sorted((s for s in spans if "kernel" in s.details), key=lambda s: s.start_us):
        kinds.setdefault(str([s.details.get(k) for k in ("kernel", "grid", "block")]), []).append(s)
    return kinds


def _named(what: str, pid: int, tid: int, name: str) -> list[dict[str, object]]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    index = pid if what == "process" else tid
    return [
        {**place, "name": f"{what}_name", "args": {"name": name}},
        {**place, "name": f"{what}_sort_index", "args": {"sort_index": index}},
    ]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _holds(outer: Event, inner: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] < _end(outer))
