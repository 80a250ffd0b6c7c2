"""A layer's weights as the kernels of waves and chains take them: padded, rounded, on their device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as f

from kernels.dense.activation import SHAPED, unit_params
from kernels.dense.linear import DENSE_DTYPE, padded
from kernels.waves.wave_jobs import CrossJob, FmJob, Job, LinearJob, NormJob, chunk_columns

FP8_MOST = 448.0  # the largest number of e4m3
COLUMNS, GROUP_WORDS = 16, 16  # of a tile of packed weights, and the 4-byte words of K of one of its groups


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """weight[width, depth], bias[width], head[tasks or 0, width], scale[width] of the products (fp8), shape[3 or 0, width]: an
    activation's parameters (`unit_params`). Zero-padded.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    head: torch.Tensor
    scale: torch.Tensor
    shape: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CrossWeights:
    """float32 weights[layers + tasks, width] and k[layers + tasks]."""

    weights: torch.Tensor
    k: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """float32 weight[2, dim], the bias behind."""

    weight: torch.Tensor


JobWeights = LinearWeights | CrossWeights | NormWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class ShareWeights:
    """Of what contexts share of the product of the wave's job number `job`: the columns [first, end) of its weights, as wave.cu
    takes them, and as wave_wgmma.cu, if that is wanted.
    """

    job: int
    first: int
    end: int
    weight: torch.Tensor
    wide_weight: torch.Tensor | None


def job_weights(job: Job, tasks: int, precision: str, device: torch.device) -> JobWeights:
    """None for a job without weights."""
    if isinstance(job, FmJob):
        return None
    if isinstance(job, CrossJob):
        return CrossWeights(job.weights.float().contiguous().to(device), job.k.float().contiguous().to(device))
    if isinstance(job, NormJob):
        return NormWeights(torch.stack((job.weight, job.bias)).float().to(device))
    dtype = DENSE_DTYPE[precision]
    out, width = job.weight.shape
    rows, columns = padded(out, dtype), padded(width, dtype)
    weight = torch.zeros(rows, columns, device=device)
    weight[:out, :width] = job.weight.to(device)
    scale = torch.ones(rows, device=device)
    if precision == "tf32":  # the tensor cores cut factors to 11 digits; rounding the weights costs nothing here
        weight = _to_tf32(weight)
    elif precision == "fp8":
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / FP8_MOST
        weight, scale = weight / scale[:, None], scale * job.x_scale
    bias = torch.zeros(rows, device=device)
    if job.bias is not None:
        bias[:out] = job.bias.to(device)
    head = torch.zeros(0 if job.head is None else tasks, rows, device=device)
    if job.head is not None:
        head[:, :out] = job.head.to(device)
    shape = torch.zeros(0, rows, device=device)
    if job.activation in SHAPED:
        shape = unit_params(job.activation, job.params, job.slope, out, rows, device)
    return LinearWeights(weight.to(dtype), bias, head, scale, shape)


def share_weights(
    jobs: Sequence[Job], weights: Sequence[JobWeights], wide: Mapping[int, torch.Tensor]
) -> tuple[ShareWeights, ...]:
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
        own_wide = wide[i][:, first:end].contiguous() if i in wide else None
        found.append(ShareWeights(i, first, end, own.weight[:, first:end].contiguous(), own_wide))
    return tuple(found)


def tf32_halves(weight: torch.Tensor) -> torch.Tensor:
    """float32[2 * width, depth] of a float32[width, depth]: its numbers rounded to tf32, and below these what is left of them,
    itself rounded: together 23 binary digits. What would round to infinity is cut, and nothing is left of it (mma.cuh, split).
    """
    rounded = _to_tf32(weight)
    high = torch.where(rounded.isfinite() | weight.isnan(), rounded, _cut(weight))
    rest = torch.where(rounded.isfinite(), weight - high, torch.zeros_like(weight))
    return torch.cat((high, _to_tf32(rest)))


def _to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Rounded to 11 binary digits, half away from zero; NaN stays NaN."""
    return torch.where(values.isnan(), values, _cut((values.view(torch.int32) + 0x1000).view(torch.float32)))


def _cut(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) & -0x2000).view(torch.float32)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A matrix [width, depth] in the order in which a warp's lanes load it for `mma` with the weights as its left factor.

    int32[tiles, groups, 2, 32, 4]: tiles of 16 columns of the layer, groups of 64 bytes of K, the two steps of a group, a
    lane's four registers. Of a group's 16 words lane (g, t) takes words 4t to 4t + 3, two in each step: an order of K of our
    own, as the kernel reads x in the same one (PTX: "Matrix Fragments for mma", A of m16n8k8, m16n8k16).
    """
    words = weight.contiguous().view(torch.int32)
    words = f.pad(words, (0, -words.shape[1] % GROUP_WORDS, 0, -words.shape[0] % COLUMNS))
    tiles, groups = words.shape[0] // COLUMNS, words.shape[1] // GROUP_WORDS
    parts = words.view(tiles, 2, 8, groups, 4, 2, 2)  # tile, half, g; group, t, step, slot
    return parts.permute(0, 3, 5, 2, 4, 6, 1).reshape(tiles, groups, 2, 32, 4).contiguous()
