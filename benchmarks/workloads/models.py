"""The models that suites know, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.workloads.compiled import MODULES, compiled_model
from benchmarks.workloads.dlrm import dlrm, mlperf
from benchmarks.workloads.paper import ARCHITECTURES, paper_model
from benchmarks.workloads.sequence import din
from benchmarks.workloads.workload import Workload

MODELS: dict[str, Callable[..., Workload]] = {
    **dict.fromkeys(ARCHITECTURES, paper_model),
    "dlrm": dlrm,
    "din-50": partial(din, length=50),
    "din-200": partial(din, length=200),
    "mlperf": mlperf,
    **dict.fromkeys(MODULES, compiled_model),
}


def workload(name: str, device: torch.device, *, seed: int = 0, **size: Any) -> Workload:
    """A model with random weights. size: smaller tables and layers than it is published with, as its own function takes them.

    Raises:
        ValueError: there is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"model: got {name!r}, expected one of {', '.join(MODELS)}")
    return MODELS[name](name, device, seed=seed, **size)
