"""The structures that the kernels of waves and chains take by value (wave.cuh and the .cu files here), field by field."""

import ctypes
from collections.abc import Sequence

import torch

from kernels.dense.activation import KINDS
from kernels.runtime.launch import MAP_WORDS, check_dense, check_rows
from kernels.waves.packed_weights import CrossWeights, JobWeights, LinearWeights, NormWeights, ShareWeights
from kernels.waves.wave_jobs import (
    CrossJob,
    FmJob,
    HeadOperands,
    Job,
    JobKind,
    LinearJob,
    NormJob,
    Operands,
    ShareOperands,
    chunk_columns,
    most_contexts,
    share_marks,
)
from kernels.waves.wave_tiles import CrossedTile

MAX_JOBS, MAX_LOGITS = 8, 3  # of wave.cuh
MAX_LINKS = 24  # of chain.cu


class JobArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "shape", "scale", "x0", "xl", "out", "head")),
        *((name, ctypes.c_float) for name in ("x_scale", "x0_scale", "xl_scale", "out_factor")),
        *((name, ctypes.c_int) for name in ("x_ld", "x0_ld", "xl_ld", "out_ld", "width", "depth")),
        *((name, ctypes.c_int) for name in ("kind", "activation", "outer", "first", "tiles", "slot")),
        *((name, ctypes.c_int) for name in ("cut", "skipped", "most")),
        *((name, ctypes.c_void_p) for name in ("context_of_row", "shares", "shares_done")),
    )


class HeadArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partial", "bias")),
        ("logits", ctypes.c_void_p * MAX_LOGITS),
        *((name, ctypes.c_void_p) for name in ("scores", "done")),
        ("steps", ctypes.c_int * MAX_LOGITS),
        ("slots", ctypes.c_int),
    )


class MapArguments(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint64 * MAP_WORDS * MAX_JOBS), ("weight", ctypes.c_uint64 * MAP_WORDS * MAX_JOBS))


class WaveArguments(ctypes.Structure):
    _fields_ = (
        ("jobs", JobArguments * MAX_JOBS), ("head", HeadArguments), ("count", ctypes.c_int), ("cluster", ctypes.c_int)
    )  # fmt: skip


class LinkArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "shape", "x0", "xl", "out", "head")),
        *((name, ctypes.c_int) for name in ("linked", "x0_linked", "xl_linked", "x_ld", "x0_ld", "xl_ld", "out_ld")),
        *((name, ctypes.c_int) for name in ("width", "depth", "kind", "activation", "outer")),
        ("number", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("mixed_ld", "experts")),
        ("mixed", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("first", "slot")),
    )


