"""Workloads of a few hundred rows, and a `failed` that fails the test."""

from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.workloads.models import workload
from benchmarks.workloads.modules import AutoInt, FinalMLP, MaskNet
from dpiframe_core.graph.architecture import DLRM, DLRMDCNv2, XDeepFM

SIZES = (50, 7, 300, 2, 19)
BAGS = (3, 1, 5, 1, 2)
_FIELDS = {"sizes": SIZES, "dim": 8}
_TINY = {
    "xdeepfm": _FIELDS | {"architecture": XDeepFM(cin_units=(6, 4), hidden_units=(16, 8))},
    "dlrm": {"sizes": SIZES, "architecture": DLRM(bottom_units=(16, 8), hidden_units=(16, 8))},
    "mlperf": {
        "sizes": SIZES,
        "bags": BAGS,
        "architecture": DLRMDCNv2(bottom_units=(16, 8), cross_layers=2, rank=4, hidden_units=(16, 8)),
    },
    "din-50": {"length": 5, "dim": 8, "most_rows": 40, "attention": (8, 4), "hidden_units": (16, 8)},
    "din-200": {"length": 9, "dim": 8, "most_rows": 40, "attention": (8, 4), "hidden_units": (16, 8)},
    "autoint": _FIELDS | {"module": AutoInt(len(SIZES), 8, 2, 2, 4)},
    "masknet": _FIELDS | {"module": MaskNet(len(SIZES), 8, 2, 16, 2, (16, 8))},
    "finalmlp": _FIELDS | {"module": FinalMLP(len(SIZES), 8, (16, 8), 8, 2, 2)},
}


def make(name, device, *, seed, **size):
    return workload(name, device, seed=seed, **_TINY.get(name, _FIELDS) | size)


def unexpected(what, error):
    raise AssertionError(what) from error


def cells(models, precisions, batches, device, *, failed=unexpected, seconds=0.01, contexts=(1,)):
    """A sweep over tiny models."""
    return ModelSweep(models, precisions, batches, device, failed, seconds, contexts=contexts, make=make)
