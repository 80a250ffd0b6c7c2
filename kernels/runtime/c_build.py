"""Builds the .c files with the host's C compiler, once for a processor, and loads them: blocks.c, batch.c, staging.c, lane.c,
copy_threads.c, replay.c and those of kernels/columns as an extension module of CPython, which needs its headers; lookup.c,
dense.c, layers.c, dot.c, row_copies.c, norms.c, recurrence.c, attention.c and field_attention.c as a library. Where they
cannot be built, NumPy, torch and CuPy do the same, slower.
"""

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kernels.runtime.code_cache import find_code, store_code
from kernels.runtime.source import FOLDER

log = logging.getLogger(__name__)
# No contraction: sums are the same to the bit whether a processor has fused multiply-add or not. recurrence.c, layers.c and
# norms.c have it, and say why.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c11", "-shared", "-fPIC", "-pthread")
_BUILD_S = 60
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64

Loaded = TypeVar("Loaded")
Buffer = npt.NDArray[np.generic] | bytes | memoryview
Columns = Sequence[list[Any] | tuple[Any, ...] | npt.NDArray[Any]]  # lists, arrays, or packed columns (cells.h)


# Rows, exec, whether its lookup waits for them, exec of the same with its rows copied first or 0, RowReader.given or ().
CapturedGraph = tuple[int, int, bool, int, tuple[int, ...]]


class RequestExtension(Protocol):
    """What requests need of C, whose comments say what it does. `pack_ids` and `copy_numbers` give how many values are wrong,
    `replay` CUDA's error code: 0 is well. All raise ValueError rather than go beyond a buffer; but the replays follow the
    addresses that they are given.
    """

    def pack_ids(
        self, columns: Buffer, ids: Buffer, wide: bool, rows: int, out: Buffer, at: int, record_bytes: int, /
    ) -> int: ...
    def settle_ids(
        self, columns: Buffer, ids: Buffer, stand_ins: Buffer, rows: int, out: Buffer, at: int, record_bytes: int, /
    ) -> int: ...
    def arrow_columns(self, schema: object, array: object, /) -> list[tuple[int, int, object, int]]: ...
    def column_bags(
        self, bags: list[Any] | tuple[Any, ...], numbers: tuple[int, int, int, int, bool], out: Buffer, /
    ) -> bool: ...
    def column_integers(self, columns: Columns, bounds: Buffer, out: Buffer, at: Buffer, /) -> bool: ...
    def column_numbers(self, columns: Columns, out: Buffer, missing: Buffer, at: Buffer, lifts: Buffer = ..., /) -> int: ...
    def scaled_numbers(self, numbers: Buffer, missing: Buffer, scales: Buffer, out: Buffer, at: Buffer, /) -> bool: ...
    def column_ids(
        self, columns: Columns, vocabularies: tuple[object, ...], unknown: int, missing: int, out: Buffer, at: Buffer, /
    ) -> int: ...
    def column_hashes(self, columns: Columns, rules: Buffer, missing: int, out: Buffer, at: Buffer, /) -> int: ...
    def vocabulary(self, data: Buffer, offsets: Buffer, ids: Buffer, /) -> object: ...
    def text_hashes(self, data: Buffer, offsets: Buffer, out: Buffer, /) -> None: ...
    def json_columns(
        self, body: bytes, kinds: dict[str, int], most: int, most_objects: int, /
    ) -> tuple[dict[str, tuple[int, int, bytes, tuple[int, int]]], int, bytes] | None: ...
    def json_items(self, body: bytes, most: int, /) -> list[bytes] | None: ...
    def texts(self, data: Buffer, count: int, /) -> list[str] | None: ...
    def copy_numbers(self, given: Buffer, out: Buffer, at: int, /) -> int: ...
    def context_range(self, buffer: Buffer, at: int, rows: int, /) -> tuple[int, int]: ...
    def fill(
        self, out: Buffer, places: tuple[int, ...], sections: tuple[tuple[int, int], ...], blocks: Sequence[object], /
    ) -> int: ...
    def replay(self, given: bytes, words: int, /) -> int: ...
    def replay_batches(
        self, given: bytes, error: int, graphs: tuple[CapturedGraph, ...], threads: int, out: Buffer,
        places: tuple[int, ...], sections: tuple[tuple[int, int], ...], carried: Buffer | None, prefix: int, layout: object,
        scores: Buffer, result: type[tuple[Any, ...]], driver: bytes, /,
    ) -> Callable[[Sequence[object], bool], Any]: ...  # fmt: skip


@cache
def cpu_library() -> ctypes.CDLL | None:
    """The functions of the files named here, or None where they cannot be built (said once, in the log)."""
    own = (f"cpu/{name}.c" for name in ("lookup", "dense", "layers", "dot"))
    names = (
        *own,
        "copies/row_copies.c",
        "norms/norms.c",
        "recurrent/recurrence.c",
        "attention/attention.c",
        "attention/field_attention.c",
    )
    return _loaded(names, (), _bound, "CPU lookups")


