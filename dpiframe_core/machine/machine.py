"""The machine as far as timings and choices depend on it: GPU, driver and the versions of what issues its work."""

import ctypes
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Filled by `machine`. On a CPU `gpu`, `driver` and `cupy` are empty."""

    gpu: str
    driver: str
    torch: str
    cupy: str


def machine(device: torch.device) -> Machine:
    """What `device` is and what drives it."""
    if device.type != "cuda":
        return Machine("", "", torch.__version__, "")
    return Machine(torch.cuda.get_device_name(device), _driver(), torch.__version__, _cupy())


def _driver() -> str:
    """From NVML, as neither torch nor CuPy tells a driver's own version; "unknown" where it cannot be asked."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "unknown"
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2():
        return "unknown"
    failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return "unknown" if failed else text.value.decode()


def _cupy() -> str:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
