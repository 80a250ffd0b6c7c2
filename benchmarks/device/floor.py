"""Suite `floor`: how near the hardware's limit a call is. The floor of a cell is what no implementation of this model can do
without: one graph launch and wait, the bytes that must move at the measured bandwidths, the operations at the measured rate.

floor = launch and wait + (distinct table rows + weights) / copy bandwidth + (ids + scores) / pinned-memory bandwidth
        + operations / rate
chain floor = floor + a read over the bus and one behind it + (launches - 1) * a dependent kernel: what no implementation can do
        without that takes so many dependent kernels, for each begins a trip to the L2 and back after the one before it
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.device.activity import kernel_steps
from benchmarks.device.chain_steps import NO_STEPS, ChainSteps, chain_steps
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import check
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.systems import dpiframe, reference_scores
from benchmarks.timing import Captured, interleaved
from benchmarks.workloads.blocks import wide_ids
from benchmarks.workloads.paper import FOUR
from benchmarks.workloads.workload import Workload
from dpiframe_core.engine.options import PRECISIONS
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.models.build import build_graph
from kernels.dense.linear import matmul_precision
from kernels.runtime.replay import replay

_WEIGHT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of a device: microseconds, bytes a second, operations a second by precision.

    launch_us: a graph of one kernel, launched and waited for by the driver; polled_us: by looking at a word that it writes.
    """

    launch_us: float
    polled_us: float
    copy_bytes_per_s: float
    pinned_bytes_per_s: float
    operations_per_s: dict[str, float]
    steps: ChainSteps = NO_STEPS


@dataclass(frozen=True, slots=True)
class Needs:
    """What one call of a model cannot do without."""

    device_bytes: float
    host_bytes: float
    operations: float

    def floor_us(self, machine: Machine, precision: str) -> float:
        seconds = self.device_bytes / machine.copy_bytes_per_s + self.operations / machine.operations_per_s[precision]
        return min(machine.launch_us, machine.polled_us) + (seconds + self.host_bytes / machine.pinned_bytes_per_s) * 1e6


def run(sweep: ModelSweep, *, gemm: int = 8192) -> Iterator[Record]:
    """Yields the machine's record first, then one a cell with our latency and its ratio to the floor."""
    machine = measure(sweep.device, PRECISIONS[sweep.device.type], gemm)
    yield machine_record(machine, gemm)
    for w in sweep.workloads():
        for precision in sweep.offered:
            for rows in sweep.batches:
                what = f"dpiframe {w.name} {precision} B={rows}"
                try:
                    yield _cell(sweep, w, precision, rows, machine, what)
                except Exception as error:
                    sweep.failed(what, error)


def _cell(sweep: ModelSweep, w: Workload, precision: str, rows: int, machine: Machine, what: str) -> Record:
    blocks = sweep.blocks(w, rows)
    count = len(blocks)
    with matmul_precision(precision):
        system = dpiframe(w, rows, precision, sweep.device)
        expected = reference_scores(w, blocks)
        worst = max(check(system.score(b), e, precision, what) for b, e in zip(blocks, expected, strict=True))
        times = interleaved({"dpiframe": lambda i: system.score(blocks[i % count])}, sweep.seconds)["dpiframe"]
        device_us = system.device_us(blocks[0])
        steps = kernel_steps(lambda i: system.score(blocks[i % count])) if sweep.device.type == "cuda" else None
        system.close()
    own = {
        "times": times,
        "device_us": device_us,
        "max_abs_err": worst,
        **({"kernels": steps} if steps else {}),
        **system.notes,
    }
    return floor_record(w, blocks, precision, machine, {"ids": sweep.skew, "buckets": "exact"}, own)


def machine_record(machine: Machine, gemm: int) -> Record:
    """The suite's first record: what its floors are made of."""
    return record(
        "floor", "machine", cell={"gemm": gemm}, launch_us=round(machine.launch_us, 2), polled_us=round(machine.polled_us, 2),
        copy_bytes_per_s=round(machine.copy_bytes_per_s), pinned_bytes_per_s=round(machine.pinned_bytes_per_s),
        operations_per_s={p: round(rate) for p, rate in machine.operations_per_s.items()},
        step_us=round(machine.steps.step_us, 3), trip_us=round(machine.steps.trip_us, 3),
    )  # fmt: skip