@cache
def request_extension() -> RequestExtension | None:
    """The module of blocks.c and the files that it names, or None where it cannot be built (which is said once, in the log)."""
    columns = (f"columns/{name}.c" for name in ("cells", "columns", "texts", "arrow", "json_columns", "json_rows"))
    copies = (f"copies/{name}.c" for name in ("batch", "in_place", "staging", "lane", "copy_threads"))
    names = ("cpu/blocks.c", *copies, "runtime/replay.c", *columns)
    return cast(RequestExtension | None, extension("kernels.cpu.blocks", names, "requests and graph replays"))


def extension(name: str, sources: Sequence[str | Path], users: str) -> Any | None:
    """The module of CPython `name` from C files, relative to `kernels` if not absolute; None where it cannot be built, and the
    log says that `users` go without.
    """
    options = f"-I{sysconfig.get_path('include')}", f"-DABI={sysconfig.get_config_var('SOABI')}"
    return _loaded(sources, options, partial(_imported, name), users)


def _bound(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.dpi_lookup.restype = loaded.dpi_floats.restype = _LONG
    loaded.dpi_attention.restype = loaded.dpi_field_attention.restype = loaded.dpi_layers.restype = None
    loaded.dpi_softmax.restype = loaded.dpi_layer_norm.restype = loaded.dpi_choice.restype = None
    loaded.dpi_choice.argtypes = [_POINTER, _LONG, _LONG, _LONG, *[_POINTER] * 2, _LONG]
    loaded.dpi_softmax.argtypes = [_POINTER, _LONG, _LONG, *[_POINTER] * 2, _LONG]
    loaded.dpi_layer_norm.argtypes = [_POINTER, _LONG, _LONG, *[_POINTER] * 2, ctypes.c_float, *[_POINTER] * 2, _LONG]
    loaded.dpi_recurrence.restype = loaded.dpi_fm.restype = loaded.dpi_add_shared.restype = loaded.dpi_row.restype = None
    loaded.dpi_lookup.argtypes = [_POINTER, _LONG, _LONG, *[_POINTER] * 3, _LONG, *[_POINTER] * 2, _LONG]
    pointers = [_POINTER] * 6
    loaded.dpi_floats.argtypes = [*pointers[:2], _LONG, *pointers[:3], _LONG, *pointers, _LONG, _LONG, _POINTER, _LONG]
    loaded.dpi_add_shared.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG]
    loaded.dpi_copy_rows.restype = loaded.dpi_dot.restype = None
    loaded.dpi_copy_rows.argtypes = [*[_POINTER] * 4, _LONG]
    loaded.dpi_dot.argtypes = [_POINTER, *[_LONG] * 2, _POINTER, *[_LONG] * 6, *[_POINTER] * 2, _LONG]
    loaded.dpi_row.argtypes = [_POINTER, *[_LONG] * 2, *[_POINTER] * 2, _LONG, *[_POINTER] * 2, _LONG]
    loaded.dpi_attention.argtypes = loaded.dpi_field_attention.argtypes = [_POINTER, _LONG, _POINTER, _LONG]
    loaded.dpi_recurrence.argtypes = [_POINTER, _LONG, _POINTER, _LONG]
    loaded.dpi_layers.argtypes = [_POINTER, _LONG, _POINTER, _LONG, *[_POINTER] * 2, _LONG]
    loaded.dpi_fm.argtypes = [_POINTER, *[_LONG] * 4, *[_POINTER] * 2, _LONG]
    return loaded


def _imported(name: str, path: Path) -> Any:
    loader = ExtensionFileLoader(name, str(path))  # CPython puts it into sys.modules, whatever we do with it
    module = module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def _loaded(names: Sequence[str | Path], options: Sequence[str], load: Callable[[Path], Loaded], users: str) -> Loaded | None:
    """`users`: who goes without, if they cannot be built."""
    program, *own = shlex.split(os.environ.get("CC", "")) or ["cc"]  # such as "ccache gcc"
    compiler = shutil.which(program)
    if compiler is None:
        log.info("no C compiler: %s go without", users)
        return None
    command, sources = [compiler, *own, *_FLAGS, f"-I{FOLDER}", *options], [FOLDER / name for name in names]
    try:
        with suppress(ImportError, OSError):  # of a kept file that is damaged, or was made for another C library
            return load(_built(command, sources))
        return load(_built(command, sources, anew=True))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("%s could not be built (%s): %s go without", " and ".join(map(str, names)), error, users)
        return None


def _built(command: Sequence[str], sources: Sequence[Path], *, anew: bool = False) -> Path:
    """The shared object, from an earlier start if it was kept."""
    headers = sorted({*FOLDER.rglob("*.h"), *(header for code in sources for header in code.parent.glob("*.h"))})
    texts = [code.read_text() for code in (*sources, *headers)]
    key = sha256(repr((texts, command, _processor())).encode()).hexdigest()
    name = f"{sources[0].stem}-{key[:32]}.so"
    if not anew and (found := find_code(name)):
        return found
    with TemporaryDirectory(prefix="dpiframe-") as folder:
        made = Path(folder) / "made.so"
        whole = [*command, *map(str, sources), "-o", str(made)]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=_BUILD_S, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"{command[0]} failed"]
            raise RuntimeError(next((line for line in said if "error:" in line), said[0]))  # not where a header is included
        return store_code(name, made.read_bytes())


def _processor() -> str:
    """What -march=native depends on."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join(line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features", "CPU part"))
    return platform.processor()
