"""What waves and chains are made of: jobs with their weights, and what they read and write in one launch. Plain data."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from kernels.dense.activation import KINDS
from kernels.runtime.launch import type_name
from kernels.waves.wave_tiles import LEAST_SHARED_COLUMNS

FIELDS_AT_ONCE = 4  # of row_norms.cuh
ROWS_A_CONTEXT = 16  # at least, in the mean, of a batch whose contexts have shares


class JobKind(IntEnum):
    """As epilogue.cuh's Kind, and shares.cuh's. DOT: of a chain alone."""

    LINEAR = 0
    FM = 1
    CROSS = 2
    SHARE = 3
    DOT = 4
    NORM = 8


@dataclass(frozen=True, slots=True, eq=False)
class LinearJob:
    """activation(x W^T + b), or with `cross` x0 * (x W^T + b) + xl, where xl is x unless another value is given; with `gate`, a
    factor, gate * x0 * activation(x W^T + b).
    weight[out, in], bias[out]; head[tasks, out]: the head's weights for this value, if the head reads it within this wave;
    kept: whether anything else reads it.

    shared: columns of x, [first, end), that are of a context, multiples of `chunk_columns`: what they add to the product is
    computed once a context.

    params, slope: of the activation, as `reference.activate_` takes them. outer_bias: of a cross layer: x0 * (x W^T) + b + xl.
    *_scale, for fp8: a value is what lies in memory times its scale.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str = "identity"
    cross: bool = False
    head: torch.Tensor | None = None
    kept: bool = True
    params: Sequence[torch.Tensor] = ()
    slope: float = 0.0
    outer_bias: bool = False
    x_scale: float = 1.0
    x0_scale: float = 1.0
    xl_scale: float = 1.0
    out_scale: float = 1.0
    shared: tuple[int, int] | None = None
    gate: float = 0.0


@dataclass(frozen=True, slots=True)
class FmJob:
    """Factorization machine over x[:, offset : offset + fields * dim]."""

    offset: int
    fields: int
    dim: int
    x_scale: float = 1.0

    @property
    def width(self) -> int:
        """Columns of x up to the last that it reads."""
        return self.offset + self.fields * self.dim


@dataclass(frozen=True, slots=True, eq=False)
class CrossJob:
    """DCN's folded cross network dotted with the head's weights: weights[layers + tasks, width], k[layers + tasks]."""

    weights: torch.Tensor
    k: torch.Tensor
    layers: int

    @property
    def width(self) -> int:
        return self.weights.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class NormJob:
    """Layer norm of each of `fields` fields of `dim` columns, then perhaps ReLU. weight, bias: float[dim]."""

    fields: int
    dim: int
    eps: float
    weight: torch.Tensor
    bias: torch.Tensor
    relu: bool = False

    @property
    def width(self) -> int:
        return self.fields * self.dim

    def blocks(self, rows: int, threads: int) -> int:
        """Of so many threads, which take so many fields at once as row_norms.cuh has it."""
        return -(-rows * self.fields // (threads // norm_lanes(self.dim) * FIELDS_AT_ONCE))


def norm_lanes(dim: int) -> int:
    """Neighbouring lanes that take a field of so many columns (row_norms.cuh)."""
    words = dim // 4 if dim % 4 == 0 and dim <= 128 else dim
    return min(32, 1 << (words - 1).bit_length())


Job = LinearJob | FmJob | CrossJob | NormJob
_PER_ROW = {FmJob: JobKind.FM, CrossJob: JobKind.CROSS, NormJob: JobKind.NORM}


def job_constants(jobs: Sequence[Job], tasks: int, dtype: torch.dtype) -> dict[str, str]:
    """The compile-time constants of wave.cu and chain.cu that follow from what is computed."""
    cross = next((job for job in jobs if isinstance(job, CrossJob)), None)
    linear = [job for job in jobs if isinstance(job, LinearJob)]
    return {
        "X": type_name(dtype), "TASKS": str(tasks),
        "DOTS": str(len(cross.weights) if cross else 1), "LAYERS": str(cross.layers if cross else 1),
        "PER_ROW": str(sum({kind for job in jobs for known, kind in _PER_ROW.items() if isinstance(job, known)})),
        "CROSSED": str(
            max((1 + 2 * job.outer_bias for job in linear if job.cross), default=0) + 4 * any(job.gate for job in linear)
        ),
        "KINDS": str(sum(1 << kind for kind in {KINDS[job.activation] for job in linear} if kind > KINDS["relu"])),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """Of one job: x, a cross layer's first input x0 and, if it is not x, its last one xl, and out (None if only the head
    reads it).
    """

    x: torch.Tensor
    out: torch.Tensor | None
    x0: torch.Tensor | None = None
    xl: torch.Tensor | None = None
    shares: "ShareOperands | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class ShareOperands:
    """Of a job with `shared` columns. Batches of more contexts than x has rows are computed without shares.

    Attributes:
        x: [contexts, end - first], as the job's x: these columns of each context, of which `most_contexts` are computed.
        context_of_row: int32[rows]. shares: float32[contexts, out], scratch.
        done: int32[share_marks(rows, out)] of its own, zeros at first: numbers of batches (state[BATCH_NUMBER], which goes up)
            whose shares are there.
    """

    x: torch.Tensor
    context_of_row: torch.Tensor
    shares: torch.Tensor
    done: torch.Tensor


def shape_of(job: Job, given: Operands) -> tuple[Hashable, ...]:
    """What the time of a job depends on: alike jobs are computed fastest in the same way."""
    lies = (None if t is None else t.stride(0) for t in (given.x, given.out, given.x0, given.xl))
    if not isinstance(job, LinearJob):
        return type(job).__name__, job.width, *lies
    kind = job.activation, job.cross, job.gate != 0, job.outer_bias, job.bias is None, job.head is None, job.shared
    return *job.weight.shape, *kind, *lies


def chunk_columns(dtype: torch.dtype) -> int:
    """Columns of the 128 bytes in which products take K."""
    return 128 // dtype.itemsize


def most_contexts(rows: int) -> int:
    """Of a batch of so many rows that has shares: with 16 rows a context or more they cost little beside the products."""
    return -(-rows // ROWS_A_CONTEXT)


def share_marks(rows: int, out: int) -> int:
    """Words that tell of shares, with the smallest tiles that share."""
    return -(-most_contexts(rows) // 16) * -(-out // LEAST_SHARED_COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class HeadOperands:
    """What the head behind a wave reads and writes.

    Attributes:
        logits: float32[rows, 1 or tasks], at most 3, complete before the wave starts. scores: float32[rows, tasks], pinned.
        done: int32[>= rows / 8], pinned: gets the batch number for every 8 rows (common.cuh, announce).
        partial: int64 words of the device, at least rows * column tiles * tasks, zeros at first: what blocks add up, with the
            number of the batch beside it (state[BATCH_NUMBER], which none of the 2^32 batches before had).
    """

    logits: Sequence[torch.Tensor]
    scores: torch.Tensor
    done: torch.Tensor
    partial: torch.Tensor
