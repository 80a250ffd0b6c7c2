"""What each kernel of a chain adds to a call, measured: the part of our latency that follows from an order of kernels alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Captured, interleaved
from kernels.runtime.launch import launch, overlapping
from kernels.runtime.replay import replay

_THREADS, _STEPS, _TABLE = 256, 16, 1 << 28


@dataclass(frozen=True, slots=True)
class ChainSteps:
    """step_us: one more kernel that reads what the one before it wrote. trip_us: to begin with numbers of pinned memory and
    what they name in the device's, in the place of what lies in the L2.
    """

    step_us: float
    trip_us: float

    def of(self, launches: int) -> float:
        """Microseconds that a call of so many dependent kernels takes beyond one of a single kernel."""
        return self.trip_us + (launches - 1) * self.step_us


NO_STEPS = ChainSteps(0.0, 0.0)  # of a CPU, which launches nothing


def chain_steps(device: torch.device) -> ChainSteps:
    """By graphs of 1 and 17 such kernels and one that tells the host, launched and polled as a lane does it."""
    import cupy

    module = cupy.RawModule(code=Path(__file__).with_suffix(".cu").read_text(), backend="nvrtc")
    step, fetch, tell = map(module.get_function, ("step", "fetch", "tell"))
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    rows = torch.zeros(2, blocks * _THREADS, dtype=torch.int32, device=device)
    ids = torch.randint(_TABLE, (rows.shape[1],), dtype=torch.int32).pin_memory()
    table = torch.zeros(_TABLE, dtype=torch.int32, device=device)

    def put(kernel: Any, *args: torch.Tensor) -> None:
        alone = kernel is tell
        launch(kernel, 1 if alone else blocks, 1 if alone else _THREADS, tuple(t.data_ptr() for t in args))

    def steps(count: int) -> None:
        for i in range(count):
            put(step, rows[i % 2], rows[1 - i % 2])

    ways: dict[str, Callable[[], None]] = {
        "one": lambda: steps(1), "many": lambda: steps(1 + _STEPS), "fetch": lambda: put(fetch, ids, table, rows[0]),
    }  # fmt: skip
    graphs, calls = [], {}
    for name, work in ways.items():
        word, count = torch.zeros(1, dtype=torch.int32, pin_memory=True), torch.zeros(1, dtype=torch.int32, device=device)
        graphs.append(Captured(lambda work=work, word=word, count=count: _all(work, put, tell, word, count), (word, count)))
        run = replay(graphs[-1].handle, graphs[-1].stream.cuda_stream, word.numpy())
        calls[name] = lambda i, run=run: run(1)
    times = {name: t.p50_us for name, t in interleaved(calls, 0.2).items()}
    for graph in graphs:
        graph.close()
    return ChainSteps((times["many"] - times["one"]) / _STEPS, max(0.0, times["fetch"] - times["one"]))


def _all(work: Callable[[], None], put: Callable[..., None], tell: Any, word: torch.Tensor, count: torch.Tensor) -> None:
    with overlapping():
        work()
        put(tell, word, count)
