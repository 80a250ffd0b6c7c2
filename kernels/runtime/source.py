"""Finds, compiles (NVRTC through CuPy) and caches the .cu files of this folder, one module per device and set of constants."""

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from kernels.runtime.code_cache import keep, kept
from kernels.waves.wave_tiles import EXACT_TILES, TILES, WIDE_TILES

FOLDER = Path(__file__).resolve().parent

# The Criteo lookup: 39 ids, 16 columns each, first-order weights; all float32, or int8 rows.
_LOOKUP = {"CONTEXT_BYTES": "0", "CANDIDATE_BYTES": "76", "CONTEXT_NUMBERS": "0", "CANDIDATE_NUMBERS": "0", "TOTALS": "39"}
_LOOKUP |= {"NARROW": "0", "MOST": "1", "MASKS": "0", "LARGEST": "0"}
_LOOKUP |= {"GROUP": "8", "UNIT_THREADS": "320", "TOTAL_THREADS": "64", "BLOCKS": "2"}
_LOOKUP |= {"OUT_FACTOR": "1.0f", "AHEAD": "0"}
_FLOAT = {"ID": "unsigned", "OUT": "float", "UNITS": "156", "VEC": "4", "DTYPES": "1", "TOTAL_DTYPES": "1"}
_INT8 = {"ID": "unsigned long long", "OUT": "bf16", "UNITS": "78", "VEC": "8", "DTYPES": "8", "TOTAL_DTYPES": "8"}
_FP8 = {"OUT": "fp8", "OUT_FACTOR": "0.25f"}

_WAVE = {"TASKS": "2", "DOTS": "7", "LAYERS": "6", "HEAD": "1", "PER_ROW": "3", "CROSSED": "1", "SMOOTH": "1"}
_CHAIN = {name: value for name, value in _WAVE.items() if name != "HEAD"}
_TILES = (TILES[0].constants, TILES[-1].constants)
_WIDE_TILES = (WIDE_TILES[0].constants, WIDE_TILES[-1].constants)

_DOT = {"FIELDS": "27", "KEEP": "10", "DIAGONAL": "0"}
_CIN = {"M": "39", "DIM": "16", "NF": "8", "ACTIVATION": "1"}
_ATTENTION = {"LENGTH": "50", "DIMS": "32,16", "QUERIES": "0,32", "KEYS": "48,1648", "POOLED": "48,80", "PARTS": "2"}
_ATTENTION |= {"DIM": "48", "MASK": "2448", "KEPT": "{0,0,48},{2500,96,8}", "UNITS": "64,16", "LAYERS": "2"}
_ATTENTION |= {"ACTIVATION": "7", "OUTPUT": "0"}
_AHEAD = {"AHEAD": "1", "CONTEXT_BYTES": "8", "CONTEXT_NUMBERS": "1", "CANDIDATE_NUMBERS": "2"}
_POOLED = {"MOST": "10", "LARGEST": "1", "MASKS": "1", "NARROW": "1"}
_PLAIN = (_FLOAT, _FLOAT | {"OUT": "bf16"}, _INT8, _INT8 | {"OUT": "float"}, _FLOAT | _FP8, _INT8 | _FP8)
_LOOKUPS = (*_PLAIN, _FLOAT | _AHEAD, _INT8 | _AHEAD, _FLOAT | _POOLED, _INT8 | _POOLED | _AHEAD)

# Representatives of the sets of compile-time constants that the kernels are built with; the compile test walks this table.
VARIANTS: dict[str, tuple[dict[str, str], ...]] = {
    "embedding": ({}, *(_LOOKUP | own for own in _LOOKUPS)),
    "dense": ({"X": "float"}, {"X": "bf16"}),
    "interaction": (
        {"X": "float", "LAYERS": "1", "DOTS": "1"},
        {"X": "bf16", "LAYERS": "6", "DOTS": "7"},
        {"X": "float", "LAYERS": "32", "DOTS": "34"},
    ),
    "wave": tuple(
        _WAVE | {"X": x, "PASSES": passes, **sizes}
        for x, passes in (("float", "1"), ("float", "3"), ("bf16", "1"), ("fp8", "1"))
        for sizes in _TILES
    ),
    "activation": ({"X": "float", "ACTIVATION": "7"}, {"X": "bf16", "ACTIVATION": "4"}),
    "dot": (_DOT | {"X": "float", "DIM": "128", "ROWS": "1"}, _DOT | {"X": "bf16", "DIM": "10", "ROWS": "1", "DIAGONAL": "1"}),
    "cin": tuple(
        _CIN | {"X": x, "FIRST": first, "PASSES": p, "WM": wm, "WK": wk}
        for x, first, p, wm, wk in (("float", "1", "3", "1", "8"), ("float", "0", "1", "8", "1"), ("bf16", "1", "1", "2", "4"))
    ),
    "attention": (
        _ATTENTION | {"X": "float", "FORMED": "1", "SOFTMAX": "1"},
        _ATTENTION | {"X": "bf16", "FORMED": "0", "SOFTMAX": "0", "MASK": "-1", "KEPT": "{0,0,0}"},
    ),
    "chain": tuple(
        _CHAIN | {"X": x, "PASSES": passes, "ROWS": rows}
        for x, passes in (("float", "1"), ("float", "3"), ("bf16", "1"))
        for rows in ("1", "8")
    ),
    "wave_wgmma": (
        *(_WAVE | {"X": x, **sizes} for x in ("float", "bf16", "fp8") for sizes in _WIDE_TILES),
        *(_WAVE | {"X": "float", **tile.constants} for tile in EXACT_TILES),
    ),
    "head": tuple({"X": x, "TASKS": tasks} for x, tasks in (("float", "1"), ("bf16", "1"), ("float", "3"), ("fp8", "1"))),
}

# Files that need one architecture's own instructions; others compile for the GPU at hand.
ARCHITECTURE = {"wave_wgmma": "sm_90a"}


def compile_options(constants: Mapping[str, str]) -> tuple[str, ...]:
    """NVRTC options: C++17, this folder for includes, the constants. No fast-math: float32 has to be float32 (but for
    denormals: CuPy adds -ftz=true).
    """
    return ("-std=c++17", f"-I{FOLDER}", *(f"-D{k}={v}" for k, v in sorted(constants.items())))


def source(file: str) -> str:
    """`file`.cu and a line that stands for all headers: CuPy keeps kernels on disk by their own text and options alone."""
    headers = "".join(path.read_text() for path in sorted(FOLDER.glob("*.cuh")))
    return f"{(FOLDER / f'{file}.cu').read_text()}// headers: {sha256(headers.encode()).hexdigest()}\n"


_ASKED: dict[tuple[object, ...], Lock] = {}


def kernel(file: str, name: str, constants: Mapping[str, str], device: int) -> Any:
    """The function `name` of `file`.cu, compiled for `device` with the constants given. Cached.

    Loading a module allocates and synchronises, so every kernel must have been asked for once before a graph is captured.
    Threads that ask for one at the same time wait for one compilation.
    """
    key = file, name, tuple(sorted(constants.items())), device
    with _ASKED.setdefault(key, Lock()):
        return _kernel(*key)


@cache  # a module that is dropped is unloaded, under the graphs that hold its kernels
def _kernel(file: str, name: str, constants: tuple[tuple[str, str], ...], device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return _module(file, constants, device).get_function(name)


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
    name = f"{file}-{key[:32]}.cubin"
    if found := kept(name):
        return found
    program = nvrtc.createProgram(code, f"{file}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{file}.cu: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return keep(name, cubin)
