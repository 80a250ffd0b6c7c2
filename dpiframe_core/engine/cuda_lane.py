"""A lane runs one batch at a time, host memory to host memory. It owns what must not be shared between batches in flight:
staging, activation buffers, streams and captured graphs. Two lanes overlap: one copies while the other computes.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dpiframe_core.engine.calibration import Calibration, calibrated
from dpiframe_core.engine.program import CudaProgram
from dpiframe_core.features.row_block import BatchResult, BlockLayout, RowBlock
from dpiframe_core.operators.cuda import ROWS_A_WORD
from dpiframe_core.operators.executor import Values, execute_on_streams
from dpiframe_core.operators.wave_operands import DONE
from kernels.dense.linear import matmul_precision
from kernels.lookup.plan import Batch
from kernels.runtime.gc_pause import gc_paused
from kernels.runtime.launch import give_back, own_stream
from kernels.runtime.replay import replay, replay_batch, stages

# Buckets from here on are launched first and staged while they start. A launch takes 5 us until the first kernel runs, but a
# lookup that waits for its rows takes 2 us longer (H200): 256 rows came out 1.5 us slower that way, 1,024 1 to 2 us faster.
AHEAD_ROWS = 512


class _Ready(NamedTuple):
    """A bucket's program. launch: only that; run: until the scores that so many words of DONE tell of lie in host memory;
    run_batch: stages the rows of blocks too; ahead: while the graph starts.
    """

    launch: Callable[[], None]
    run: Callable[[int], None]
    run_batch: Callable[[int, Sequence[RowBlock]], None]
    ahead: bool = False


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
        self._state = torch.zeros(8, dtype=torch.int32, device=device)  # see kernels/runtime/common.cuh
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
        self._values[DONE] = torch.zeros(_words(rows), dtype=torch.int32, pin_memory=True)
        last = graph.producers()[graph.output]
        self._has_head = (last.attrs.members or (last,))[-1].op == "head"
        if self._has_head:
            self._values[graph.output] = self._scores  # the head writes over the bus itself: one copy node fewer
        self._several = torch.cuda.device_count() > 1
        self._capture = capture
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._ready: list[_Ready] = []

    @property
    def bytes_used(self) -> int:
        """Device memory of the activation buffers."""
        memory = (t.untyped_storage() for t in self._values.values() if t.is_cuda)  # a lookup's values share theirs
        return sum({m.data_ptr(): m.nbytes() for m in memory}.values())

    def prepare(self) -> None:
        """Warms up and captures every bucket, the largest first, so that smaller ones fit in its memory."""
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        ready: list[_Ready] = []
        by_operators = {p.operators: p for p in self._programs.values()}  # which programs of one graph share
        with ThreadPoolExecutor() as threads:  # NVRTC takes half a second a kernel, and one core
            for done in [threads.submit(call) for p in by_operators.values() for call in self._compilations(p)]:
                done.result()
        with torch.cuda.device(self._device), torch.inference_mode(), matmul_precision(self._precision):
            for rows in reversed(self.buckets):
                self._rows_word[0] = rows
                self._stage.request_of_row[:rows] = 0
                ready.append(self._prepared(rows, pool))
        self._ready = ready[::-1]

    def _compilations(self, program: CudaProgram) -> list[Callable[[], object]]:
        return program.operators.compile({rows: self._ahead(program, rows) for rows in self.buckets})

    def _prepared(self, rows: int, pool: Any) -> _Ready:
        """A bucket's program: the one that was found fastest before, or is found so now."""
        known = self._calibrations.get(rows)
        programs = [self._programs[known.program]] if known else [p for p in self._programs.values() if p.operators.fits(rows)]
        for program in programs:
            self._issue(program, rows)  # loads modules and makes cuBLAS pick its algorithms, which capture forbids
            self._streams[0].synchronize()
            program.operators.tune(self._values, rows, self._state)
        if not self._capture:
            launch = partial(self._issue_alone, programs[0], rows)
            run = partial(self._launch_and_wait, launch)
            return _Ready(launch, run, partial(self._stage_and_run, run, rows))
        graphs = {program.name: self._captured(program, rows, pool) for program in programs}
        ready = {program.name: self._replays(graphs[program.name], program, rows) for program in programs}
        if not known:
            known = calibrated(rows, {name: partial(one.run, _words(rows)) for name, one in ready.items()})
            self._calibrations[rows] = known
        for name, graph in graphs.items():
            if name != known.program:
                graph.reset()
        self._graphs.append(graphs[known.program])
        return ready[known.program]

    def _captured(self, program: CudaProgram, rows: int, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with gc_paused(), torch.cuda.graph(graph, pool=pool, stream=self._streams[0], capture_error_mode="thread_local"):
            self._issue(program, rows)
        return graph

    def _ahead(self, program: CudaProgram, rows: int) -> bool:
        """Whether the bucket's graph is launched before its rows are staged: one lookup alone reads them, and waits for them.

        Not with CUDA_LAUNCH_BLOCKING=1: such a launch returns when the graph is done, and that waits for rows to be staged.
        """
        if rows < AHEAD_ROWS or not self._capture or not self._has_head or os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            return False
        return sum(n.op == "lookup" for n in program.graph.nodes) == 1 and stages()

    def _replays(self, graph: torch.cuda.CUDAGraph, program: CudaProgram, rows: int) -> _Ready:
        """By raw handles: torch's replay under a stream guard costs 15 us more a call (H200 host)."""
        from cupy.cuda import runtime

        exec_, stream = graph.raw_cuda_graph_exec(), self._streams[0].cuda_stream
        done = self._values[DONE].numpy() if self._has_head else None
        stage = self._stage.buffer, self._stage.places, self._stage.layout.sections
        run = replay(exec_, stream, done)
        ahead = self._ahead(program, rows)
        run_batch = replay_batch(exec_, stream, done, rows, stage, ahead=ahead) or partial(self._stage_and_run, run, rows)
        return _Ready(partial(runtime.graphLaunch, exec_, stream), run, run_batch, ahead)

    def _stage_and_run(self, run: Callable[[int], None], bucket: int, words: int, blocks: Sequence[RowBlock]) -> None:
        """In Python: without C or CUDA's runtime, or without a graph."""
        rows = self._stage.fill(blocks)
        self._rows_word[0] = rows
        self._stage.request_of_row[rows:bucket] = -1
        run(words)

    def _launch_and_wait(self, launch: Callable[[], None], _: int) -> None:
        launch()
        self._streams[0].synchronize()

    def run(self, blocks: Sequence[RowBlock], generation: int = 0) -> BatchResult:
        """Scores the rows of the blocks, in order; blocks until they lie in host memory (the GIL is free meanwhile)."""
        rows = sum([b.rows for b in blocks])
        at = bisect_left(self.buckets, rows)
        if generation != self._generation:
            self._switch(generation)
        run, words = self._ready[at].run_batch, _words(rows)
        start = time.perf_counter()
        if self._several:  # the current device is each thread's own
            with torch.cuda.device(self._device):
                run(words, blocks)
        else:
            run(words, blocks)
        device_ms = (time.perf_counter() - start) * 1e3
        return BatchResult(self._result[:rows].copy(), device_ms, self.buckets[at])

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
        for graph in self._graphs:
            graph.reset()
        self._ready, self._graphs = [], []
        self._values.clear()
        give_back(self._streams, self._device)
        self._streams = []

    def _switch(self, generation: int) -> None:
        """Later runs of this lane read the other generation of segment descriptors."""
        with torch.cuda.stream(self._streams[0]):
            self._state[1:2].fill_(generation)
        self._generation = generation

    def _issue(self, program: CudaProgram, rows: int) -> None:
        operators = program.operators.for_buffers(self._batch, rows, self._state, self._ahead(program, rows))
        execute_on_streams(program.plan, operators, self._values, self._streams, overlap=program.overlap)
        if self._values[self._output].is_cuda:
            with torch.cuda.stream(self._streams[0]):
                self._scores[:rows].copy_(self._device_scores[:rows], non_blocking=True)

    def _issue_alone(self, program: CudaProgram, rows: int) -> None:
        with torch.inference_mode(), matmul_precision(self._precision):
            self._issue(program, rows)


def _words(rows: int) -> int:
    """Of DONE."""
    return -(-rows // ROWS_A_WORD)


def _batch(b: RowBlock) -> Batch:
    sections = (b.header, b.request_of_row, b.context_ids, b.candidate_ids, b.context_dense, b.candidate_dense)
    return Batch(*(torch.from_numpy(section) for section in sections))


def assembled(results: Sequence[BatchResult]) -> np.ndarray:
    """The scores of several runs, one after the other. float32[rows, tasks]."""
    return results[0].scores if len(results) == 1 else np.concatenate([r.scores for r in results])
