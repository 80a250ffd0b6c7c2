"""How many cores this process may use."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


def usable_cores() -> int:
    """Those that it may run on (taskset, a cpuset), and no more than its container has CPU time for: a pod with `cpu: 6` on a
    node with 64 cores sees all 64, and with a thread for each is stopped for most of every tenth of a second.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, cpu_quota())))


@cache
def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of time that this process's control groups have, the least of them; inf: there is no limit.

    groups: which they are, lines of "number:controllers:path". root: where groups of version 2 are mounted, or the controllers
    of version 1. In a container the path may be the host's, of which it sees its own group alone, as the root.
    """
    limits = [math.inf]
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += _limits(root, path)
            elif "cpu" in controllers.split(","):
                limits += _limits(root / controllers, path)
                limits += _limits(root / "cpu", path)
    return min(limits)


def _limits(root: Path, path: str) -> Iterator[float]:
    """Of the group and those that it lies in."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        yield from _limit(folder)
        if folder == root:
            return


def _limit(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()  # "max 100000": ValueError
        yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        if int(quota) > 0:  # -1: none
            yield int(quota) / int((folder / "cpu.cfs_period_us").read_text())
