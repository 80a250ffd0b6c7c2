"""What kernels are compiled from, and how."""

import ctypes
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event, Timer
from time import sleep
from types import SimpleNamespace

import pytest

from kernels.runtime import source
from kernels.runtime.source import KernelSource, UnknownGpu, compile_options, compiled, loaded, loading


def test_a_header_that_changes_changes_the_text_by_which_kernels_are_kept(tmp_path, monkeypatch):
    """Else an upgrade in place would go on running kernels of the old header."""
    before = source.source("waves/wave")
    assert before.startswith((source.FOLDER / "waves/wave.cu").read_text())
    shutil.copytree(source.FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    assert source.source("waves/wave") == before
    header = tmp_path / "waves/epilogue.cuh"
    header.write_text(header.read_text().replace("MAX_LOGITS 3", "MAX_LOGITS 4"))
    source._headers.cache_clear()  # as of another start
    assert source.source("waves/wave") != before


def named(name: str) -> KernelSource:
    return KernelSource.of("test/of-this-file", name, {"B": "2", "A": "1"}, None)


class Compiler:
    """In the place of NVRTC: notes what it began with, and ends when it is let."""

    def __init__(self, monkeypatch) -> None:
        self.begun: list[str] = []
        self.may_end = Event()
        monkeypatch.setattr(source, "_kernel", self.compile)
        monkeypatch.setattr(source, "usable_cores", lambda: 3)  # two threads

    def compile(self, wanted: KernelSource) -> SimpleNamespace:
        self.begun.append(wanted.name)
        if wanted.name == "bad":
            raise RuntimeError("bad.cu: expected a ;")
        if wanted.name != "free":
            assert self.may_end.wait(30)
        return SimpleNamespace(max_dynamic_shared_size_bytes=1024)


def test_the_same_constants_in_any_order_are_one_kernel():
    assert named("f") == KernelSource("test/of-this-file", "f", (("A", "1"), ("B", "2")), 0)


def test_kernels_are_compiled_once_in_order_beside_what_is_done_meanwhile(monkeypatch):
    compiler = Compiler(monkeypatch)
    with loading(map(named, ("first", "free", "first", "last"))):
        loaded(named("free"))  # which waits for no other
        compiler.may_end.set()
    assert set(compiler.begun) == {"first", "free", "last"}
    assert compiler.begun.count("first") == compiler.begun.count("last") == 1
    assert compiler.begun.index("last") > compiler.begun.index("first")


def test_a_kernel_that_does_not_compile_is_told_in_the_end(monkeypatch):
    Compiler(monkeypatch).may_end.set()
    with pytest.raises(RuntimeError, match=r"bad.cu: expected a ;"), loading(map(named, ("bad", "last"))):
        pass


def test_what_fails_meanwhile_leaves_what_has_not_begun(monkeypatch):
    compiler = Compiler(monkeypatch)
    Timer(0.1, compiler.may_end.set).start()
    with pytest.raises(ZeroDivisionError), loading(map(named, "abcdefgh")):
        assert 1 / 0
    assert len(compiler.begun) < 8


def test_shared_memory_is_granted_as_the_most_that_was_asked_for(monkeypatch):
    compiler = Compiler(monkeypatch)
    compiler.may_end.set()
    function = compiler.compile(named("f"))
    monkeypatch.setattr(source, "_kernel", lambda _: function)
    assert [loaded(named("f"), b).max_dynamic_shared_size_bytes for b in (512, 4096, 2048)] == [1024, 4096, 4096]


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    """As CuPy would have loaded it."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    _, major, _ = bindings.nvrtcVersion()
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def for_gpu(constants: dict[str, str], architecture: str = "sm_90") -> tuple[str, ...]:
    return *compile_options(constants), f"-arch={architecture}"


def test_nvrtc_makes_machine_code_without_a_gpu(nvrtc):
    code, options = source.source("dense/head"), for_gpu({"X": "bf16", "TASKS": "1"})
    made = compiled(nvrtc, "dense/head", code, options)
    assert made.startswith(b"\x7fELF")
    assert b"head" in made
    assert made == compiled(nvrtc, "dense/head", code, options)
    assert made != compiled(nvrtc, "dense/head", code, for_gpu({"X": "float", "TASKS": "1"}))


def test_what_does_not_compile_is_told_in_nvrtcs_words(nvrtc):
    with pytest.raises(RuntimeError, match=r'dense/bad.cu: NVRTC gave 6: (?s:.*)identifier "nothing" is undefined'):
        compiled(nvrtc, "dense/bad", 'extern "C" __global__ void f(int* p) { *p = nothing; }', for_gpu({}))
    with pytest.raises(RuntimeError, match=r"dense/f.cu: NVRTC gave 5: .*--no-such-option"):
        compiled(nvrtc, "dense/f", "", ("--no-such-option",))


def test_a_gpu_that_nvrtc_does_not_know_is_told_apart(nvrtc):
    with pytest.raises(UnknownGpu, match="gpu-architecture"):
        compiled(nvrtc, "dense/f", 'extern "C" __global__ void f() {}', for_gpu({}, "sm_999"))


def test_what_a_compiler_says_of_itself_is_its_build(nvrtc):
    assert "Compiler Build ID" in source._compiler.__wrapped__(nvrtc)


@pytest.fixture
def cupy(monkeypatch, tmp_path, nvrtc):
    """What of CuPy is asked for: it has no GPU here. `modules` are those that were made, by what they were made of."""
    modules: list[dict[str, object]] = []

    def raw_module(**made: object) -> SimpleNamespace:
        modules.append(made)
        return SimpleNamespace(compile=lambda: made.update(compiled=True), get_function=lambda name: name)

    @contextmanager
    def device(_):
        yield

    def on(number: int) -> object:
        here = device(number)
        here.compute_capability = fake.capability
        return here

    fake = SimpleNamespace(cuda=SimpleNamespace(Device=on), RawModule=raw_module, modules=modules, capability="90", build="1")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(source, "_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(source, "_compiler", lambda _: fake.build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return fake


HEAD = "dense/head", (("TASKS", "1"), ("X", "float"))


def test_modules_are_made_of_machine_code_that_the_next_start_finds(cupy, monkeypatch):
    source._module.__wrapped__(*HEAD, 0)
    monkeypatch.setattr(source, "compiled", None)  # nothing is compiled again
    source._module.__wrapped__(*HEAD, 0)
    first, second = cupy.modules
    assert first == second
    assert Path(str(first["path"])).read_bytes().startswith(b"\x7fELF")


def test_what_differs_in_anything_is_kept_apart(cupy, monkeypatch):
    monkeypatch.setattr(source, "compiled", lambda *_: b"code")
    of = source._module.__wrapped__
    of(*HEAD, 0)
    of("dense/head", (("TASKS", "2"), ("X", "float")), 0)
    of("dense/linear", HEAD[1], 0)
    cupy.capability = "100"
    of(*HEAD, 0)
    cupy.build = "2"
    of(*HEAD, 0)
    assert len({made["path"] for made in cupy.modules}) == 5


def test_a_file_of_one_architecture_is_compiled_for_that_one_and_others_as_cupy_does(cupy, monkeypatch):
    asked = []
    monkeypatch.setattr(source, "compiled", lambda nvrtc, file, code, options: asked.append(options) or b"code")
    source._module.__wrapped__("waves/wave_wgmma", (), 0)
    source._module.__wrapped__("waves/wave", (), 0)
    assert asked[0] == (*compile_options({}), "-arch=sm_90a")
    assert asked[1] == (*compile_options({}), "-ftz=true", "-arch=sm_90", "--device-as-default-execution-space")


def test_cupy_compiles_for_a_gpu_that_is_newer_than_nvrtc(cupy):
    cupy.capability = "999"
    source._module.__wrapped__(*HEAD, 0)
    (made,) = cupy.modules
    assert made["code"] == source.source("dense/head")
    assert made["compiled"]
    with pytest.raises(RuntimeError, match=r"dense/nothing"):
        source._cubin("dense/nothing", "nothing;", for_gpu({}))


def test_a_kernel_that_many_ask_for_at_once_is_made_once(cupy, monkeypatch):
    begun, together = [], Barrier(8)

    def compiling(nvrtc, file, code, options):
        begun.append(file)
        sleep(0.05)
        return b"code"

    def ask(_):
        together.wait()
        return loaded(KernelSource.of("dense/head", "head", {"X": "of-this-test", "TASKS": "1"}, 0))

    monkeypatch.setattr(source, "compiled", compiling)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(8))) == {"head"}
    assert begun == ["dense/head"]
