"""A lane of a GPU runs one batch at a time, host memory to host memory. It owns what must not be shared between batches in
flight: staging, activation buffers, streams and captured graphs. Two lanes overlap: one copies while the other computes.
"""

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dpiframe_core.engine.calibration import Calibration, calibrated
from dpiframe_core.engine.cuda_bucket import CapturedBucket, EagerBucket, LaneBuckets, RunBatch, batch_runner, settled
from dpiframe_core.engine.program import CudaProgram
from dpiframe_core.engine.staging import DeviceRows, Staging
from dpiframe_core.errors import Unavailable
from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock
from dpiframe_core.operators.executor import execute_on_streams
from dpiframe_core.operators.region import RegionFailed
from dpiframe_core.operators.workspace import Workspace, done_words
from kernels.dense.linear import matmul_precision
from kernels.runtime.fastest import Found
from kernels.runtime.gc_pause import gc_paused
from kernels.runtime.launch import give_back, own_stream
from kernels.runtime.replay import stages
from kernels.runtime.source import KernelSource, loading
from kernels.runtime.state import STATE_WORDS, StateWord

log = logging.getLogger(__name__)

# Buckets from here on are launched first and staged while they start. A launch takes 5 us until the first kernel runs, but a
# lookup that waits for its rows takes 2 us longer (H200): 256 rows came out 1.5 us slower that way, 1,024 1 to 2 us faster.
AHEAD_ROWS = 512
# Buckets of so many bytes of rows are copied to the device while other lanes compute: 8,192 rows of MLPerf's shape take 115 us
# over the bus, during which a lookup that reads them in place keeps the multiprocessors from those lanes' products (H200).
COPIED_BYTES = 1 << 20


