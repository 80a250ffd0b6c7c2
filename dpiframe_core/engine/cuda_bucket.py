"""A program of a CUDA lane made ready for batches of up to a bucket's rows: captured in a graph, or issued anew each time."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.engine.staging import Staging
from dpiframe_core.features.row_block import RowBlock
from kernels.runtime.replay import copy_threads, replay, replay_batch


class CapturedBucket:
    """Replays a captured graph.

    By raw handles: torch's replay under a stream guard costs 15 us more a call (H200 host).

    Attributes:
        launch: starts the graph. run: and waits for the scores that so many words of `done` tell of.
        run_batch: the same of blocks, which it stages. All three are called with the lane's device as the current one.
        ahead: the graph starts before its rows are staged.
    """

    __slots__ = ("_graph", "_rows", "_staging", "ahead", "launch", "run", "run_batch")

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        stream: torch.cuda.Stream,
        staging: Staging,
        rows: int,
        done: npt.NDArray[np.int32] | None,
        *,
        ahead: bool,
    ) -> None:
        from cupy.cuda import runtime

        self._graph, self._staging, self._rows, self.ahead = graph, staging, rows, ahead
        exec_, handle, block = graph.raw_cuda_graph_exec(), stream.cuda_stream, staging.block
        self.launch: Callable[[], None] = partial(runtime.graphLaunch, exec_, handle)
        self.run = replay(exec_, handle, done)
        # Attributes, not methods: a batch takes no further call of Python for them.
        stage = block.buffer, block.places, block.layout.sections
        in_c = replay_batch(exec_, handle, done, rows, stage, ahead=ahead, threads=copy_threads())
        self.run_batch: Callable[[int, Sequence[RowBlock]], None] = in_c or self._stage_and_run

    def _stage_and_run(self, words: int, blocks: Sequence[RowBlock]) -> None:
        """In Python: without C or CUDA's runtime."""
        self._staging.stage(blocks, self._rows)
        self.run(words)

    def release(self) -> None:
        self._graph.reset()


class EagerBucket:
    """Issues every operator anew: for profiles and the ablation.

    issue: puts the work on the lane's streams, of which waiting for `stream` waits for all.
    """

    ahead = False

    def __init__(self, issue: Callable[[], None], stream: torch.cuda.Stream, staging: Staging, rows: int) -> None:
        self.launch, self._stream, self._staging, self._rows = issue, stream, staging, rows

    def run(self, words: int) -> None:
        self.launch()
        self._stream.synchronize()

    def run_batch(self, words: int, blocks: Sequence[RowBlock]) -> None:
        self._staging.stage(blocks, self._rows)
        self.run(words)

    def release(self) -> None:
        """Nothing to release."""
