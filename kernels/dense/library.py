"""A linear layer and its activation in one call of cuBLAS. In a graph it waits for all of the kernel before it, and whoever
comes behind waits for it: the rule of common.cuh holds.
"""

import torch

LIBRARY = "library"  # the name of this way among others
ACTIVATIONS = ("identity", "relu")  # that it has


def run_by_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """out[rows, width] = activation(x weight^T + bias), all of one dtype; float32 products follow `matmul_precision`.

    Args:
        x: [rows, depth]. weight: [width, depth]. bias: [width]. activation: one of ACTIVATIONS.
    """
    if activation == "relu":
        torch._addmm_activation(bias, x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
