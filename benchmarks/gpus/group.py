"""The processes of one run, a GPU each, as `torch.distributed.run` starts them; or one process alone."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.timing import Captured, Times, times_of
from kernels.runtime.gc_pause import gc_paused

_TIMEOUT_S = 300  # after which a process that waits for one that died gives up
_DEVICE_US = 4000  # of launches without a pause


class Group:
    """This process among those of the run. To be made before anything asks CUDA for a device: each is to see one alone, as
    Ray gives replicas theirs.

    Attributes:
        rank, size: of this process, and how many there are.
    """

    def __init__(self, sees_one: bool = True) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if sees_one and self.size > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(self.rank)
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0 if sees_one else self.rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            limit = timedelta(seconds=_TIMEOUT_S)
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit)

    def wait(self) -> None:
        """Until all are here."""
        self.most(0)

    def most(self, value: float) -> float:
        """The largest of all processes' values."""
        return max(self.pooled([value]))

    def all(self, true: bool) -> bool:
        return self.most(0 if true else 1) == 0

    def pooled(self, values: Sequence[float]) -> list[float]:
        """The values of all processes, as many of each."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return list(values)
        found = torch.empty(self.size * len(own), dtype=torch.float64)
        dist.all_gather(list(found.view(self.size, -1).unbind(0)), own)
        return [float(v) for v in found]

    def bytes(self, own: bytes) -> list[bytes]:
        """Of each process, as many of each."""
        values = self.pooled(list(own))
        return [bytes(int(v) for v in values[i : i + len(own)]) for i in range(0, len(values), len(own))]

    def times(self, call: Callable[[int], object], seconds: float) -> Times:
        """Of call(i) in all processes at once, as often in each: some wait for one another. Samples of all together."""
        took = []
        for i in range(10):
            begin = time.perf_counter()
            call(i)
            took.append(time.perf_counter() - begin)
        count = max(5, min(5000, int(seconds / max(self.most(median(took)), 1e-6))))
        spent = []
        self.wait()
        with gc_paused():
            for i in range(count):
                begin = time.perf_counter()
                call(i)
                spent.append(time.perf_counter() - begin)
        return times_of(self.pooled(spent))

    def device_us(self, graph: Captured, rounds: int = 3) -> float:
        """Device time of a replay, launched without a pause in all processes at once: the median of the rounds, the slowest
        process's."""
        repeats = max(2, min(50, int(_DEVICE_US / self.most(graph.replays_us(2)))))
        found = []
        for _ in range(rounds):
            self.wait()
            found.append(graph.replays_us(repeats))
        return self.most(median(found))

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


class Alone(Group):
    """The first process without the others, which wait meanwhile."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.device = 0, 1, group.device

    def close(self) -> None:
        pass
