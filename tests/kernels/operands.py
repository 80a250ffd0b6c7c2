"""Operands as the kernels are to take them."""

import torch


def padded_rows(array, device, pad=1):
    """float32 on the device, in rows padded by `pad` columns of NaN that nothing may read."""
    t = torch.full((array.shape[0], array.shape[1] + pad), torch.nan, device=device)
    t[:, : array.shape[1]] = torch.from_numpy(array.astype("float32"))
    return t
