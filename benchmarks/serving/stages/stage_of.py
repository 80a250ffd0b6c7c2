"""Which stage of a request a sample belongs to: by its system call, by our function of C, or by the innermost one of Python."""

import re
from collections.abc import Mapping, Sequence

from benchmarks.serving.stages.perf_samples import Frame, Sample

STAGES = {
    "haproxy": "HAProxy: all of its process",
    "sockets": "the kernel's sockets and epoll, and the calls around them",
    "parse": "HTTP: head and framing",
    "route": "route, model, form, request id, deadline, place in the engine's queue",
    "validate": "the body's envelope and columns, read and checked",
    "encode": "raw values into ids, and into the engine's memory",
    "ring": "shared memory between ingress and engine, and the wake-ups",
    "batch": "the engine's queue, batches and their answers",
    "model": "copies and launches for the GPU; on a CPU the model itself",
    "answer": "the answer's text",
    "count": "counters, metrics and samples of scores",
    "ray": "Ray: its threads in our processes, and its own processes",
    "rest": "the interpreter and its event loop, where no function of ours is known",
}
_SOCKET_CALLS = re.compile(r"__x64_sys_(send|recv|epoll|accept|close|shutdown|getsockname)")
_IN_C: Mapping[str, Sequence[str]] = {  # functions of the listener, and of the threads that copy rows
    "sockets": (
        "dpi_pulled", "dpi_first_pushed", "dpi_pushed", "dpi_answered", "dpi_drained", "dpi_closed", "dpi_late",
        "listener_round", "listener_drain", "happened", "looked_at_all", "emptied", "dpi_roomy", "due", "arrived",
        "dpi_arrivals_accepted", "dpi_arrivals_added",
    ),
    "parse": (
        "dpi_http_head", "dpi_http_fixed", "dpi_http_chunks", "request_line", "framing", "differs", "header", "settled",
        "trimmed", "is", "digit", "dpi_taken", "kept", "followed",
    ),
    "route": (
        "dpi_form_of", "mixed", "dpi_key_of", "dpi_found", "own_id", "dpi_express_begun", "dpi_timed", "dpi_asks_best", "fits",
    ),
    "encode": ("dpi_form_encoded", "dpi_form_laid_out"),
    "ring": (
        "dpi_ring_take", "dpi_ring_give", "dpi_ring_join", "dpi_ring_leave", "dpi_ring_ask", "dpi_ring_tell", "dpi_ring_next",
        "dpi_ring_answered", "dpi_asks_tell", "dpi_asks_flush", "dpi_express_woken", "dpi_express_answered",
        "dpi_express_late", "put", "held_back", "dpi_asks_join", "dpi_ring_behind", "dpi_ring_far_behind", "busy",
        "rows_said", "unread", "dpi_now_s",
    ),
    "answer": ("answer", "answered", "dpi_ended", "behind_block", "told", "listener_answer", "all_finite"),
    "count": ("dpi_counted", "sampled", "apart", "dpi_drawn", "dpi_express_seen"),
    "model": ("help", "copy_piece", "dpi_offer_copy", "dpi_finish_copy", "run_batch"),
}  # fmt: skip
_OF_C = {symbol: stage for stage, symbols in _IN_C.items() for symbol in symbols}
_OF_PYTHON: Sequence[tuple[str, Sequence[str]]] = (  # the first of which a part is in "NAME:FILE"
    ("answer", ("DirectServer._write:", "DirectServer._put:", "_flush:", "ScoringRoutes.scores:", "Scoring.finish:")),
    ("answer", ("_check_finite:", "deployments/http_api/answers", "deployments/http_api/score_list")),
    ("answer", ("deployments/protocol/rest",)),
    ("count", ("Express.", "deployments/telemetry/", "deployments/status/", "deployments/metrics", "deployments/score_log/")),
    ("count", ("deployments/scoring/statistics", "deployments/serve/ray_metrics", "/ray/util/metrics")),
    ("parse", ("deployments/direct/request_head",)),
    ("sockets", ("deployments/direct/shared_port", "deployments/direct/listener", "deployments/host_sockets/")),
    ("validate", ("deployments/http_api/request_body", "deployments/http_api/arrow_body", "deployments/http_api/score_route")),
    ("validate", ("deployments/protocol/request", "deployments/protocol/tensors", "deployments/protocol/inference")),
    ("validate", ("deployments/scoring/bodies", "deployments/scoring/request_form", "deployments/scoring/faults")),
    ("validate", ("/pydantic/", "/pyarrow/", "/json/")),
    ("encode", ("deployments/protocol/input", "deployments/fanin/request_memory", "deployments/scoring/served_model")),
    ("batch", ("deployments/fanin/batcher", "deployments/batching/")),
    ("ring", ("deployments/fanin/", "deployments/processes")),
    ("route", ("deployments/",)),
    ("block", ("dpiframe_core/features/row_block", "/numpy/")),
    ("encode", ("dpiframe_core/features/", "kernels/columns/")),
    ("model", ("dpiframe_core/", "kernels/")),
    ("ray", ("/ray/", "/grpc/")),
)  # fmt: skip
_OF_FILE = (
    ("pydantic_core", "validate"),
    ("libarrow", "validate"),
    ("_raylet", "ray"),
    ("cygrpc", "ray"),
    ("libcuda", "model"),
)


def stage_of(sample: Sample, part: str) -> str:
    """One of `STAGES`. part: of `request_budget.PARTS`, the process that the sample is of."""
    if part == "haproxy":
        return "haproxy"
    ours = next((_OF_C[f.symbol] for f in sample.frames if f.symbol in _OF_C and _is_ours(f)), None)
    if sample.in_kernel and any(_SOCKET_CALLS.match(f.symbol) for f in sample.frames):
        return "sockets"
    if ours:
        return ours
    python = next((f.symbol[4:] for f in sample.frames if f.symbol.startswith("py::")), None)
    if python:
        stage = next((stage for stage, parts in _OF_PYTHON if any(part in python for part in parts)), None)
        if stage:  # blocks of rows are filled by an ingress, and put together and checked by the engine
            return {"block": "batch" if part == "engine" else "encode"}.get(stage, stage)
    return next((stage for f in sample.frames for name, stage in _OF_FILE if name in f.file), "rest")


def function_of(sample: Sample) -> str:
    """What to call a sample's place: our function of C or the innermost one of Python, after a system call if it is in one."""
    call = next((f.symbol.removeprefix("__x64_sys_") for f in sample.frames if f.symbol.startswith("__x64_sys_")), "")
    ours = next((f.symbol for f in sample.frames if f.symbol in _OF_C and _is_ours(f)), "")
    python = next((f.symbol[4:].partition(":")[0] for f in sample.frames if f.symbol.startswith("py::")), "")
    named = ours or python or next((f.symbol for f in sample.frames if not f.file.startswith("[")), "?")
    return f"{named} > {call}" if call else named


def _is_ours(frame: Frame) -> bool:
    return "/dpiframe/" in frame.file
