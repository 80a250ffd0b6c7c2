"""Tables as large as wished whose rows repeat those of one file in memory: they are mapped, and take no memory but that file's.

For whoever reads them they are tables of files that lie in the kernel's page cache. No disk has to hold them, and none is
measured. A table of 12 GB is a file of 256 MiB, mapped 45 times in a row.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

PATTERN = 1 << 20  # rows of the file
_PAGE = mmap.PAGESIZE
_FIXED = 0x10  # MAP_FIXED
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_STEP = 7919  # pages, from where in the file one table begins to where the next does


@contextmanager
def repeated(names: Sequence[str], rows: int, dim: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """float16[rows, dim] of each name, each from another row of the file on. They are not to be touched behind the `with`.

    Raises:
        OSError: the host maps no more.
    """
    pattern = np.random.default_rng(seed).standard_normal((PATTERN, dim), np.float32).astype(np.float16)
    with ExitStack() as stack:
        file = os.memfd_create("pattern")
        stack.callback(os.close, file)
        os.truncate(file, pattern.nbytes)
        with mmap.mmap(file, pattern.nbytes) as memory:
            memory[:] = pattern.tobytes()
        pages = pattern.nbytes // _PAGE
        yield {
            name: stack.enter_context(_mapped(file, pattern.nbytes, i * _STEP % pages * _PAGE, rows, dim))
            for i, name in enumerate(names)
        }


@contextmanager
def _mapped(file: int, size: int, begin: int, rows: int, dim: int) -> Iterator[torch.Tensor]:
    """[rows, dim] of a file of `size` bytes from byte `begin` on, again and again."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def mapped(at: int | None, length: int, access: int, flags: int, file: int, offset: int) -> int:
        found: int = libc.mmap(at, length, access, flags, file, offset)
        if found == ctypes.c_size_t(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {length} bytes: {os.strerror(ctypes.get_errno())}")
        return found

    length = -(-rows * dim * 2 // _PAGE) * _PAGE
    address = mapped(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0)
    try:
        at = 0
        while at < length:
            part = min(size - begin, length - at)
            mapped(address + at, part, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, file, begin)
            at, begin = at + part, 0
        values = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint16)), (rows, dim))
        yield torch.from_numpy(values.view(np.float16))
    finally:
        libc.munmap(address, length)
