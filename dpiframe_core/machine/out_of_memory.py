"""What to say when a device's memory runs out while a model is put on it: how many bytes were wanted, and for what."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from dpiframe_core.errors import Unavailable


@contextlib.contextmanager
def wanting_memory(device: str, wanted: Callable[[], str]) -> Iterator[None]:
    """Turns what torch, CuPy and CUDA raise for lack of memory within the block into one error. `wanted`: what was asked for.

    Raises:
        Unavailable: the device, or the host, has no such room.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_lack_of_memory(error):
            raise
        message = f"device {device}: got {_free(device)} when memory ran out, expected room for {wanted()}"
        hint = "fewer or smaller models, batching.max_batch_rows, batching.lanes or tables.hbm_gib make it less"
        raise Unavailable(f"{message}; {hint}") from error


def _is_lack_of_memory(error: Exception) -> bool:
    """torch's and CuPy's have types of their own; CUDA's, of a capture or a graph, and cuBLAS's come as RuntimeErrors."""
    told = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in told or "alloc_failed" in told


def _free(device: str) -> str:
    if device == "cpu":
        return "a host"
    free, total = torch.cuda.mem_get_info(device)
    return f"{free:,} bytes free of {total:,}"


def free_bytes(device: str) -> int:
    """Of a GPU's memory; 0 of a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0
