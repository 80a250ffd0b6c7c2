"""What kernels are compiled from, and how."""

import shutil
import sys
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace

import pytest

from kernels.runtime import source
from kernels.runtime.source import CannotCompile, KernelSource, compile_options, compiled, loaded, loading


def test_a_header_that_changes_changes_the_text_by_which_kernels_are_kept(tmp_path, monkeypatch):
    """Else an upgrade in place would go on running kernels of the old header."""
    before = source.source("waves/wave")
    assert before.startswith((source.FOLDER / "waves/wave.cu").read_text())
    shutil.copytree(source.FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    assert source.source("waves/wave") == before
    header = tmp_path / "waves/epilogue.cuh"
    header.write_text(header.read_text().replace("MAX_LOGITS 3", "MAX_LOGITS 4"))
    assert source.source("waves/wave") != before


def named(name: str) -> KernelSource:
    return KernelSource.of("test/of-this-file", name, {"B": "2", "A": "1"}, None)


class Compiler:
    """In the place of NVRTC: notes what it began with, and ends when it is let."""

    def __init__(self, monkeypatch) -> None:
        self.begun: list[str] = []
        self.may_end = Event()
        monkeypatch.setattr(source, "_kernel", self.compile)
        monkeypatch.setattr(source.os, "sched_getaffinity", lambda _: range(3))  # two threads

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
    assert len(compiler.begun) == 2


def test_shared_memory_is_granted_as_the_most_that_was_asked_for(monkeypatch):
    compiler = Compiler(monkeypatch)
    compiler.may_end.set()
    function = compiler.compile(named("f"))
    monkeypatch.setattr(source, "_kernel", lambda _: function)
    assert [loaded(named("f"), b).max_dynamic_shared_size_bytes for b in (512, 4096, 2048)] == [1024, 4096, 4096]


@pytest.fixture(scope="module")
def major() -> int:
    """Of an NVRTC that is loaded, as CuPy would have it."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    _, version, _ = nvrtc.nvrtcVersion()
    return version


def for_gpu(constants: dict[str, str], architecture: str = "sm_90") -> tuple[str, ...]:
    return *compile_options(constants), f"-arch={architecture}"


def test_nvrtc_makes_machine_code_without_a_gpu(major):
    made = compiled("dense/head", source.source("dense/head"), for_gpu({"X": "bf16", "TASKS": "1"}), major)
    assert made.startswith(b"\x7fELF")
    assert b"head" in made
    assert made == compiled("dense/head", source.source("dense/head"), for_gpu({"X": "bf16", "TASKS": "1"}), major)
    assert made != compiled("dense/head", source.source("dense/head"), for_gpu({"X": "float", "TASKS": "1"}), major)


def test_what_does_not_compile_is_told_in_nvrtcs_words(major):
    with pytest.raises(RuntimeError, match=r'dense/bad.cu: (?s:.*)identifier "nothing" is undefined'):
        compiled("dense/bad", 'extern "C" __global__ void f(int* p) { *p = nothing; }', for_gpu({}), major)


def test_a_gpu_or_a_library_that_is_not_known_is_left_to_cupy(major):
    code = 'extern "C" __global__ void f() {}'
    with pytest.raises(CannotCompile, match="gpu-architecture"):
        compiled("dense/f", code, for_gpu({}, "sm_999"), major)
    with pytest.raises(CannotCompile, match=r"libnvrtc\.so\.999"):
        compiled("dense/f", code, for_gpu({}), 999)


@pytest.fixture
def cupy(monkeypatch, tmp_path, major):
    """What of CuPy is asked for: it has no GPU here. `modules` are those that were made, by what they were made of."""
    modules: list[dict[str, object]] = []

    def raw_module(**made: object) -> SimpleNamespace:
        modules.append(made)
        return SimpleNamespace(compile=lambda: made.update(compiled=True))

    libs = SimpleNamespace(nvrtc=SimpleNamespace(getVersion=lambda: (fake.major, 0)))
    devices = SimpleNamespace(Device=lambda _: SimpleNamespace(compute_capability=fake.capability))
    fake = SimpleNamespace(cuda=devices, RawModule=raw_module, modules=modules, major=major, capability="90")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
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


def test_a_file_of_one_architecture_is_compiled_for_that_one(cupy, monkeypatch):
    asked = []
    monkeypatch.setattr(source, "compiled", lambda file, code, options, _: asked.append(options) or b"code")
    source._module.__wrapped__("waves/wave_wgmma", (), 0)
    source._module.__wrapped__("waves/wave", (), 0)
    assert [options[-1] for options in asked] == ["-arch=sm_90a", "--device-as-default-execution-space"]
    assert "-arch=sm_90" in asked[1]


def test_cupy_compiles_what_cannot_be_compiled_without_it(cupy):
    cupy.capability = "999"  # a GPU that is newer than this NVRTC
    source._module.__wrapped__(*HEAD, 0)
    cupy.capability, cupy.major = "90", 999
    source._module.__wrapped__(*HEAD, 0)
    assert all(made["code"] == source.source("dense/head") and made["compiled"] for made in cupy.modules)
    assert len(cupy.modules) == 2
