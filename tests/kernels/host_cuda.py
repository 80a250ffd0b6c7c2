"""Runs a .cu file on the host, thread by thread (host_cuda.h): the very code of a kernel, with the arguments of its launcher.

It shows what a kernel computes without a GPU, copies that it does not wait for, and what it does to shared memory that it
may not. Not what only a GPU shows: races of threads, accesses outside of global buffers, and time. The instructions that it
knows are those of the waves, the chain and the lookup, but for fp8.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.runtime import source
from kernels.runtime.source import FOLDER
from tests.made_once import made_once

HEADER = Path(__file__).with_name("host_cuda.h")
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_OPERAND = re.compile(r'"[=+]?\w"\s*\(')
_OPCODE = re.compile(r"[a-z]\w*(?:\.\w+)+")  # the first of a template
_OPTIONS = ("-U_FORTIFY_SOURCE", "-pedantic-errors", "-fPIC", "-fvisibility=hidden")
_KNOWN = set(re.findall(r"(?:void |MMA\(|WGMMA\(|NOTHING\()(\w+)", HEADER.read_text().split("namespace ptx", 1)[1]))


class HostKernel:
    """A kernel as CuPy's: what `launch` is given."""

    def __init__(self, file: str, name: str, constants: tuple[tuple[str, str], ...], folder: Path) -> None:
        self.max_dynamic_shared_size_bytes = 0
        self._run = _built(file, name, constants, folder)

    def __call__(
        self, blocks: int | tuple[int, int], threads: int, args: Sequence[object], shared_bytes: int, cluster: int = 1
    ) -> None:
        x, y = (blocks, 1) if isinstance(blocks, int) else blocks
        values = [a if isinstance(a, ctypes.Structure) else _scalar(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        failure = self._run(x, y, threads, ctypes.c_size_t(shared_bytes), cluster, pointers)
        assert failure is None, failure.decode()


def put_under(monkeypatch: pytest.MonkeyPatch, module: ModuleType, run_folder: Path) -> None:
    """Lets the launchers of a module run its kernels here, on tensors of the CPU, as if this were an H200."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = run_folder / "host_cuda"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(source, "_kernel", lambda of: HostKernel(of.file, of.name, of.constants, folder))
    monkeypatch.setattr(module, "tensor_map", tensor_map, raising=False)
    monkeypatch.setattr(module, "shared_limit", lambda _: 227 * 1024, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


def tensor_map(matrix: torch.Tensor, rows: int) -> "ctypes.Array[ctypes.c_uint64]":
    """In the place of `kernels.runtime.launch.tensor_map`: what host_cuda.h's copies read."""
    size = matrix.element_size()
    words = matrix.data_ptr(), matrix.shape[0], matrix.shape[1] * size, matrix.stride(0) * size, rows, size
    return (ctypes.c_uint64 * 16)(*words)


def launch(
    kernel: HostKernel,
    blocks: int | tuple[int, int],
    threads: int,
    args: Sequence[object],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> None:
    """In the place of `kernels.runtime.launch.launch`."""
    assert shared_bytes <= max(48 * 1024, kernel.max_dynamic_shared_size_bytes)
    kernel(blocks, threads, args, shared_bytes, cluster)


def translated(code: str) -> str:
    """Preprocessed code with every asm statement as a call of ptx::<opcode>, its outputs first."""
    code = re.sub(r"extern __shared__ __align__\(\d+\) (char|float) (\w+)\[\];", r"\1* const \2 = (\1*)host::shared;", code)
    out, at = [], 0
    while found := _ASM.search(code, at):
        end = _closing(code, found.end())
        out += [code[at : found.start()], _call(code[found.end() : end])]
        at = end + 1
    return "".join(out) + code[at:]


def _unquoted(code: str, start: int) -> Iterator[tuple[int, str, int]]:
    """Places, characters and how many parentheses are open there (one at the start), but for what strings hold."""
    depth, quoted = 1, False
    for i in range(start, len(code)):
        quoted ^= code[i] == '"'
        if not quoted:
            depth += {"(": 1, ")": -1}.get(code[i], 0)
            yield i, code[i], depth


def _closing(code: str, start: int) -> int:
    """The place of the parenthesis that closes the one before `start`."""
    return next(i for i, _, depth in _unquoted(code, start) if depth == 0)


def _call(statement: str) -> str:
    colons = [i for i, c, depth in _unquoted(statement, 0) if c == ":" and depth == 1]
    template, *parts = (statement[i + 1 : j] for i, j in pairwise([-1, *colons, len(statement)]))
    # What the L1 is to keep changes no value.
    opcode = _OPCODE.search(re.sub(r"\"\s*\"|\.L1::\w+", "", template).replace("\\n", " "))
    if opcode is None:
        return "(void)0"  # asm that only tells the compiler what is used
    operands = []
    for part in parts[:2]:
        at = 0
        while found := _OPERAND.search(part, at):
            end = _closing(part, found.end())
            operands.append(part[found.end() : end])
            at = end + 1
    name = re.sub(r"_m64n\d+k", "_m64k", opcode[0].replace(".", "_"))  # wgmma: its sums tell how many columns
    return f"ptx::{name if name in _KNOWN else 'unsupported'}({', '.join(operands)})"


@cache
def _built(file: str, name: str, constants: tuple[tuple[str, str], ...], folder: Path) -> "ctypes._NamedFuncPointer":
    variant = sha256(repr((name, constants)).encode()).hexdigest()[:16]
    made = made_once(folder / f"{Path(file).name}-{variant}.so", partial(_build, file, name, constants))
    function = ctypes.CDLL(str(made)).run
    function.restype = ctypes.c_char_p
    return function


def _build(file: str, name: str, constants: tuple[tuple[str, str], ...], made: Path) -> None:
    defines = [f"-D{k}={v}" for k, v in (*constants, ("__CUDA_ARCH__", "900"))]
    code = _gcc("-E", "-P", *defines, f"-I{FOLDER}", "-x", "c++", str(FOLDER / f"{file}.cu"))
    run = f"return host::launch({name}, x, y, threads, shared_bytes, cluster, args);"
    # Waves compute for longer than they take to be optimized; nothing else does.
    level = "-O1" if file.startswith("waves/") else "-O0"
    source, header = made.with_suffix(".cpp"), made_once(made.parent / f"{level[1:]}.h", partial(_with_precompiled, level))
    runtime = made_once(made.parent / "host_cuda.o", _runtime)
    source.write_text(
        f'#include "{header}"\n{translated(code)}\n'
        f'extern "C" __attribute__((visibility("default"))) const char* '
        f"run(int x, int y, int threads, size_t shared_bytes, int cluster, void** args) {{ {run} }}\n"
    )
    libraries = made_once(made.parent / "libraries.so", _libraries)
    linked = "-shared", "-nodefaultlibs", "-Wl,--no-as-needed", str(runtime), str(libraries)
    _gcc(level, *_OPTIONS, str(source), *linked, "-o", str(made))


def _with_precompiled(level: str, header: Path) -> None:
    """g++ reads what lies beside a header under this name in its place, in less time; each variant is compiled for itself."""
    shutil.copy(HEADER, header)
    _gcc(level, *_OPTIONS, "-x", "c++-header", str(header), "-o", f"{header}.gch")


def _runtime(made: Path) -> None:
    _gcc("-O2", *_OPTIONS, "-c", str(HEADER.with_suffix(".cpp")), "-o", str(made))


def _libraries(made: Path) -> None:
    """Nothing but the need of C++'s: given these, the linker reads all their names, an eighth of a variant's time."""
    _gcc("-shared", "-Wl,--no-as-needed", "-x", "c++", "/dev/null", "-o", str(made))


def _gcc(*options: str) -> str:
    done = subprocess.run(["g++", "-std=c++17", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    return done.stdout


def _scalar(value: object) -> ctypes.c_int32 | ctypes.c_uint64:
    if isinstance(value, np.int32):
        return ctypes.c_int32(int(value))
    assert isinstance(value, int)
    return ctypes.c_uint64(value)
