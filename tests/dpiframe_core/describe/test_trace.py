"""Reading a profiler session, from events as Kineto writes them where there is a GPU: streams, correlation, a graph launch."""

import json

import pytest

from dpiframe_core.describe.timeline_plot import plot_trace
from dpiframe_core.describe.trace import Span, Trace, describe, named_after, short, timeline

LABELS = {
    f"{module}/{node} ({op})": {"node": node, "op": op, "module": module, "plan stream": stream, "level": level}
    for module, node, op, stream, level in (
        ("embedding", "lookup", "lookup", 0, 0),
        ("cross", "cross.0", "cross_v2", 0, 1),
        ("deep", "deep.0", "linear", 1, 1),
        ("head", "head", "head", 0, 2),
    )
}
LOOKUP, CROSS, DEEP, HEAD = LABELS
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64(float, int)>(Params)"


class Session:
    """Events of requests on one host thread and some streams, in microseconds."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name", "ts": 0.0, "pid": 1, "tid": 0, "args": {"name": "python"}}]

    def add(self, cat, name, ts, dur, tid=77, **args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})

    def request(self, section, ts, dur):
        self.add("user_annotation", section, ts, dur)

    def operator(self, label, ts, dur, correlation):
        self.add("user_annotation", label, ts, dur)
        self.add("cpu_op", "aten::mm", ts + 0.5, dur - 1)
        self.add("cuda_driver", "cuLaunchKernel", ts + 1, 1, correlation=correlation)

    def kernel(self, name, ts, dur, stream, correlation, grid=(4, 1, 1), cat="kernel"):
        args = {"stream": stream, "correlation": correlation, "grid": list(grid), "block": [256, 1, 1]}
        self.add(cat, name, ts, dur, stream, **args)


def issued(session, at, scale=1):
    session.request("issued", at, 100 * scale)
    for i, label in enumerate(LABELS):
        session.operator(label, at + 10 + 10 * i, 5, 1000 * at + i)
    session.add("cuda_runtime", "cudaStreamWaitEvent", at + 46, 1, correlation=1000 * at + 10)
    session.add("cuda_runtime", "cudaStreamSynchronize", at + 50, 30, correlation=1000 * at + 11)
    session.kernel("lookup", at + 20, 5, 13, 1000 * at)
    session.kernel(GEMM, at + 30, 8, 13, 1000 * at + 1)
    session.kernel(GEMM, at + 35, 9, 21, 1000 * at + 2)
    session.kernel("head", at + 60, 3, 13, 1000 * at + 3)


def captured(session, at):
    session.request("captured", at, 40)
    session.add("cuda_runtime", "cudaGraphLaunch", at + 4, 6, correlation=9000)
    session.add("cuda_runtime", "cudaStreamSynchronize", at + 11, 25, correlation=9001)
    session.kernel("lookup", at + 9, 4, 13, 9000)
    session.kernel(GEMM, at + 14, 8, 13, 9000)
    session.kernel(GEMM, at + 15, 9, 30, 9000)
    session.kernel("head", at + 25, 3, 13, 9000)


def spans_of(build, section="issued"):
    session = Session()
    build(session)
    return timeline(session.events, section, LABELS)


def on(spans, row):
    return [(s.name, round(s.start_us, 3), round(s.end_us, 3)) for s in spans if s.row == row]


def test_kernels_get_the_operator_whose_range_launched_them_and_a_row_a_stream():
    spans = spans_of(lambda s: issued(s, 1000))
    assert on(spans, "stream 0") == [(LOOKUP, 20, 25), (CROSS, 30, 38), (HEAD, 60, 63)]
    assert on(spans, "stream 1") == [(DEEP, 35, 44)]
    assert on(spans, "operators") == [(LOOKUP, 10, 15), (CROSS, 20, 25), (DEEP, 30, 35), (HEAD, 40, 45)]
    assert on(spans, "host") == [("prepare", 0, 10), ("issue operators", 10, 45), ("wait", 50, 80), ("hand over", 80, 100)]
    [deep] = [s for s in spans if s.row == "stream 1"]
    assert dict(deep.details) == {
        "node": "deep.0", "op": "linear", "module": "deep", "plan stream": 1, "level": 1,
        "kernel": GEMM, "grid": [4, 1, 1], "block": [256, 1, 1], "stream": 21, "correlation": 1000002,
    }  # fmt: skip


def test_the_request_of_the_median_time_is_the_one_shown():
    spans = spans_of(lambda s: [issued(s, 1000, 1), issued(s, 3000, 5), issued(s, 5000, 2)])
    assert max(s.end_us for s in spans) == 200


def test_a_launch_that_the_profiler_does_not_record_is_found_by_the_gpus_own_range():
    def build(session):
        session.request("issued", 0, 100)
        session.add("user_annotation", DEEP, 10, 5)
        session.kernel("persistent", 20, 30, 13, 5)
        session.add("gpu_user_annotation", DEEP, 20, 30, 13)
        session.kernel("elsewhere", 21, 3, 14, 6)

    spans = spans_of(build)
    assert on(spans, "stream 0") == [(DEEP, 20, 50)]
    assert on(spans, "stream 1") == [("elsewhere", 21, 24)]


def test_work_outside_every_operator_keeps_its_own_name():
    def build(session):
        issued(session, 0)
        session.add("cuda_runtime", "cudaMemcpyAsync", 47, 1, correlation=77)
        session.kernel("Memcpy DtoH (Device -> Pinned)", 64, 2, 13, 77, cat="gpu_memcpy")

    assert on(spans_of(build), "stream 0")[-1] == ("Memcpy DtoH", 64, 66)


def test_a_captured_graph_shows_its_launch_and_takes_names_by_the_order_of_equal_kernels():
    session = Session()
    issued(session, 0)
    captured(session, 200)
    first, second = timeline(session.events, "issued", LABELS), timeline(session.events, "captured", LABELS)
    assert on(second, "host") == [("prepare", 0, 4), ("launch", 4, 10), ("wait", 11, 36), ("hand over", 36, 40)]
    assert on(second, "stream 1") == [("Kernel2", 15, 24)]
    named = named_after(second, first)
    assert on(named, "stream 0") == [(LOOKUP, 9, 13), (CROSS, 14, 22), (HEAD, 25, 28)]
    assert on(named, "stream 1") == [(DEEP, 15, 24)]
    assert [s.module for s in named if s.row.startswith("stream")] == ["embedding", "cross", "head", "deep"]
    assert on(named, "host") == on(second, "host")


def test_kernels_that_do_not_occur_equally_often_are_not_guessed():
    session = Session()
    issued(session, 0)
    captured(session, 200)
    session.kernel(GEMM, 226, 1, 30, 9000)
    session.kernel("head", 228, 1, 13, 9000, grid=(8, 1, 1))
    named = named_after(timeline(session.events, "captured", LABELS), timeline(session.events, "issued", LABELS))
    assert [s[0] for s in on(named, "stream 0")] == [LOOKUP, "Kernel2", HEAD, "head"]
    assert [s[0] for s in on(named, "stream 1")] == ["Kernel2", "Kernel2"]


def test_a_session_without_the_request_is_refused():
    with pytest.raises(ValueError, match="profiler session: got no range 'other', expected one a request"):
        spans_of(lambda s: issued(s, 0), "other")


def whole_trace():
    session = Session()
    issued(session, 0)
    captured(session, 200)
    first = timeline(session.events, "issued", LABELS)
    facts = {"model": "m", "architecture": "dcnv2", "rows": 64, "precision": "tf32", "gpu": "NVIDIA H200", "device": "cuda:0"}
    return Trace(facts, first + named_after(timeline(session.events, "captured", LABELS), first))


def test_the_json_is_a_chrome_trace_with_a_process_a_section_and_a_thread_a_row():
    trace = whole_trace()
    read = json.loads(json.dumps(trace.chrome()))
    assert read["otherData"]["gpu"] == "NVIDIA H200"
    events = [e for e in read["traceEvents"] if e["ph"] == "X"]
    about = [e for e in read["traceEvents"] if e["ph"] == "M"]
    assert len(events) + len(about) == len(read["traceEvents"])
    assert len(events) == len(trace.spans)
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events)
    processes = {e["args"]["name"]: e["pid"] for e in about if e["name"] == "process_name"}
    threads = {(e["pid"], e["args"]["name"]): e["tid"] for e in about if e["name"] == "thread_name"}
    assert processes == {"issued": 1, "captured": 2}
    assert [name for pid, name in threads if pid == 1] == ["host", "operators", "stream 0", "stream 1"]
    assert [name for pid, name in threads if pid == 2] == ["host", "stream 0", "stream 1"]
    deep = [e for e in events if e["name"] == DEEP and e["tid"] == threads[e["pid"], "stream 1"]]
    assert [(e["pid"], e["cat"], e["ts"], e["dur"]) for e in deep] == [(2, "deep", 15, 9), (1, "deep", 35, 9)]


def test_no_span_overlaps_another_of_its_row():
    kernels = [(0, 10), (4, 6), (5, 12), (10, 11), (11, 20)]
    spans = tuple(Span("s", "stream 0", str(i), *span) for i, span in enumerate(kernels))
    rows = Trace({}, spans).rows("s")
    assert {row: [s.name for s in spans] for row, spans in rows.items()} == {
        "stream 0": ["0", "3", "4"], "stream 0 (2)": ["1"], "stream 0 (3)": ["2"],
    }  # fmt: skip


def test_the_summary_counts_kernels_and_streams():
    assert describe(whole_trace()).splitlines() == [
        "issued: 100.0 us from request to scores; 4 kernels on 2 stream(s), 25.0 us in 43.0 us",
        "captured: 40.0 us from request to scores; 4 kernels on 2 stream(s), 24.0 us in 19.0 us",
    ]


def test_the_picture_is_drawn(tmp_path):
    plot_trace(whole_trace(), tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    plot_trace(whole_trace(), tmp_path / "trace.svg")
    drawn = (tmp_path / "trace.svg").read_text()
    assert all(text in drawn for text in ("<!-- prepare -->", "<!-- deep.0 -->", "<!-- stream 1 -->", "<!-- cross -->"))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("lookup", "lookup"),
        (GEMM, "Kernel2"),
        ("void at::native::(anonymous namespace)::CatArray<at::native::Opaque<4u>, int>(int*)", "CatArray"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(cublasGemvParamsEx<int>)", "kernel"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("Memset (Device)", "Memset"),
    ],
)  # fmt: skip
def test_a_short_name_drops_types_and_parameters(kernel, name):
    assert short(kernel) == name
