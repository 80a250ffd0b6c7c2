"""The buckets of a lane: a program made ready for batches of up to so many rows, captured in a graph or issued anew each time.
And what runs a batch on the smallest that holds it: one call of C, or Python where there is none.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.engine.staging import Staging
from dpiframe_core.features.row_block import BatchResult, Floats, RowBlock, checked_rows
from dpiframe_core.operators.workspace import done_words
from kernels.copies.row_reader import RowReader, row_reader
from kernels.runtime import fastest
from kernels.runtime.replay import copy_threads, replay, replay_batches

RunBatch = Callable[[Sequence[RowBlock], bool], BatchResult]  # of blocks, and whether rows are copied to the device first

_ROUNDS = 10
_BETTER = 0.985  # of a program's time: less is no gain


class CapturedBucket:
    """Replays a captured graph.

    By raw handles: torch's replay under a stream guard costs 15 us more a call (H200 host).

    Attributes:
        graph: what is replayed; one that keeps its nodes may read its rows elsewhere (`reader_of`). handle: its
        cudaGraphExec_t. launch: starts it. run: and waits for the scores that so many words of `done` tell of. Both are called
        with the lane's device as the current one.
        ahead: the graph starts before its rows are staged.
    """

    __slots__ = ("_reader", "ahead", "graph", "handle", "launch", "run")

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, done: npt.NDArray[np.int32] | None, *, ahead: bool
    ) -> None:
        from cupy.cuda import runtime

        self.graph, self.handle, self.ahead = graph, graph.raw_cuda_graph_exec(), ahead
        self.launch: Callable[[], None] = partial(runtime.graphLaunch, self.handle, stream.cuda_stream)
        self.run = replay(self.handle, stream.cuda_stream, done)
        self._reader: RowReader | None = None  # whose arguments C writes, as long as there is a graph

    def reader_of(self, places: Mapping[str, int]) -> tuple[int, ...]:
        """Of the kernel that reads rows from these places, see `row_reader`; () if there is no such one."""
        self._reader = row_reader(self.graph.raw_cuda_graph(), places)
        return self._reader.given if self._reader else ()

    def release(self) -> None:
        self.graph.reset()


class EagerBucket:
    """Issues every operator anew: for profiles and the ablation.

    issue: puts the work on the lane's streams, of which waiting for `stream` waits for all.
    """

    ahead = False

    def __init__(self, issue: Callable[[], None], stream: torch.cuda.Stream) -> None:
        self.launch, self._stream = issue, stream

    def run(self, words: int) -> None:
        self.launch()
        self._stream.synchronize()

    def release(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneBuckets:
    """What a lane has ready.

    Attributes:
        ready: by rows, ascending. copied: of large buckets the same with their rows copied first.
        staging: where their rows go. done, scores: what their graphs write, in pinned memory; done: None if they do not.
        stream: a cudaStream_t, which they run on.
    """

    ready: Mapping[int, CapturedBucket | EagerBucket]
    copied: Mapping[int, CapturedBucket]
    staging: Staging
    done: npt.NDArray[np.int32] | None
    scores: Floats
    stream: int


def batch_runner(buckets: LaneBuckets) -> RunBatch:
    """To be called, as what it gives, with the lane's device as the current one.

    What it is not to run raises InputError, or in C ValueError, TypeError or AttributeError; then nothing was launched.
    """
    return _in_c(buckets) or _in_python(buckets)


def _in_c(of: LaneBuckets) -> RunBatch | None:
    graphs, places = [], of.staging.places
    for rows, one in of.ready.items():
        if isinstance(one, EagerBucket):
            return None
        copied = of.copied.get(rows)
        graphs.append((rows, one.handle, one.ahead, copied.handle if copied else 0, one.reader_of(places)))
    block, layout = of.staging.block, of.staging.block.layout
    stage, carried = (block.buffer, block.places, layout.sections), (of.staging.carried, layout.context_ids.prefix_bytes)
    return replay_batches(
        graphs, of.stream, of.done, stage, carried, layout, of.scores, BatchResult, threads=copy_threads()
    )  # fmt: skip


def _in_python(of: LaneBuckets) -> RunBatch:
    sizes, layout = [*of.ready], of.staging.block.layout

    def run(blocks: Sequence[RowBlock], copied: bool) -> BatchResult:
        start, rows = time.perf_counter(), checked_rows(blocks, layout, sizes[-1])
        size = sizes[bisect_left(sizes, rows)]
        bucket = of.ready[size]
        if copied and sum(b.contexts for b in blocks) <= size:  # no more contexts are copied
            bucket = of.copied.get(size, bucket)
        of.staging.stage(blocks, size)
        bucket.run(done_words(rows))
        ms = (time.perf_counter() - start) * 1e3
        return BatchResult(of.scores[:rows].copy(), ms, size)

    return run


def settled(
    own: CapturedBucket,
    tied: Iterable[tuple[Callable[[str], str], str]],
    capture: Callable[[], CapturedBucket],
    stream: torch.cuda.Stream,
) -> CapturedBucket:
    """A program's bucket, with other tiles for its waves where it is faster with them.

    In the program a wave finds its values elsewhere than alone, and its first blocks share multiprocessors with those of the
    wave ahead. DCN-V2, 1,024 rows, tf32, takes 45 us on an H200, and with a tile that alone was within 4 % of the best 55.

    Args:
        tied: tiles to try, each with what chooses it and gives the one before. capture: captures the program anew, with the
            tiles that are chosen then.
    """
    for choose, name in tied:
        before = choose(name)
        other = capture()
        with torch.cuda.stream(stream):
            ms = fastest.least_ms({"own": own.graph, "other": other.graph}, stream, _ROUNDS)
        if ms["other"] < _BETTER * ms["own"]:
            own, other = other, own
        else:
            choose(before)
        other.release()
    return own
