"""Builds stacked.c with the host's C compiler, once for a processor, and loads it. Without a compiler there is no library, and
`stacked` does the same with NumPy and torch, slower.
"""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from kernels.kept import keep, kept
from kernels.source import FOLDER

log = logging.getLogger(__name__)
# No contraction: sums are the same to the bit whether a processor has fused multiply-add or not.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c11", "-shared", "-fPIC")
_BUILD_S = 60
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


@cache
def library() -> ctypes.CDLL | None:
    """The functions of stacked.c, or None where they cannot be built (which is said once, in the log)."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.info("no C compiler: CPU lookups take NumPy's way")
        return None
    code = FOLDER / "stacked.c"
    try:
        loaded = ctypes.CDLL(str(_built(compiler, code)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("%s could not be built (%s): CPU lookups take NumPy's way", code.name, error)
        return None
    loaded.dpi_lookup.restype = loaded.dpi_floats.restype = _LONG
    loaded.dpi_fm.restype = loaded.dpi_add_shared.restype = None
    loaded.dpi_lookup.argtypes = [_POINTER, _LONG, _LONG, *[_POINTER] * 3, _LONG, _POINTER]
    loaded.dpi_floats.argtypes = [_POINTER, _POINTER, _LONG, *[_POINTER] * 3, _LONG, *[_POINTER] * 5]
    loaded.dpi_add_shared.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG]
    loaded.dpi_fm.argtypes = [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER]
    return loaded


def _built(compiler: str, code: Path) -> Path:
    """The shared object, from an earlier start if it was kept."""
    key = sha256(repr((code.read_text(), _FLAGS, compiler, _processor())).encode()).hexdigest()
    name = f"stacked-{key[:32]}.so"
    if found := kept(name):
        return found
    with TemporaryDirectory(prefix="dpiframe-") as folder:
        made = Path(folder) / "stacked.so"
        done = subprocess.run(
            [compiler, *_FLAGS, str(code), "-o", str(made)], capture_output=True, text=True, timeout=_BUILD_S, check=False
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"{compiler} failed"])[0])
        return keep(name, made.read_bytes())


def _processor() -> str:
    """What -march=native depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features", "CPU part"))
    return platform.processor()
