"""Finds, compiles (by NVRTC) and caches the .cu files of `kernels`, one module per device and set of constants.

A file is named by room and stem, such as "waves/chain"; headers are included by room too.
"""

import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

from kernels.runtime.code_cache import find_code, store_code
from kernels.runtime.cores import usable_cores

log = logging.getLogger(__name__)
FOLDER = Path(__file__).resolve().parents[1]

# Files that need one architecture's own instructions; others compile for the GPU at hand.
ARCHITECTURE = dict.fromkeys(("waves/wave_wgmma", "waves/crossed_wgmma", "interaction/cin_wgmma"), "sm_90a")
_INVALID_OPTION = 5  # nvrtcResult
_MOST_THREADS = 8  # that compile: each takes some 35 MB, and with more of them than cores all take longer


def compile_options(constants: Mapping[str, str]) -> tuple[str, ...]:
    """NVRTC options: C++17, `kernels` for includes, the constants. No fast-math: float32 has to be float32 (but for
    denormals, see `_as_cupy`).
    """
    return ("-std=c++17", f"-I{FOLDER}", *(f"-D{k}={v}" for k, v in sorted(constants.items())))


def source(file: str) -> str:
    """`file`.cu and a line that stands for all headers: kernels are kept on disk by their own text and options alone."""
    return f"{(FOLDER / f'{file}.cu').read_text()}// headers: {_headers(FOLDER)}\n"


@cache
def _headers(folder: Path) -> str:
    return sha256("".join(path.read_text() for path in sorted(folder.rglob("*.cuh"))).encode()).hexdigest()


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
        if shared_bytes and shared_bytes > function.max_dynamic_shared_size_bytes:  # CuPy asks the current device
            function.max_dynamic_shared_size_bytes = shared_bytes
    return function


@contextmanager
def loading(wanted: Iterable[KernelSource]) -> Iterator[None]:
    """Has these kernels loaded, the first ones first, beside what is done meanwhile: who asks for one waits for that one alone.
    In the end all are there. NVRTC takes a core for a sixth to half of a second; of three and more one is left for what is
    done meanwhile.
    """
    cores, begun = usable_cores(), dict[KernelSource, Future[Any]]()
    threads = ThreadPoolExecutor(min(_MOST_THREADS, max(2, cores - 1)))
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
    try:
        own = _as_cupy(cupy.cuda.Device(device).compute_capability)
        return cupy.RawModule(path=str(_cubin(file, code, (*options, *own))))
    except UnknownGpu as reason:  # newer than NVRTC: CuPy has the driver translate then
        log.info("%s.cu is compiled by CuPy: %s", file, reason)
        module = cupy.RawModule(code=code, options=options, backend="nvrtc")
        module.compile()
        return module


def _as_cupy(capability: str) -> tuple[str, ...]:
    """The options that CuPy adds for a GPU."""
    return "-ftz=true", f"-arch=sm_{capability}", "--device-as-default-execution-space"


def _cubin(file: str, code: str, options: tuple[str, ...]) -> Path:
    """Compiles, and keeps the result for the next start where it can."""
    nvrtc = _nvrtc()
    key = sha256(repr((code, options, _compiler(nvrtc))).encode()).hexdigest()
    name = f"{Path(file).name}-{key[:32]}.cubin"
    return find_code(name) or store_code(name, compiled(nvrtc, file, code, options))


class UnknownGpu(Exception):
    """NVRTC does not know the architecture; in its words."""


def compiled(nvrtc: ctypes.CDLL, file: str, code: str, options: Sequence[str], kind: str = "CUBIN") -> bytes:
    """What NVRTC makes of a file's text: machine code (or another `kind`, PTX).

    Called by ctypes: CuPy's own call keeps the interpreter's lock, so that threads would compile one after the other, and
    nothing else would run meanwhile.

    Raises:
        UnknownGpu. RuntimeError: the code does not compile; with NVRTC's words.
    """
    program, given = ctypes.c_void_p(), (ctypes.c_char_p * len(options))(*map(str.encode, options))
    _check(file, nvrtc.nvrtcCreateProgram(ctypes.byref(program), code.encode(), f"{file}.cu".encode(), 0, None, None))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        words = _made(nvrtc, file, "ProgramLog", program).decode(errors="replace").strip("\0\n") if status else ""
        if status == _INVALID_OPTION and "gpu-architecture" in words:
            raise UnknownGpu(words)
        _check(file, status, words)
        return _made(nvrtc, file, kind, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _made(nvrtc: ctypes.CDLL, file: str, what: str, program: ctypes.c_void_p) -> bytes:
    """What NVRTC made of a program, or its log."""
    size = ctypes.c_size_t()
    _check(file, nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    made = ctypes.create_string_buffer(size.value)
    _check(file, nvrtc[f"nvrtcGet{what}"](program, made))
    return made.raw


def _check(file: str, status: int, words: str = "") -> None:
    if status:
        raise RuntimeError(f"{file}.cu: NVRTC gave {status}: {words}")


@cache
def _nvrtc() -> ctypes.CDLL:
    """The library that CuPy has loaded: it is found again by its name, or by the file that it is mapped from."""
    from cupy_backends.cuda.libs import nvrtc

    major, _ = nvrtc.getVersion()
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if f"/{name}" in line]
        if not mapped:
            raise
        return ctypes.CDLL(mapped[0])


@cache
def _compiler(nvrtc: ctypes.CDLL) -> str:
    """Which build of NVRTC it is: releases of one version differ, and say so at the head of what they make."""
    made = compiled(nvrtc, "empty", "", (), "PTX").decode(errors="replace")
    return "".join(line for line in made.splitlines() if line.startswith("//"))
