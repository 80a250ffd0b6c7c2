"""Workloads of a few hundred rows, and a `failed` that fails the test."""

from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.workload import workload

SIZES = (50, 7, 300, 2, 19)


def make(name, device, *, seed):
    return workload(name, device, dim=8, sizes=SIZES, seed=seed)


def unexpected(what, error):
    raise AssertionError(what) from error


def cells(models, precisions, batches, device, *, failed=unexpected, seconds=0.01):
    """A sweep over tiny models."""
    return ModelSweep(models, precisions, batches, device, failed, seconds, make=make)
