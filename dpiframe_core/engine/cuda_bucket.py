"""A program of a CUDA lane made ready for batches of up to a bucket's rows: captured in a graph, or issued anew each time."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from dpiframe_core.engine.staging import Staging
from dpiframe_core.features.row_block import RowBlock
from kernels.runtime import fastest
from kernels.runtime.replay import copy_threads, replay, replay_batch

_ROUNDS = 10
_BETTER = 0.985  # of a program's time: less is no gain


class CapturedBucket:
    """Replays a captured graph.

    By raw handles: torch's replay under a stream guard costs 15 us more a call (H200 host).

    Attributes:
        graph: what is replayed. launch: starts it. run: and waits for the scores that so many words of `done` tell of.
        run_batch: the same of blocks, which it stages. All three are called with the lane's device as the current one.
        ahead: the graph starts before its rows are staged.
    """

    __slots__ = ("_rows", "_staging", "ahead", "graph", "launch", "run", "run_batch")

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

        self.graph, self._staging, self._rows, self.ahead = graph, staging, rows, ahead
        exec_, handle, block = graph.raw_cuda_graph_exec(), stream.cuda_stream, staging.block
        self.launch: Callable[[], None] = partial(runtime.graphLaunch, exec_, handle)
        self.run = replay(exec_, handle, done)
        # Attributes, not methods: a batch takes no further call of Python for them.
        stage = block.buffer, block.places, block.layout.sections
        carried = staging.carried, block.layout.context_ids.prefix_bytes
        in_c = replay_batch(exec_, handle, done, rows, stage, carried, ahead=ahead, threads=copy_threads())
        self.run_batch: Callable[[int, Sequence[RowBlock]], None] = in_c or self._stage_and_run

    def _stage_and_run(self, words: int, blocks: Sequence[RowBlock]) -> None:
        """In Python: without C or CUDA's runtime."""
        self._staging.stage(blocks, self._rows)
        self.run(words)

    def release(self) -> None:
        self.graph.reset()


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
