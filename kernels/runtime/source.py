"""Finds, compiles (NVRTC through CuPy) and caches the .cu files of `kernels`, one module per device and set of constants.

A file is named by room and stem, such as "waves/chain"; headers are included by room too.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

from kernels.runtime.code_cache import find_code, store_code

FOLDER = Path(__file__).resolve().parents[1]

# Files that need one architecture's own instructions; others compile for the GPU at hand.
ARCHITECTURE = dict.fromkeys(("waves/wave_wgmma", "waves/crossed_wgmma", "interaction/cin_wgmma"), "sm_90a")


def compile_options(constants: Mapping[str, str]) -> tuple[str, ...]:
    """NVRTC options: C++17, `kernels` for includes, the constants. No fast-math: float32 has to be float32 (but for
    denormals: CuPy adds -ftz=true).
    """
    return ("-std=c++17", f"-I{FOLDER}", *(f"-D{k}={v}" for k, v in sorted(constants.items())))


def source(file: str) -> str:
    """`file`.cu and a line that stands for all headers: CuPy keeps kernels on disk by their own text and options alone."""
    headers = "".join(path.read_text() for path in sorted(FOLDER.rglob("*.cuh")))
    return f"{(FOLDER / f'{file}.cu').read_text()}// headers: {sha256(headers.encode()).hexdigest()}\n"


class KernelSource(NamedTuple):
    """What one kernel is compiled from: the function `name` of `file`.cu, with the constants given, for `device`."""

    file: str
    name: str
    constants: tuple[tuple[str, str], ...]
    device: int

    @classmethod
    def of(cls, file: str, name: str, constants: Mapping[str, str], device: int | None) -> Self:
        return cls(file, name, tuple(sorted(constants.items())), device or 0)


_ASKED: dict[KernelSource, Lock] = {}


def kernel(file: str, name: str, constants: Mapping[str, str], device: int, shared_bytes: int = 0) -> Any:
    """As `loaded`."""
    return loaded(KernelSource.of(file, name, constants, device), shared_bytes)


def loaded(wanted: KernelSource, shared_bytes: int = 0) -> Any:
    """The kernel, compiled and on its device, where launches may take so much dynamic shared memory. Cached.

    Loading a module allocates and synchronises, so every kernel must have been asked for once before a graph is captured.
    Threads that ask for one at the same time wait for one compilation.
    """
    with _ASKED.setdefault(wanted, Lock()):
        function = _kernel(wanted)
    if shared_bytes > function.max_dynamic_shared_size_bytes:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function


@contextmanager
def loading(wanted: Iterable[KernelSource]) -> Iterator[None]:
    """Has these kernels loaded, the first ones first, beside what is done meanwhile: who asks for one waits for that one alone.
    In the end all are there. NVRTC takes half a second a kernel, and one core; a core is left for what is done meanwhile.
    """
    threads, begun = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)) - 1)), dict[KernelSource, Future[Any]]()
    try:
        for one in wanted:
            if one not in begun:
                begun[one] = threads.submit(loaded, one)
        yield
        for done in begun.values():
            done.result()
    finally:
        threads.shutdown(cancel_futures=True)


@cache  # a module that is dropped is unloaded, under the graphs that hold its kernels
def _kernel(wanted: KernelSource) -> Any:
    import cupy

    with cupy.cuda.Device(wanted.device):
        return _module(wanted.file, wanted.constants, wanted.device).get_function(wanted.name)


@cache
def _module(file: str, constants: tuple[tuple[str, str], ...], device: int) -> Any:
    import cupy

    code, options = source(file), compile_options(dict(constants))
    if file in ARCHITECTURE:
        return cupy.RawModule(path=str(_cubin(file, code, (*options, f"-arch={ARCHITECTURE[file]}"))))
    module = cupy.RawModule(code=code, options=options, backend="nvrtc")
    module.compile()
    return module


def _cubin(file: str, code: str, options: tuple[str, ...]) -> Path:
    """Compiles for an architecture that CuPy does not name, and keeps the result as CuPy keeps its own, where it can."""
    from cupy_backends.cuda.libs import nvrtc

    key = sha256(repr((code, options, nvrtc.getVersion())).encode()).hexdigest()
    name = f"{Path(file).name}-{key[:32]}.cubin"
    if found := find_code(name):
        return found
    program = nvrtc.createProgram(code, f"{file}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{file}.cu: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return store_code(name, cubin)
