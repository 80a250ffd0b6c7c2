"""A lane runs one batch at a time, host memory to host memory. It owns what must not be shared between batches in flight:
staging, activation buffers, streams and captured graphs. Two lanes overlap: one copies while the other computes.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import sched_yield
from typing import Any

import numpy as np
import torch

from dpiframe_core.calibration import Calibration, calibrated
from dpiframe_core.executor import Values, execute_on_streams
from dpiframe_core.operators_cuda import DONE, ROWS_A_WORD
from dpiframe_core.program import CudaProgram
from dpiframe_core.types import BatchResult, BlockLayout, RowBlock
from kernels.dense import matmul_precision
from kernels.launch import give_back, own_stream
from kernels.lookup_plan import Batch

_POLLS = 5000  # some 2 ms
_CONTENDED_S = 20e-6  # a poll takes less than 1 us if nobody else runs
_ONE = np.int32(1)


class CudaLane:
    """Runs a model on its own streams, one captured CUDA graph a bucket; ids are read from, scores written to pinned memory.

    All buckets share the largest one's staging and buffers: a bucket is a number of rows, so rows [0, bucket) of each. A batch
    smaller than its bucket leaves the other rows as they were: the kernels skip them, the GEMMs compute them for nobody.

    Args:
        programs: ways to run the model, of which the fastest is kept for each bucket.
        calibrations: by bucket, what was found. The first lane to warm up fills it, the others follow it.
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
    ) -> None:
        self._programs, self._precision, self._device = {p.name: p for p in programs}, precision, device
        self._calibrations = calibrations
        self.buckets = tuple(sorted(buckets))
        rows = self.buckets[-1]
        self._pinned = torch.zeros(layout.offsets(rows, rows)[-1], dtype=torch.uint8, pin_memory=True)
        self._state = torch.zeros(4, dtype=torch.int32, device=device)  # see kernels/common.cuh
        self._generation = 0
        self._stage = RowBlock.over(self._pinned.numpy(), layout, rows, rows)
        self._batch = _batch(self._stage)
        self._rows_word = self._stage.header[10:11]
        self._streams = [own_stream(device) for _ in range(max(p.plan.streams for p in programs))]
        self._values: Values = {}
        for program in programs:
            for value in dict.fromkeys(o for n in program.graph.nodes for o in n.outputs):
                if value not in self._values:
                    width, dtype = program.operators.value_shape(value)
                    self._values[value] = torch.zeros(rows, width, dtype=dtype, device=device)
            self._values |= program.operators.scratch(rows)
        graph = programs[0].graph
        self._output = graph.output
        self._device_scores = self._values[graph.output]
        self._scores = torch.zeros(rows, graph.widths[graph.output], pin_memory=True)
        self._result = self._scores.numpy()
        words = -(-rows // ROWS_A_WORD)
        self._values[DONE] = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self._done, self._wanted = self._values[DONE].numpy(), np.zeros(words, np.int32)
        self._done_bytes, self._wanted_bytes = (memoryview(a.data).cast("B") for a in (self._done, self._wanted))
        last = graph.producers()[graph.output]
        self._has_head = (last.attrs.members or (last,))[-1].op == "head"
        if self._has_head:
            self._values[graph.output] = self._scores  # the head writes over the bus itself: one copy node fewer
        self._several = torch.cuda.device_count() > 1
        self._capture = capture
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._launch: list[Callable[[], None]] = []
        self._wait: Callable[[], None] = self._streams[0].synchronize

    @property
    def bytes_used(self) -> int:
        """Device memory of the activation buffers."""
        return sum(t.nbytes for t in self._values.values() if t.is_cuda)

    def prepare(self) -> None:
        """Warms up and captures every bucket, the largest first, so that smaller ones fit in its memory."""
        from cupy.cuda import runtime

        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        self._wait = partial(runtime.streamSynchronize, self._streams[0].cuda_stream)
        launches: list[Callable[[], None]] = []
        compilations = [call for p in self._programs.values() for call in p.operators.compile(self.buckets)]
        with ThreadPoolExecutor() as threads:  # NVRTC takes half a second a kernel, and one core
            for done in [threads.submit(call) for call in compilations]:
                done.result()
        with torch.cuda.device(self._device), torch.inference_mode(), matmul_precision(self._precision):
            for rows in reversed(self.buckets):
                self._rows_word[0] = rows
                self._stage.request_of_row[:rows] = 0
                launches.append(self._prepared(rows, pool))
        self._launch = launches[::-1]

    def _prepared(self, rows: int, pool: Any) -> Callable[[], None]:
        """The launch of a bucket's program: the one that was found fastest before, or is found so now."""
        known = self._calibrations.get(rows)
        programs = [self._programs[known.program]] if known else list(self._programs.values())
        for program in programs:
            self._issue(program, rows)  # loads modules and makes cuBLAS pick its algorithms, which capture forbids
            self._streams[0].synchronize()
            program.operators.tune(self._values, rows, self._state)
        if not self._capture:
            return partial(self._issue_alone, programs[0], rows)
        graphs = {program.name: self._captured(program, rows, pool) for program in programs}
        launches = {name: _replay(graph, self._streams[0]) for name, graph in graphs.items()}
        if not known:
            known = calibrated(rows, {name: partial(self._launch_and_wait, launch, rows) for name, launch in launches.items()})
            self._calibrations[rows] = known
        for name, graph in graphs.items():
            if name != known.program:
                graph.reset()
        self._graphs.append(graphs[known.program])
        return launches[known.program]

    def _captured(self, program: CudaProgram, rows: int, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._streams[0], capture_error_mode="thread_local"):
            self._issue(program, rows)
        return graph

    def _launch_and_wait(self, launch: Callable[[], None], rows: int) -> None:
        """Polls the words that the head writes, which is 2 to 3 us faster than the driver's wait (H200).

        The driver waits without the GIL. So once others turn out to want it, or after some milliseconds, or if the device has
        failed, the rest of the waiting is left to it.
        """
        before = self._done[0]
        launch()
        try:
            if self._has_head and self._polled(before, rows):
                return
        except BaseException:  # an interrupt: the lane must not be handed on with a batch in flight
            self._wait()
            raise
        self._wait()

    def _polled(self, before: np.int32, rows: int) -> bool:
        """Whether the scores were seen to come."""
        end = 4 * -(-rows // ROWS_A_WORD)
        self._wanted.fill(before)
        self._wanted += _ONE
        done, wanted = self._done_bytes[:end], self._wanted_bytes[:end]
        now = time.perf_counter()
        for _ in range(_POLLS):
            if done == wanted:
                return True
            sched_yield()  # releases the GIL
            now, last = time.perf_counter(), now
            if now - last > _CONTENDED_S:
                break
        return False

    def run(self, blocks: Sequence[RowBlock], generation: int = 0) -> BatchResult:
        """Scores the rows of the blocks, in order; blocks until they lie in host memory (the GIL is free meanwhile)."""
        stage = self._stage
        rows = stage.fill(blocks)
        at = bisect_left(self.buckets, rows)
        bucket = self.buckets[at]
        self._rows_word[0] = rows
        if rows < bucket:
            stage.request_of_row[rows:bucket] = -1
        if generation != self._generation:
            self._switch(generation)
        start = time.perf_counter()
        if self._several:  # the current device is each thread's own
            with torch.cuda.device(self._device):
                self._launch_and_wait(self._launch[at], rows)
        else:
            self._launch_and_wait(self._launch[at], rows)
        device_ms = (time.perf_counter() - start) * 1e3
        return BatchResult(self._result[:rows].copy(), device_ms, bucket)

    def value_ranges(self, block: RowBlock) -> dict[str, float]:
        """The largest magnitude of each value in the dense dtype over a block's rows. Runs the first program as it stands."""
        program, rows = next(iter(self._programs.values())), self._stage.fill((block,))
        self._rows_word[0] = rows
        with torch.cuda.device(self._device), torch.inference_mode(), matmul_precision(self._precision):
            self._issue(program, self.buckets[-1])
            torch.cuda.synchronize(self._device)
        values = {name: t for name, t in self._values.items() if t.dtype == program.operators.dtype and t.is_cuda}
        return {name: float(t[:rows].abs().amax()) for name, t in values.items()}

    def replay_us(self, rows: int, repeats: int) -> float:
        """Device time of one run of the bucket that holds `rows`: its graph replayed back to back on what lies staged."""
        launch, stream = self._launch[bisect_left(self.buckets, rows)], self._streams[0]
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
        for graph in self._graphs:
            graph.reset()
        self._launch, self._graphs = [], []
        self._values.clear()
        give_back(self._streams, self._device)
        self._streams = []

    def _switch(self, generation: int) -> None:
        """Later runs of this lane read the other generation of segment descriptors."""
        with torch.cuda.stream(self._streams[0]):
            self._state[1:2].fill_(generation)
        self._generation = generation

    def _issue(self, program: CudaProgram, rows: int) -> None:
        operators = program.operators.for_buffers(self._batch, rows, self._state)
        execute_on_streams(program.plan, operators, self._values, self._streams, overlap=program.overlap)
        if self._values[self._output].is_cuda:
            with torch.cuda.stream(self._streams[0]):
                self._scores[:rows].copy_(self._device_scores[:rows], non_blocking=True)

    def _issue_alone(self, program: CudaProgram, rows: int) -> None:
        with torch.inference_mode(), matmul_precision(self._precision):
            self._issue(program, rows)


def _replay(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Launches a captured graph by its raw handle: torch's replay under a stream guard costs 15 us more a call (H200 host)."""
    from cupy.cuda import runtime

    return partial(runtime.graphLaunch, graph.raw_cuda_graph_exec(), stream.cuda_stream)


def _batch(b: RowBlock) -> Batch:
    sections = (b.header, b.request_of_row, b.context_ids, b.candidate_ids, b.context_dense, b.candidate_dense)
    return Batch(*(torch.from_numpy(section) for section in sections))


def assembled(results: Sequence[BatchResult]) -> np.ndarray:
    """The scores of several runs, one after the other. float32[rows, tasks]."""
    return results[0].scores if len(results) == 1 else np.concatenate([r.scores for r in results])