class CudaLane:
    """Runs a model on its own streams, one captured CUDA graph a bucket; ids are read from, scores written to pinned memory.

    All buckets share the largest one's staging and buffers: a bucket is a number of rows, so rows [0, bucket) of each. A batch
    smaller than its bucket leaves the other rows as they were: the kernels skip them, the GEMMs compute them for nobody.

    Args:
        programs: ways to run the model, of which the fastest is kept for each bucket.
        calibrations: by bucket, what was found. The first lane to warm up fills it, the others follow it.
        overlaps: whether other lanes have batches in flight now, beside this one's; None: there are no others.
    """

    def __init__(
        self,
        programs: Sequence[CudaProgram],
        layout: BlockLayout,
        buckets: Sequence[int],
        precision: str,
        device: torch.device,
        calibrations: dict[int, Calibration],
        *,
        capture: bool = True,
        overlaps: Callable[[], bool] | None = None,
    ) -> None:
        self._programs, self._precision, self._device = {p.name: p for p in programs}, precision, device
        self._calibrations = calibrations
        self._found: Found = {}
        self.buckets = tuple(sorted(buckets))
        rows, graph = self.buckets[-1], programs[0].graph
        self._generation = 0
        self._staging = Staging(layout, rows, carries=any(p.operators.carries for p in programs))
        self._overlaps, self._layout = overlaps, layout
        copies = overlaps is not None and capture and self._is_large(rows)
        self._on_device = DeviceRows(self._staging.batch, device) if copies else None
        self._streams = [own_stream(device) for _ in range(max(p.plan.streams for p in programs))]
        self._workspace = Workspace(
            batch=self._staging.batch,
            state=torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            done=torch.zeros(done_words(rows), dtype=torch.int32, pin_memory=True),
        )
        for program in programs:
            program.operators.allocate(self._workspace, rows)
        self._output = graph.output
        self._scores = torch.zeros(rows, graph.widths[graph.output], pin_memory=True)
        self._result = self._scores.numpy()
        last = graph.producers()[graph.output]
        self._has_head = (last.attrs.members or (last,))[-1].op == "head"
        if self._has_head:
            self._workspace.values[graph.output] = self._scores  # the head writes over the bus itself: one copy node fewer
        self._done = self._workspace.done.numpy() if self._has_head else None
        self._several = torch.cuda.device_count() > 1
        self._capture = capture
        self._ready: list[CapturedBucket | EagerBucket] = []  # as `buckets`
        self._copied: dict[int, CapturedBucket] = {}  # of large buckets the same with their rows copied first
        self._run: RunBatch = _not_ready

    @property
    def bytes_used(self) -> int:
        """Device memory of the activation buffers."""
        return self._workspace.bytes_used

    def prepare(self) -> None:
        """Warms up and captures every bucket, the largest first, so that smaller ones fit in its memory."""
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        with loading(self._sources()), self._issuing():
            self._compile_regions()
            for rows in reversed(self.buckets):
                self._staging.stage_zeros(rows)
                self._ready.insert(0, self._prepared(rows, pool))
                if self._on_device and self._is_large(rows):
                    program = self._programs[self._calibrations[rows].program]
                    self._issue(program, rows, self._on_device)
                    self._streams[0].synchronize()
                    self._copied[rows] = self._captured(program, rows, pool, self._on_device)
        ready, stream = dict(zip(self.buckets, self._ready, strict=True)), self._streams[0].cuda_stream
        with torch.cuda.device(self._device):  # whose context C is told
            self._run = batch_runner(LaneBuckets(ready, self._copied, self._staging, self._done, self._result, stream))

    def compile(self) -> None:
        """Compiles the kernels of all programs, those that are in no cache; nothing is launched."""
        with loading(self._sources()):
            pass

    def _sources(self) -> Iterator[KernelSource]:
        """What all kernels of ours are compiled from, in the order in which buckets are prepared."""
        for rows in reversed(self.buckets):
            on_device = self._on_device is not None and self._is_large(rows)
            by_operators = {p.operators: p for p in self._wanted(rows)}  # which programs of one graph share
            for program in by_operators.values():
                yield from program.operators.sources(rows, ahead=self._ahead(program, rows), on_device=on_device)

    @contextmanager
    def _issuing(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.inference_mode(), matmul_precision(self._precision):
            yield

    def _compile_regions(self) -> None:
        """Has Inductor compile what some bucket may need: seconds, of one core and this thread's."""
        rows = self.buckets[-1]
        for program in {p.name: p for b in self.buckets for p in self._wanted(b)}.values():
            try:
                with torch.cuda.stream(self._streams[0]):
                    program.operators.compile_regions(self._workspace, rows)
            except RegionFailed as failure:
                self._leave(program, failure)

    def _known(self, rows: int) -> Calibration | None:
        known = self._calibrations.get(rows)
        return known if known and known.program in self._programs else None

    def _wanted(self, rows: int) -> list[CudaProgram]:
        """The programs that a bucket chooses from."""
        known = self._known(rows)
        return [self._programs[known.program]] if known else [p for p in self._programs.values() if p.fits(rows)]

    def _prepared(self, rows: int, pool: Any) -> CapturedBucket | EagerBucket:
        """A bucket's program: the one that was found fastest before, or is found so now."""
        known, wanted = self._known(rows), self._wanted(rows)
        programs = [p for p in wanted if self._tuned(p, rows, brief=self._capture and len(wanted) > 1)]
        if not programs:  # what an earlier warm-up chose cannot be had any more
            return self._prepared(rows, pool)
        if not self._capture:
            return EagerBucket(partial(self._issue_alone, programs[0], rows), self._streams[0])
        captured = {program.name: self._captured(program, rows, pool) for program in programs}
        if not known:
            known = _calibrated(rows, captured)
            near = {p.operators for p in programs if p.operators.rough(rows) and known.near(p.name)}
            for program in [p for p in programs if p.operators in near]:
                captured[program.name].release()
                program.operators.tune(self._workspace, rows, self._found)
                captured[program.name] = self._captured(program, rows, pool)
            known = _calibrated(rows, captured) if near else known
            self._calibrations[rows] = known
        kept, best = captured.pop(known.program), self._programs[known.program]
        for other in captured.values():
            other.release()
        again = partial(self._captured, best, rows, pool)
        return settled(kept, best.operators.tied(rows), again, self._streams[0])

    def _tuned(self, program: CudaProgram, rows: int, *, brief: bool) -> bool:
        """Whether a program can run. One whose regions do not compile is dropped, for there are others."""
        try:
            self._issue(program, rows)  # loads modules and makes cuBLAS pick its algorithms, which capture forbids
        except RegionFailed as failure:
            self._leave(program, failure)
            return False
        self._streams[0].synchronize()
        program.operators.tune(self._workspace, rows, self._found, brief=brief)
        return True

    def _leave(self, program: CudaProgram, failure: RegionFailed) -> None:
        """Goes on without a program whose regions do not compile, if there are others."""
        if len(self._programs) == 1:
            raise failure
        torch.cuda.synchronize(self._device)  # what was issued of it on other streams writes into buffers of the others
        log.warning("%s; the other ways to run the model are left", failure)
        del self._programs[program.name]

    def _captured(self, program: CudaProgram, rows: int, pool: Any, copies: DeviceRows | None = None) -> CapturedBucket:
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), self._streams[0]
        with gc_paused(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._issue(program, rows, copies)
        graph.instantiate()
        return CapturedBucket(graph, stream, self._done, ahead=not copies and self._ahead(program, rows))

    def _is_large(self, rows: int) -> bool:
        return self._layout.offsets(rows, rows)[-1] >= COPIED_BYTES

    def _ahead(self, program: CudaProgram, rows: int) -> bool:
        """Whether the bucket's graph is launched before its rows are staged: one lookup alone reads them, and waits for them.

        Not with CUDA_LAUNCH_BLOCKING=1: such a launch returns when the graph is done, and that waits for rows to be staged.
        """
        if rows < AHEAD_ROWS or not self._capture or not self._has_head or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            return False
        return sum(n.op == "lookup" for n in program.graph.nodes) == 1 and stages()

    @property
    def copies(self) -> bool:
        """Whether `run` may copy rows to the device first."""
        return self._on_device is not None

    def run(self, blocks: Sequence[RowBlock], generation: int = 0, copied: bool | None = None) -> BatchResult:
        """Scores the rows of the blocks, in order; blocks until they lie in host memory (the GIL is free meanwhile).

        copied: whether rows of large batches are copied to the device first; None: while other lanes compute.
        """
        if generation != self._generation:
            self._switch(generation)
        if copied is None:
            copied = self._overlaps() if self._copied and self._overlaps else False
        if self._several:  # the current device is each thread's own
            with torch.cuda.device(self._device):
                return self._run(blocks, copied)
        return self._run(blocks, copied)

    def value_ranges(self, block: RowBlock) -> dict[str, float]:
        """The largest magnitude of each value in the dense dtype over a block's rows. Runs the first program as it stands."""
        program, bucket = next(iter(self._programs.values())), self.buckets[-1]
        rows = self._staging.stage((block,), bucket)
        with torch.cuda.device(self._device), torch.inference_mode(), matmul_precision(self._precision):
            self._issue(program, bucket)
            torch.cuda.synchronize(self._device)
        dtype, values = program.operators.dtype, self._workspace.values
        return {name: float(t[:rows].abs().amax()) for name, t in values.items() if t.dtype == dtype and t.is_cuda}

    def replay_us(self, rows: int, repeats: int) -> float:
        """Device time of one run of the bucket that holds `rows`: its graph replayed back to back on what lies staged."""
        launch, stream = self._ready[bisect_left(self.buckets, rows)].launch, self._streams[0]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(stream)
        for _ in range(repeats):
            launch()
        end.record(stream)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeats

    def close(self) -> None:
        """Releases the graphs and the buffers."""
        self._streams[0].synchronize()
        for bucket in (*self._ready, *self._copied.values()):
            bucket.release()
        self._ready, self._copied, self._run = [], {}, _not_ready
        del self._workspace
        give_back(self._streams, self._device)
        self._streams = []

    def _switch(self, generation: int) -> None:
        """Later runs of this lane read the other generation of segment descriptors."""
        with torch.cuda.stream(self._streams[0]):
            self._workspace.state[StateWord.GENERATION].fill_(generation)
        self._generation = generation

    def _issue(self, program: CudaProgram, rows: int, copies: DeviceRows | None = None) -> None:
        workspace, values = self._workspace, self._workspace.values
        if copies:
            copies.copy(rows, self._streams[0])
            workspace = replace(workspace, batch=copies.batch)
        operators = program.operators.for_buffers(workspace, rows, not copies and self._ahead(program, rows))
        execute_on_streams(program.plan, operators, values, self._streams, overlap=program.overlap)
        if not self._has_head:
            with torch.cuda.stream(self._streams[0]):
                self._scores[:rows].copy_(values[self._output][:rows], non_blocking=True)

    def _issue_alone(self, program: CudaProgram, rows: int) -> None:
        with torch.inference_mode(), matmul_precision(self._precision):
            self._issue(program, rows)


def _not_ready(_blocks: Sequence[RowBlock], _copied: bool) -> BatchResult:
    raise Unavailable("lane: got a batch, expected none before it is prepared and after it is closed")


def _calibrated(rows: int, captured: Mapping[str, CapturedBucket]) -> Calibration:
    return calibrated(rows, {name: partial(one.run, done_words(rows)) for name, one in captured.items()})
