"""What contexts share of a wave's products (shares.cuh): the jobs that compute it, and what those that add it are told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.runtime.launch import check_dense
from kernels.waves.packed_weights import JobWeights, LinearWeights
from kernels.waves.wave_arguments import JobArguments
from kernels.waves.wave_jobs import (
    CrossJob,
    FmJob,
    JobKind,
    LinearJob,
    ShareOperands,
    chunk_columns,
    most_contexts,
    share_marks,
)


@dataclass(frozen=True, slots=True, eq=False)
class WaveShare:
    """Of the wave's job number `job`: the columns [first, end) of its weights, as wave.cu takes them, and as wave_wgmma.cu, if
    that is wanted. bias: of the job.
    """

    job: int
    first: int
    end: int
    weight: torch.Tensor
    wide_weight: torch.Tensor | None
    bias: torch.Tensor

    def fill(self, target: JobArguments, of: JobArguments, given: ShareOperands, rows: int, tile_columns: int) -> None:
        """The job of the shares, and that which adds them, whose other arguments are there.

        Raises:
            ValueError: an operand does not fit.
        """
        most, (width, depth) = most_contexts(rows), self.weight.shape
        check_dense("wave shared x", given.x, most, depth, self.weight.dtype)
        of_row, shares, done = given.context_of_row, given.shares, given.done
        if of_row.dtype != torch.int32 or done.dtype != torch.int32 or shares.dtype != torch.float32:
            raise ValueError(f"wave shares: got {of_row.dtype}, {done.dtype}, {shares.dtype}, expected int32, int32, float32")
        if len(of_row) < rows or done.numel() < share_marks(rows, width) or shares.numel() < most * width:
            got = len(of_row), done.numel(), shares.numel()
            raise ValueError(f"wave shares: got {got} words, expected {(rows, share_marks(rows, width), most * width)}")
        target.kind, target.x, target.x_ld = JobKind.SHARE, given.x.data_ptr(), given.x.stride(0)
        target.weight, target.bias = self.weight.data_ptr(), self.bias.data_ptr()
        target.width, target.depth, target.tiles = width, depth, -(-width // tile_columns)
        chunk = chunk_columns(self.weight.dtype)
        of.cut, of.skipped = self.first // chunk, (self.end - self.first) // chunk
        of.context_of_row = of_row.data_ptr()
        for both in (target, of):
            both.most, both.shares, both.shares_done = most, shares.data_ptr(), done.data_ptr()


def wave_shares(
    jobs: Sequence[LinearJob | FmJob | CrossJob], weights: Sequence[JobWeights], wide: Mapping[int, torch.Tensor]
) -> tuple[WaveShare, ...]:
    """Of the jobs with `shared` columns. wide: by job, the weights of wave_wgmma.cu.

    Raises:
        ValueError: such columns are no whole chunks of K, or all that there are.
    """
    found = []
    for i, (job, own) in enumerate(zip(jobs, weights, strict=True)):
        if not isinstance(job, LinearJob) or job.shared is None:
            continue
        assert isinstance(own, LinearWeights)
        first, end = job.shared
        chunk, depth = chunk_columns(own.weight.dtype), own.weight.shape[1]
        if first % chunk or end % chunk or not 0 <= first < end <= depth or end - first == depth:
            raise ValueError(f"wave shares: got columns {first} to {end} of {depth}, expected a part, in multiples of {chunk}")
        both = [None if w is None else w[:, first:end].contiguous() for w in (own.weight, wide.get(i))]
        assert both[0] is not None
        found.append(WaveShare(i, first, end, both[0], both[1], own.bias))
    return tuple(found)
