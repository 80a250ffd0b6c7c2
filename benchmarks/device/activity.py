"""How busy a GPU is: its own counters through NVML while a loop runs undisturbed, and kernel times through CUPTI.

Counters (Hopper and later, "GPM"): `sm_active` is the share of multiprocessor cycles with at least one warp, `sm_occupancy`
that of warp slots in use, `dram_active` that of memory cycles. What the machine does not offer is None, never a guess.
"""

from collections.abc import Callable, Iterable
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch

COUNTERS = {"sm_active": "NVML_GPM_METRIC_SM_UTIL", "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
            "dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL"}  # fmt: skip


class GpuCounters:
    """`with GpuCounters(device) as counters: ..` leaves the shares over the block in `counters.shares`."""

    def __init__(self, device: torch.device) -> None:
        self.shares: dict[str, float | None] = dict.fromkeys((*COUNTERS, "nvml_busy"))
        self._nvml: Any = None
        self._samples: list[Any] = []
        if device.type == "cuda":
            try:
                import pynvml
            except ImportError:
                return
            self._nvml = pynvml
            self._uuid = str(torch.cuda.get_device_properties(device).uuid)

    def __enter__(self) -> Self:
        if (n := self._nvml) is None:
            return self
        try:
            n.nvmlInit()
            self._handle = n.nvmlDeviceGetHandleByUUID(f"GPU-{self._uuid}")
            self._samples = [n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()]
            n.nvmlGpmSampleGet(self._handle, self._samples[0])
        except n.NVMLError as refused:
            print(f"NVML counters: {refused}")
            self._nvml = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if (n := self._nvml) is None:
            return
        try:
            n.nvmlGpmSampleGet(self._handle, self._samples[1])
            self.shares |= self._read()
            self.shares["nvml_busy"] = n.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except n.NVMLError as refused:
            print(f"NVML counters: {refused}")
        finally:
            for sample in self._samples:
                n.nvmlGpmSampleFree(sample)
            n.nvmlShutdown()

    def _read(self) -> dict[str, float | None]:
        n = self._nvml
        asked = n.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = n.NVML_GPM_METRICS_GET_VERSION, len(COUNTERS)
        asked.sample1, asked.sample2 = self._samples
        for i, metric in enumerate(COUNTERS.values()):
            asked.metrics[i].metricId = getattr(n, metric)
        n.nvmlGpmMetricsGet(asked)
        good = n.NVML_SUCCESS
        return {
            name: round(asked.metrics[i].value / 100, 4) if asked.metrics[i].nvmlReturn == good else None
            for i, name in enumerate(COUNTERS)
        }


def kernel_shares(call: Callable[[int], object], calls: int = 50) -> tuple[float, float] | None:
    """(kernel time summed over streams, time with at least one kernel running), both over the wall time of `calls` calls.

    By torch's profiler, whose own cost makes the wall longer: of use to tell how much streams overlap. None if it saw nothing.
    """
    spans = [(start, end) for start, end, _ in _kernels(call, calls)]
    if not spans:
        return None
    wall = max(end for _, end in spans) - min(start for start, _ in spans)
    return sum(end - start for start, end in spans) / wall, union(spans) / wall


def kernel_steps(call: Callable[[int], object], calls: int = 50) -> list[tuple[str, float]] | None:
    """The kernels of a call by name, in their order, and by how many microseconds each ends after the one before it (the first:
    after its own start), medians. None if the profiler saw none, or not as many of each call.
    """
    found = sorted(_kernels(call, calls))
    each, rest = divmod(len(found), calls)
    if rest or not each:
        return None
    steps: list[list[float]] = [[] for _ in range(each)]
    for first in range(0, len(found), each):
        until = found[first][0]
        for own, (_, end, _) in zip(steps, found[first : first + each], strict=True):
            own.append(max(0.0, end - until))
            until = max(until, end)
    return [(name, round(median(own), 2)) for (_, _, name), own in zip(found, steps, strict=False)]


def _kernels(call: Callable[[int], object], calls: int) -> list[tuple[float, float, str]]:
    """(start, end, name) of every kernel of so many calls, microseconds."""
    from torch.autograd import DeviceType

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for i in range(calls):
            call(i)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == DeviceType.CUDA]  # type: ignore[union-attr]
    return [(float(e.time_range.start), float(e.time_range.end), e.name) for e in events if not e.name.startswith("Mem")]


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length that the intervals cover together."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
