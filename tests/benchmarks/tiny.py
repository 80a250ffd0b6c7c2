"""Workloads of a few hundred rows, and a `failed` that fails the test."""

from benchmarks.systems.workload import workload

SIZES = (50, 7, 300, 2, 19)


def make(name, device, *, seed):
    return workload(name, device, dim=8, sizes=SIZES, seed=seed)


def unexpected(what, error):
    raise AssertionError(what) from error
