"""What kernels are compiled from."""

import shutil
from threading import Event, Timer
from types import SimpleNamespace

import pytest

from kernels.runtime import source
from kernels.runtime.source import KernelSource, loaded, loading


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
