"""The threads that torch computes with on a CPU, lent to our own C code: two pools would take the cores from one another."""

import ctypes
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_RUNTIMES = ("libgomp", "libiomp5", "libomp")


@cache
def pool() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that this process has loaded, torch's before others; None without one."""
    with suppress(OSError):
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        runtimes = [path for path in mapped if os.path.basename(path).startswith(_RUNTIMES)]
        ours = str(Path(torch.__file__).parent.parent)
        for path in sorted(runtimes, key=lambda path: (not path.startswith(ours), path)):
            with suppress(AttributeError, OSError):
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
    return None


def team() -> tuple[int | None, int]:
    """`pool` and how many of its threads the calling thread may have."""
    return pool(), torch.get_num_threads()
