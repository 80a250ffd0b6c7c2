"""Launches a compiled kernel on torch's current stream, and the checks that every launcher shares."""

from typing import Any

import torch

_STREAMS: dict[int, list[torch.cuda.Stream]] = {}  # by device: those that were given back


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A CUDA stream that nobody else has until it is given back (`give_back`).

    torch.cuda.Stream() hands out 32 in turn, and torch keeps one cuBLAS workspace a stream: two lanes that replay graphs
    captured on one stream would write into one workspace at the same time. These are never destroyed: doing so crashed the
    process later, as torch's allocator and its workspaces go on naming a stream that once was used.
    """
    import cupy

    index = device.index or 0
    free = _STREAMS.setdefault(index, [])
    if free:
        return free.pop()
    with cupy.cuda.Device(index):
        pointer = cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking)
    return torch.cuda.ExternalStream(pointer, device=torch.device("cuda", index))  # type: ignore[no-untyped-call]


def give_back(streams: list[torch.cuda.Stream], device: torch.device) -> None:
    """For idle streams whose captured graphs are gone."""
    _STREAMS.setdefault(device.index or 0, []).extend(streams)


WARP_ROWS = 8  # rows of a block of 256 threads, where a warp has a row


def launch(kernel: Any, blocks: int | tuple[int, int], threads: int, args: tuple[Any, ...], *, shared_bytes: int = 0) -> None:
    """Puts a kernel on torch's current stream (also while that stream is being captured)."""
    import cupy

    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        kernel((blocks,) if isinstance(blocks, int) else blocks, (threads,), args, shared_mem=shared_bytes)


def type_name(dtype: torch.dtype) -> str:
    """The C type of a float tensor.

    Raises:
        TypeError: neither float32 nor bfloat16.
    """
    if dtype == torch.float32:
        return "float"
    if dtype == torch.bfloat16:
        return "bf16"
    raise TypeError(f"kernel operand: got {dtype}, expected torch.float32 or torch.bfloat16")


def check_rows(name: str, tensor: torch.Tensor, rows: int, width: int) -> None:
    """A CUDA (or pinned) matrix with consecutive columns and at least `rows` rows and `width` columns.

    Raises:
        ValueError: it is not.
    """
    if tensor.dim() != 2 or tensor.shape[0] < rows or tensor.shape[1] < width or tensor.stride(1) != 1:
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, expected [>= {rows}, >= {width}] with "
            f"consecutive columns"
        )
