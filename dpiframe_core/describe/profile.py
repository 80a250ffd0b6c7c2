"""Runs one request under torch's profiler (Kineto and CUPTI) and reads its timeline. `trace` knows what the events mean.

On a GPU it runs twice: operator by operator on the plan's streams, each inside a range that carries its name, and as the one
captured graph that serves. The executor is as always: it is the operators it is given that open the ranges.
"""

import copy
import json
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dpiframe_core.bundle.bundle import Bundle
from dpiframe_core.describe.trace import Event, Labels, Trace, named_after, timeline
from dpiframe_core.engine.buckets import geometric_buckets
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.engine.program import CpuProgram, CudaProgram
from dpiframe_core.engine.tuning_cache import kernel_source_hash
from dpiframe_core.errors import Unavailable
from dpiframe_core.features.examples import sample_block
from dpiframe_core.machine.machine import machine
from dpiframe_core.operators.executor import Operator, Values
from dpiframe_core.operators.generic.bound_calls import Call

ISSUED, CAPTURED = "operator by operator", "captured graph"
_RUNS = 7  # of each way; the median one is shown
_LARGEST = 4096  # the service's default: a request up to that many rows runs at the bucket that it would run at there


def profile_bundle(bundle: Bundle, rows: int, device: str = "auto", precision: str | None = None) -> Trace:
    """The timeline of one request of `rows` rows, ids drawn uniformly from the whole tables.

    Raises:
        InputError, BundleError: as `Engine` and its warm-up.
        Unavailable: the device's events cannot be had.
    """
    bucket = next(b for b in geometric_buckets(max(rows, _LARGEST)) if b >= rows)
    engine = Engine(bundle, device, precision, EngineOptions(max_batch_rows=bucket, buckets=(bucket,), lanes=1))
    engine.warmup()
    program = engine.program(bucket)
    labels = _labels(program)
    block = sample_block(engine.schema, rows)
    lane = _named_lane(engine, program, bucket, labels)
    ways: dict[str, Callable[[], object]] = {ISSUED: partial(lane.run, (block,))}
    if isinstance(lane, CudaLane):
        ways[CAPTURED] = partial(engine.run_batch, (block,))
    events = _recorded(ways)
    spans = timeline(events, ISSUED, labels)
    if CAPTURED in ways:
        spans += named_after(timeline(events, CAPTURED, labels), spans)
    if CAPTURED in ways and not any("kernel" in s.details for s in spans):
        raise Unavailable(
            f"profiler: got no kernels of {engine.device}, expected CUPTI to report them (no other profiler may run)"
        )
    lane.close()
    engine.close()
    return Trace(_facts(engine, program, rows, bucket if CAPTURED in ways else rows), spans)


def _labels(program: CpuProgram | CudaProgram) -> Labels:
    """`module/node (op)` of every operator of the program's plan."""
    nodes = {n.name: n for n in program.graph.nodes}
    labels = {}
    for step in program.plan.steps:
        n = nodes[step.node]
        about = {"node": n.name, "op": n.op, "module": n.module, "plan stream": step.stream, "level": step.level}
        labels[f"{n.module}/{n.name} ({n.op})"] = about
    return labels


def _named_lane(engine: Engine, program: CpuProgram | CudaProgram, bucket: int, labels: Labels) -> CpuLane | CudaLane:
    """A lane of its own over the engine's weights and choices, not captured, whose operators open a range each."""
    names = {about["node"]: label for label, about in labels.items()}

    def named(operators: Mapping[str, Operator]) -> dict[str, Operator]:
        return {node: _in_range(names[node], operator) for node, operator in operators.items()}

    # A copy shares the weights; only the function that hands out operators is another one.
    layout = engine.schema.block_layout
    if isinstance(program, CpuProgram):
        on_cpu = copy.copy(program.operators)
        on_cpu.for_block = lambda block: named(program.operators.for_block(block))  # type: ignore[method-assign]
        on_cpu.in_place = lambda node, *to: _called_in_range(  # type: ignore[method-assign]
            names[node.name], program.operators.in_place(node, *to)
        )
        return CpuLane(on_cpu, program.plan, layout, program.graph)
    on_gpu = copy.copy(program.operators)
    on_gpu.for_buffers = lambda *args: named(program.operators.for_buffers(*args))  # type: ignore[method-assign]
    own, target = replace(program, operators=on_gpu), torch.device(engine.device)
    lane = CudaLane([own], layout, (bucket,), engine.precision, target, {}, capture=False)
    lane.prepare()
    return lane


def _in_range(name: str, operator: Operator) -> Operator:
    def run(values: Values) -> None:
        with record_function(name):
            operator(values)

    return run


def _called_in_range(name: str, call: Call) -> Call:
    def run() -> None:
        with record_function(name):
            call()

    return run


def _recorded(ways: Mapping[str, Callable[[], object]]) -> list[Event]:
    """The profiler's events of some runs of each way, every run in a range that is named for it."""
    for run in ways.values():
        run()
    on_gpu = CAPTURED in ways
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as session:
        for name, run in ways.items():
            for _ in range(_RUNS):
                with record_function(name):
                    run()
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "session.json")
        session.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_bytes())["traceEvents"]
    return events


def _facts(engine: Engine, program: CpuProgram | CudaProgram, rows: int, bucket: int) -> dict[str, Any]:
    here = machine(torch.device(engine.device))
    return {
        "model": engine.manifest.name,
        "version": engine.manifest.version,
        "architecture": engine.manifest.architecture.type,
        "fingerprint": engine.bundle.fingerprint,
        "rows": rows,
        "bucket": bucket,
        "device": engine.device,
        "gpu": here.gpu or None,
        "driver": here.driver or None,
        "precision": engine.precision,
        "program": program.name,
        "streams": program.plan.streams,
        "torch": here.torch,
        "cupy": here.cupy or None,
        "cuda": torch.version.cuda,
        "kernels": kernel_source_hash()[:12],
        "python": platform.python_version(),
        "runs": _RUNS,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
