"""The device that a name such as "auto" or "cuda:1" means on this machine."""

from importlib.util import find_spec

import torch

from dpiframe_core.errors import InputError


def target_device(name: str) -> torch.device:
    """ "auto": the GPU if there is one, else the CPU.

    Raises:
        InputError: no such device here, or CuPy is missing for it.
    """
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if wanted == "cpu":
        return torch.device("cpu")
    if not wanted.startswith("cuda") or (wanted != "cuda" and not wanted.removeprefix("cuda:").isdecimal()):
        raise InputError("device", name, "auto, cpu, cuda or cuda:N")
    index = int(wanted.removeprefix("cuda:")) if ":" in wanted else 0
    if index >= torch.cuda.device_count():
        raise InputError("device", name, f"one of the {torch.cuda.device_count()} CUDA devices here, or cpu")
    if find_spec("cupy") is None:
        raise InputError("device", name, "CuPy installed (pip install 'dpiframe[gpu]'), or device cpu")
    return torch.device("cuda", index)
