"""The threads that torch computes with on a CPU, lent to our own C code: two pools would take the cores from one another."""

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_RUNTIMES = ("libgomp", "libiomp5", "libomp")


@cache
def pool() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; None without one."""
    with suppress(OSError):
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        for path in ranked(mapped, Path(torch.__file__).parent):
            with suppress(AttributeError, OSError):
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
    return None


def ranked(mapped: Collection[str], torch_folder: Path) -> list[str]:
    """The OpenMP runtimes among the files that a process has mapped, the likeliest to be torch's first: its own, one of the
    system (conda's too), at last another package's.
    """
    own, packages = (f"{torch_folder}{os.sep}", f"{torch_folder}.libs{os.sep}"), f"{torch_folder.parent}{os.sep}"
    runtimes = sorted(path for path in mapped if os.path.basename(path).startswith(_RUNTIMES))
    return sorted(runtimes, key=lambda path: 0 if path.startswith(own) else 2 if path.startswith(packages) else 1)


def pool_arguments() -> tuple[int | None, int]:
    """`pool` and how many of its threads the calling thread may have: what C functions that share out rows take at last."""
    return pool(), torch.get_num_threads()