class ChainHeadArguments(ctypes.Structure):
    _fields_ = (
        ("partial", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("logits", ctypes.c_void_p * MAX_LOGITS),
        ("scores", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("steps", ctypes.c_int * MAX_LOGITS),
        ("linked", ctypes.c_int * MAX_LOGITS),
        ("slots", ctypes.c_int),
    )


class ChainArguments(ctypes.Structure):
    _fields_ = (("links", LinkArguments * MAX_LINKS), ("head", ChainHeadArguments), ("count", ctypes.c_int))


class CrossedArguments(ctypes.Structure):
    """`Layer` of crossed_wgmma.cu, as long as the kernel's own: a multiple of the 64 bytes to which maps are aligned."""

    _fields_ = (
        *((name, ctypes.c_uint64 * MAP_WORDS) for name in ("x", "weight", "x0", "xl", "out")),
        *((name, ctypes.c_void_p) for name in ("bias", "scale")),
        *((name, ctypes.c_float) for name in ("x0_scale", "xl_scale", "out_factor")),
        *((name, ctypes.c_int) for name in ("width", "depth", "tiles")),
        ("end", ctypes.c_char * 24),
    )


def crossed_arguments(maps: Sequence[object], job: LinearJob, weights: LinearWeights, tile: CrossedTile) -> CrossedArguments:
    """`maps`: of x, the weights, x0, xl and out."""
    width, depth = weights.weight.shape
    return CrossedArguments(
        *maps, weights.bias.data_ptr(), weights.scale.data_ptr(), job.x0_scale, job.xl_scale, 1 / job.out_scale,
        width, depth, -(-width // tile.columns),
    )  # fmt: skip


def fill_job(target: JobArguments | LinkArguments, job: Job, own: JobWeights) -> None:
    """What a job of a wave and a link of a chain have alike: kind, sizes but a layer's depth, weights, activation."""
    match job, own:
        case LinearJob(), LinearWeights():
            target.width, target.activation, target.outer = len(own.bias), KINDS[job.activation], int(job.outer_bias)
            target.weight, target.bias = own.weight.data_ptr(), own.bias.data_ptr()
            target.head = own.head.data_ptr() if len(own.head) else 0
            target.shape = own.shape.data_ptr() if len(own.shape) else 0
        case FmJob(), _:
            target.kind, target.width, target.depth = JobKind.FM, job.fields, job.dim
        case NormJob(), NormWeights():
            target.kind, target.width, target.depth = JobKind.NORM, job.fields, job.dim
            target.weight, target.activation = own.weight.data_ptr(), KINDS["relu"] if job.relu else 0
        case CrossJob(), CrossWeights():
            target.kind, target.width = JobKind.CROSS, job.width
            target.weight, target.bias = own.weights.data_ptr(), own.k.data_ptr()


def fill_layer(target: JobArguments, job: LinearJob, given: Operands, own: LinearWeights, rows: int) -> None:
    """What else a layer of a wave has. Raises ValueError: an operand does not fit."""
    (width, depth), dtype = own.weight.shape, own.weight.dtype
    check_dense("wave x", given.x, rows, depth, dtype)
    if given.out is not None:
        check_rows("wave out", given.out, rows, width)
    target.depth, target.scale = depth, own.scale.data_ptr()
    target.x0_scale, target.xl_scale, target.out_factor = job.x0_scale, job.xl_scale, 1 / job.out_scale
    if job.cross:
        x0, xl = crossed_operands(given, rows, width, dtype)
        target.x0, target.x0_ld = x0.data_ptr(), x0.stride(0)
        target.xl, target.xl_ld = xl.data_ptr(), xl.stride(0)
    elif job.gate:
        if given.x0 is None:
            raise ValueError("wave gate: got no x0, expected one")
        check_dense("wave x0", given.x0, rows, width, dtype)
        target.x0, target.x0_ld, target.x0_scale = given.x0.data_ptr(), given.x0.stride(0), job.gate


def crossed_operands(given: Operands, rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x0 and xl of a cross layer. Raises ValueError: they do not fit."""
    x0, xl = given.x0, given.x if given.xl is None else given.xl
    if x0 is None:
        raise ValueError("wave cross layer: got no x0, expected one")
    check_dense("wave x0", x0, rows, width, dtype)
    check_dense("wave xl", xl, rows, width, dtype)
    return x0, xl


def fill_head(target: HeadArguments, head: HeadOperands, bias: torch.Tensor, rows: int, slots: int, tasks: int) -> None:
    """Raises ValueError: too many logits, or the scratch is too small."""
    if len(head.logits) > MAX_LOGITS:
        raise ValueError(f"wave head: got {len(head.logits)} logits, expected at most {MAX_LOGITS}")
    if head.partial.numel() < rows * slots * tasks or head.partial.dtype != torch.int64:
        got = f"{head.partial.numel()} words of {head.partial.dtype}"
        raise ValueError(f"wave head: got {got}, expected {rows * slots * tasks} of torch.int64")
    target.partial, target.bias = head.partial.data_ptr(), bias.data_ptr()
    target.scores, target.done = head.scores.data_ptr(), head.done.data_ptr()
    for i, logit in enumerate(head.logits):
        target.logits[i], target.steps[i] = logit.data_ptr(), logit_steps(logit, tasks)
    target.slots = slots


def fill_share(
    target: JobArguments, of: JobArguments, own: ShareWeights, given: ShareOperands, rows: int, tile_columns: int
) -> None:
    """target: the job that computes shares; of: the one that adds them, whose other arguments may be there or not.

    Raises:
        ValueError: an operand does not fit.
    """
    most, (width, depth) = most_contexts(rows), own.weight.shape
    check_dense("wave shared x", given.x, most, depth, own.weight.dtype)
    of_row, shares, done = given.context_of_row, given.shares, given.done
    if of_row.dtype != torch.int32 or done.dtype != torch.int32 or shares.dtype != torch.float32:
        raise ValueError(f"wave shares: got {of_row.dtype}, {shares.dtype}, {done.dtype}, expected int32, float32, int32")
    sizes, wanted = (of_row.numel(), shares.numel(), done.numel()), (rows, most * width, share_marks(rows, width))
    if any(size < least for size, least in zip(sizes, wanted, strict=True)):
        raise ValueError(f"wave shares: got room for {sizes} words, expected {wanted}")
    target.kind, target.x, target.x_ld = JobKind.SHARE, given.x.data_ptr(), given.x.stride(0)
    target.weight, target.width, target.depth, target.tiles = own.weight.data_ptr(), width, depth, -(-width // tile_columns)
    chunk = chunk_columns(own.weight.dtype)
    of.cut, of.skipped, of.context_of_row = own.first // chunk, (own.end - own.first) // chunk, of_row.data_ptr()
    for job in (target, of):
        job.most, job.shares, job.shares_done = most, shares.data_ptr(), done.data_ptr()


def logit_steps(logit: torch.Tensor, tasks: int) -> int:
    """Numbers from one row's logit to the next row's; 0 for one logit for all tasks, which the kernels take as such.

    Raises:
        ValueError: it is no float32[B, 1 or tasks].
    """
    if logit.dtype != torch.float32 or logit.shape[1] not in (1, tasks) or not logit.is_contiguous():
        raise ValueError(f"head logits: got {logit.dtype}{tuple(logit.shape)}, expected float32[B, 1 or {tasks}]")
    return 0 if logit.shape[1] == 1 else tasks
