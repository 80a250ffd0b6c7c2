"""cuBLAS's way to compute a wave: one plain layer of many rows. It waits for all of the kernel before it, and whoever comes
behind waits for it: the rule of common.cuh holds.
"""

import torch

from kernels.waves.packed_weights import JobWeights, LinearWeights
from kernels.waves.wave_jobs import CrossJob, FmJob, LinearJob, Operands

LIBRARY = "library"  # the way's name


def library_bias(job: LinearJob | FmJob | CrossJob, weights: JobWeights, precision: str) -> torch.Tensor | None:
    """The bias as cuBLAS takes it, if it computes the layer in one call."""
    if precision == "fp8" or not isinstance(job, LinearJob) or job.cross or job.activation not in ("identity", "relu"):
        return None
    assert isinstance(weights, LinearWeights)
    return weights.bias.to(weights.weight.dtype)


def run_by_library(job: LinearJob | FmJob | CrossJob, weights: JobWeights, bias: torch.Tensor, given: Operands) -> None:
    """All rows, padding too; float32 products follow `matmul_precision`."""
    assert isinstance(job, LinearJob)
    assert isinstance(weights, LinearWeights)
    assert given.out is not None
    width, depth = weights.weight.shape
    x, out = given.x[:, :depth], given.out[:, :width]
    if job.activation == "relu":
        torch._addmm_activation(bias, x, weights.weight.t(), out=out)
    else:
        torch.addmm(bias, x, weights.weight.t(), out=out)
