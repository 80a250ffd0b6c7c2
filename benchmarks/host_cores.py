"""What a host's cores give: without any service, as hosts whose cores share parts, or their clock, do not scale with them; and
what of it others get while a virtual machine wants it.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOPS = 2000  # additions a turn
_PATIENCE_S = 60  # with a worker that has ended


def turns_per_s(seconds: float = 0.5) -> float:
    """Turns of a loop of pure Python a second, summed over one process on each core that this one may use."""
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    queue, start = context.Queue(), context.Barrier(len(cores))
    workers = [context.Process(target=_turn, args=(core, start, seconds, queue)) for core in cores]
    for worker in workers:
        worker.start()
    total = sum(queue.get(timeout=_PATIENCE_S) for _ in workers)
    for worker in workers:
        worker.join()
    return total


@contextmanager
def on_quickest_core() -> Iterator[None]:
    """The calling thread, and no other, stays on the core that now runs a loop of Python fastest.

    A core of a virtual machine may be half of one, and a neighbour have the other half: all takes up to twice as long there,
    and a thread that is left alone stays there for seconds.
    """
    before, took = os.sched_getaffinity(0), {}
    try:
        for core in before:
            os.sched_setaffinity(0, {core})
            took[core] = min(_turn_s() for _ in range(3))
        os.sched_setaffinity(0, {min(took, key=took.__getitem__)})
        yield
    finally:
        os.sched_setaffinity(0, before)


def _turn_s() -> float:
    begin, x = time.perf_counter(), 0
    for i in range(_LOOPS):
        x += i * 3
    return time.perf_counter() - begin


def core_ticks(stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """Of all cores since the machine's start, in the kernel's ticks: computing or wanting to, and of it stolen by the host.

    What is stolen comes in pieces of milliseconds, and whoever holds a lock on that core keeps all others waiting.
    """
    user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, stat.read_text().split(maxsplit=9)[1:9])
    return user + nice + system + irq + softirq + stolen, stolen


@contextmanager
def stolen_share() -> Iterator[list[float]]:
    """The share of the CPU time of all that ran in the block which the host did not give; known at its end."""
    before, found = core_ticks(), [0.0]
    yield found
    wanted, stolen = (b - a for a, b in zip(before, core_ticks(), strict=True))
    found[0] = stolen / max(wanted, 1)


def _turn(core, start, seconds, queue) -> None:  # type: ignore[no-untyped-def]  # multiprocessing's own types are functions
    os.sched_setaffinity(0, {core})
    start.wait(_PATIENCE_S)
    turns, begun = 0, time.perf_counter()
    while (spent := time.perf_counter() - begun) < seconds:
        _turn_s()
        turns += 1
    queue.put(turns / spent)
