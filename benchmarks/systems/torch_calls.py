"""How a model in PyTorch is called from host memory and back: with copies, in one captured graph, or over mapped memory."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.systems.system import System
from benchmarks.timing import Captured
from benchmarks.workloads.inputs import PeerInputs
from dpiframe_core.features.row_block import RowBlock

Compute = Callable[..., torch.Tensor]  # the tensors of `PeerInputs`, on the device -> probabilities float32[rows, 1]
Store = Callable[..., object]  # scores float32[rows, 1] to be written, and the same tensors


def called(compute: Compute, inputs: PeerInputs, rows: int, device: torch.device, *, compiled: bool = True) -> System:
    """The inputs in one copy from pinned memory into a fixed buffer, one call, scores back into pinned memory."""
    if device.type == "cpu":

        def score_on_cpu(block: RowBlock) -> np.ndarray:
            return compute(*inputs.tensors(block, device)).numpy()

        return System(score_on_cpu, first_op_s=lambda block: _seconds(lambda: score_on_cpu(block)))
    pinned, buffer, out = _buffers(inputs, rows, device)
    given = inputs.views(buffer)
    if compiled:  # torch's own CUDA graphs copy an input into a buffer of theirs unless its address is known to stay
        for tensor in given:
            torch._dynamo.mark_static_address(tensor, guard=False)
    staging, result, stream = pinned.numpy(), out.numpy(), torch.cuda.current_stream()

    def put(block: RowBlock) -> None:
        staging[:] = inputs.packed(block)
        buffer.copy_(pinned, non_blocking=True)

    def finish() -> None:
        out.copy_(compute(*given), non_blocking=True)
        stream.synchronize()

    def score(block: RowBlock) -> np.ndarray:
        put(block)
        finish()
        return result.copy()

    def first_op_s(block: RowBlock) -> float:
        put(block)
        stream.synchronize()
        return _seconds(finish)

    return System(score, first_op_s=first_op_s)


def captured(store: Store, inputs: PeerInputs, rows: int, device: torch.device) -> System:
    """The same with both copies in one CUDA graph captured by hand: what a good engineer builds."""
    pinned, buffer, out = _buffers(inputs, rows, device)
    given, scores = inputs.views(buffer), torch.zeros(rows, 1, device=device)

    def work() -> None:
        buffer.copy_(pinned, non_blocking=True)
        store(scores, *given)
        out.copy_(scores, non_blocking=True)

    return _replayed(Captured(work), inputs, pinned, out)


def mapped(store: Store, inputs: PeerInputs, rows: int, device: torch.device) -> System:
    """The graph without a copy node: its kernels read the inputs in pinned host memory, and write the scores there.

    Either every kernel reads what it needs in place, or one kernel brings all inputs to the device first, as several kernels
    that read the same ids would each wait for the bus. Both are captured, and the faster one on the device is kept.
    """
    pinned, buffer, out = _buffers(inputs, rows, device)
    here, there = as_device_memory(pinned), as_device_memory(out)
    words, brought = here.view(torch.int64), buffer.view(torch.int64)

    def in_place() -> None:
        store(there, *inputs.views(here))

    def by_a_kernel() -> None:
        torch.bitwise_or(words, 0, out=brought)  # a copy of equal tensors would be a copy node
        store(there, *inputs.views(buffer))

    graphs = {work.__name__: Captured(work, holds=(pinned, out)) for work in (in_place, by_a_kernel)}
    times = {name: graph.device_us() for name, graph in graphs.items()}
    kept = min(times, key=times.__getitem__)
    for name, graph in graphs.items():
        if name != kept:
            graph.close()
    notes = {"inputs": kept, "inputs_device_us": {name: round(us, 2) for name, us in times.items()}}
    return _replayed(graphs[kept], inputs, pinned, out, notes)


def as_device_memory(pinned: torch.Tensor) -> torch.Tensor:
    """A tensor on the GPU over a pinned tensor's own memory, at the same address. The pinned one must outlive it.

    Raises:
        RuntimeError: torch made a copy, or gave another address.
    """
    found = torch.as_tensor(_Addressed(pinned), device="cuda")
    if found.data_ptr() != pinned.data_ptr():
        raise RuntimeError(f"mapped memory: got a tensor at {found.data_ptr():#x}, expected one at {pinned.data_ptr():#x}")
    return found


class _Addressed:
    """Pinned memory as CUDA libraries take it from one another: with unified addressing its address is the device's too."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape), "typestr": pinned.numpy().dtype.str, "data": (pinned.data_ptr(), False),
            "strides": None, "version": 3,
        }  # fmt: skip


def _replayed(
    graph: Captured, inputs: PeerInputs, pinned: torch.Tensor, out: torch.Tensor, notes: dict[str, Any] | None = None
) -> System:
    staging, result = pinned.numpy(), out.numpy()

    def score(block: RowBlock) -> np.ndarray:
        staging[:] = inputs.packed(block)
        graph()
        return result.copy()

    return System(score, graph.close, lambda block: graph.device_us(), notes=notes or {})


def _buffers(inputs: PeerInputs, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pinned inputs, inputs on the device, pinned scores."""
    pinned = torch.zeros(inputs.nbytes, dtype=torch.uint8, pin_memory=True)
    return pinned, torch.zeros(inputs.nbytes, dtype=torch.uint8, device=device), torch.zeros(rows, 1, pin_memory=True)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