def floor_record(
    w: Workload,
    blocks: Sequence[RowBlock],
    precision: str,
    machine: Machine,
    cell: Mapping[str, str],
    measured: Mapping[str, Any],
) -> Record:
    """Our record of a cell: what was `measured` (`times` among it), its floors, and the ratios to them."""
    needs = needs_of(w, blocks, precision)
    floor, p50 = needs.floor_us(machine, precision), measured["times"].p50_us
    chain = floor + machine.steps.of(measured.get("launches", 1))
    return record(
        "floor", "dpiframe", model=w.name, batch=blocks[0].rows, precision=precision, cell=cell,
        floor_us=round(floor, 2), ratio=round(p50 / floor, 3),
        chain_floor_us=round(chain, 2), chain_ratio=round(p50 / chain, 3), device_bytes=round(needs.device_bytes),
        host_bytes=round(needs.host_bytes), operations=round(needs.operations), **measured,
    )  # fmt: skip


def needs_of(w: Workload, blocks: Sequence[RowBlock], precision: str) -> Needs:
    """Mean over the batches. A table row that several rows of a batch read counts once; activations count as nothing.

    Raises:
        ValueError: the model is not one of those whose weights each take part in one product a row.
    """
    if not isinstance(w.architecture, FOUR):
        raise ValueError(f"floor: got {w.name}, expected one of Wide&Deep, DeepFM, DCN and DCN-V2")
    shapes = build_graph(w.architecture, w.schema).params
    weights = sum(prod(s) for s in shapes.values()) * _WEIGHT_BYTES[precision]
    products = sum(prod(s) for name, s in shapes.items() if name.endswith("weight"))
    table_bytes = [sum(t.shape[1] * t.element_size() for t in pair) for pair in _tables_by_column(w)]
    read = [sum(len(np.unique(wide_ids(b)[:, c])) * size for c, size in enumerate(table_bytes)) for b in blocks]
    rows = blocks[0].rows
    ids_and_scores = rows * (blocks[0].layout.candidate_ids.nbytes + 4)
    return Needs(float(np.mean(read)) + weights, ids_and_scores, 2.0 * rows * products)


def _tables_by_column(w: Workload) -> list[list[torch.Tensor]]:
    first = w.first_order_tables
    return [[t, *first[i : i + 1]] for i, t in enumerate(w.embedding_tables)]


def measure(device: torch.device, precisions: Sequence[str], gemm: int) -> Machine:
    """The device's own limits, on random data. A CPU has no launch, and its bus is its memory."""
    copied = torch.rand(1 << (28 if device.type == "cuda" else 24), device=device)
    target = torch.empty_like(copied)
    copy = 2 * copied.nbytes / _seconds(lambda: target.copy_(copied), device)
    rates = {p: _rate(p, device, gemm) for p in precisions}
    if device.type == "cpu":
        return Machine(0.0, 0.0, copy, copy, rates)
    pinned = torch.rand(1 << 26, pin_memory=True)
    bus = pinned.nbytes / _seconds(lambda: target[: len(pinned)].copy_(pinned, non_blocking=True), device)
    return Machine(*_launch_us(), copy, bus, rates, chain_steps(device))


def _rate(precision: str, device: torch.device, size: int) -> float:
    """Operations a second of a size^3 product."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    with matmul_precision(precision):
        if precision == "fp8":
            one = torch.ones((), device=device)
            a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            seconds = _seconds(lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16), device)
        else:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            a, b = a.to(dtype), b.to(dtype)
            out = torch.empty_like(a)
            seconds = _seconds(lambda: torch.mm(a, b, out=out), device)
    return 2 * size**3 / seconds


def _seconds(work: Callable[[], object], device: torch.device, times: int = 7) -> float:
    """The median device time of one call, after two that warm up."""
    found = []
    for _ in range(times + 2):
        if device.type == "cpu":
            begin = perf_counter()
            work()
            found.append(perf_counter() - begin)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found[2:])


_TELL = """extern "C" __global__ void tell(int* word, int* count) {
    const int n = *count + 1;
    *count = n;
    asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(word), "r"(n) : "memory");
}"""


def _launch_us() -> tuple[float, float]:
    """One kernel that only tells that it ran, in a CUDA graph: launched and waited for by the driver; by polling its word."""
    import cupy

    tell = cupy.RawModule(code=_TELL, backend="nvrtc").get_function("tell")
    word, count = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.zeros(1, dtype=torch.int32, device="cuda")

    def work() -> None:
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            tell((1,), (1,), (word.data_ptr(), count.data_ptr()))

    graph = Captured(work, holds=(word, count))
    polled = replay(graph.handle, graph.stream.cuda_stream, word.numpy())  # as a lane does it
    times = interleaved({"driver": lambda i: graph(), "polled": lambda i: polled(1)}, 0.2)
    graph.close()
    return times["driver"].p50_us, times["polled"].p50_us
