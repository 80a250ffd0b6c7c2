"""One copy of rows for all processes of a host: who fills it, who waits, what is left when processes end or are killed."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.runtime import host_memory
from kernels.runtime.host_memory import PrivateMemory, SharedMemory, lock_pages

SIZE = 3 << 20


def files(folder):
    return sorted(p.name for p in folder.iterdir())


def filled(folder, value=7, name="tables"):
    memory = SharedMemory.claim(folder, name, SIZE)
    assert memory.fresh
    memory.bytes.fill_(value)
    memory.publish()
    return memory


def other_process(folder, code):
    """A process that has claimed the memory as `m` and runs `code`; what it prints is its answer."""
    start = f"import sys, time\nfrom pathlib import Path\nfrom kernels.runtime.host_memory import SharedMemory\n" \
            f"m = SharedMemory.claim(Path({str(folder)!r}), 'tables', {SIZE})\n"  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", start + code], stdout=subprocess.PIPE, text=True)


def test_who_comes_second_reads_what_the_first_one_filled_and_the_last_one_removes_it(tmp_path):
    first = filled(tmp_path)
    other = other_process(tmp_path, "print(m.fresh, int(m.bytes.sum()))\nm.close()")
    assert other.communicate(timeout=60)[0].split() == ["False", str(7 * SIZE)]
    assert len(files(tmp_path)) == 1
    second = SharedMemory.claim(tmp_path, "tables", SIZE)
    first.close()
    assert len(files(tmp_path)) == 1
    assert int(second.bytes[SIZE - 1]) == 7
    second.close()
    assert files(tmp_path) == []


def test_who_comes_while_another_fills_has_the_memory_and_waits_for_the_rows(tmp_path):
    first = SharedMemory.claim(tmp_path, "tables", SIZE)
    other = other_process(
        tmp_path, "print(m.fresh, flush=True)\nprint(m.filled(), int(m.bytes[5]), time.monotonic())\nm.close()"
    )
    assert other.stdout.readline() == "False\n"
    time.sleep(1)
    first.bytes.fill_(9)
    published = time.monotonic()
    first.publish()
    filled_, value, at = other.communicate(timeout=60)[0].split()
    assert (filled_, value) == ("True", "9")
    assert float(at) > published
    assert first.filled()
    first.close()


@pytest.mark.parametrize("waits", [False, True])
def test_who_had_the_memory_before_it_was_filled_keeps_it_when_who_filled_it_leaves(tmp_path, waits):
    first, second = (SharedMemory.claim(tmp_path, "tables", SIZE) for _ in range(2))
    assert (first.fresh, second.fresh) == (True, False)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(second.filled) if waits else None
        first.bytes.fill_(9)
        first.publish()
        assert waiting.result(60) if waiting else second.filled()
    first.close()
    third = SharedMemory.claim(tmp_path, "tables", SIZE)
    assert (third.fresh, third.filled(), int(third.bytes[5])) == (False, True, 9)
    second.close()
    assert len(files(tmp_path)) == 1
    third.close()
    assert files(tmp_path) == []


def test_who_waits_is_told_at_once_that_who_fills_it_gave_up_though_it_has_views_of_it_still(tmp_path):
    first, second = (SharedMemory.claim(tmp_path, "tables", SIZE) for _ in range(2))
    view = first.bytes[5:]
    first.close()
    with ThreadPoolExecutor(1) as thread:
        assert not thread.submit(second.filled).result(60)
    second.close()
    assert len(view) == SIZE - 5
    assert files(tmp_path) == []


def test_who_waits_for_rows_of_a_process_that_dies_is_told_and_the_next_claim_fills_them(tmp_path):
    other = other_process(tmp_path, "m.bytes.fill_(3)\nprint('in', flush=True)\ntime.sleep(60)")
    assert other.stdout.readline() == "in\n"
    memory = SharedMemory.claim(tmp_path, "tables", SIZE)
    assert not memory.fresh
    Timer(0.5, other.kill).start()
    assert not memory.filled()
    memory.close()
    other.wait()
    other.stdout.close()
    filled(tmp_path).close()
    assert files(tmp_path) == []


@pytest.mark.parametrize("published", [False, True])
def test_what_a_killed_process_left_is_filled_anew_or_removed(tmp_path, published):
    code = ("m.bytes.fill_(3)\nm.publish()\n" if published else "") + "print('in', flush=True)\ntime.sleep(60)"
    other = other_process(tmp_path, code)
    assert other.stdout.readline() == "in\n"
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    assert len(files(tmp_path)) == 1
    with SharedMemory.claim(tmp_path, "others", 100) as memory:
        assert files(tmp_path) == [memory._path.name]
    with filled(tmp_path) as memory:
        assert int(memory.bytes[0]) == 7


def test_another_size_or_name_is_other_memory(tmp_path):
    with filled(tmp_path) as one, filled(tmp_path, 8, "more") as other, SharedMemory.claim(tmp_path, "tables", 10) as small:
        assert (int(one.bytes[1]), int(other.bytes[1]), small.fresh, len(small.bytes)) == (7, 8, True, 10)
        assert len(files(tmp_path)) == 3
    assert files(tmp_path) == []


def test_files_of_others_or_open_to_others_are_not_read(tmp_path):
    filled(tmp_path).close()
    (tmp_path / f"dpiframe-tables-{SIZE}.rows").write_bytes(b"dpiframe rows 1\n" + bytes(SIZE + 4080))
    (tmp_path / f"dpiframe-tables-{SIZE}.rows").chmod(0o666)
    other = os.open(tmp_path / f"dpiframe-tables-{SIZE}.rows", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_SH)  # so that it is not removed as one that was left
    with pytest.raises(PermissionError, match="expected one that only this user may touch"):
        SharedMemory.claim(tmp_path, "tables", SIZE)
    os.close(other)


def test_a_folder_without_room_says_so_and_keeps_nothing(tmp_path):
    with pytest.raises(OSError, match=r"No space left|File too large|Invalid argument"):
        SharedMemory.claim(tmp_path, "tables", 1 << 62)
    assert files(tmp_path) == []


def test_who_waits_for_memory_and_is_interrupted_leaves_it_to_who_has_it(tmp_path, monkeypatch):
    path = tmp_path / f"dpiframe-tables-{SIZE}.rows"
    other = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(other, fcntl.LOCK_EX)  # who takes the memory from the host
    monkeypatch.setattr(host_memory.time, "sleep", lambda s: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        SharedMemory.claim(tmp_path, "tables", SIZE)
    assert files(tmp_path) == [path.name]
    os.close(other)


def test_memory_of_ones_own_is_fresh_until_published():
    memory = PrivateMemory(100)
    assert (memory.fresh, memory.bytes.dtype, len(memory.bytes)) == (True, torch.uint8, 100)
    memory.publish()
    assert not memory.fresh
    memory.close()


class CudaError(RuntimeError):
    pass


class Runtime:
    """CUDA's, which may refuse; and its devices, of which one may have failed."""

    CUDARuntimeError = CudaError

    def __init__(self, monkeypatch, *, refuses=(), failed=None):
        self.said, self.refuses, self.failed = [], refuses, failed
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=self, Device=self.device)))

    @contextmanager
    def device(self, index):
        if index == self.failed:
            raise CudaError("device")
        self.said.append(("device", index))
        yield

    def _call(self, *what):
        self.said.append(what)
        if what[0] in self.refuses:
            raise CudaError(what[0])

    def hostRegister(self, at, size, flags):  # noqa: N802
        self._call("register", at, size, flags)

    def hostUnregister(self, at):  # noqa: N802
        self._call("unregister", at)


@pytest.mark.parametrize("refuses", [(), ("unregister",)])
def test_memory_is_locked_as_long_as_somebody_has_a_view_of_it(monkeypatch, refuses):
    runtime = Runtime(monkeypatch, refuses=refuses)
    memory = np.frombuffer(bytearray(4096), np.uint8)
    at = memory.ctypes.data
    assert lock_pages(memory, torch.device("cuda", 1))
    assert runtime.said == [("device", 1), ("register", at, 4096, 1 | 2)]  # portable, mapped
    runtime.said.clear()
    view = memory[8:][:5].view(np.int8)
    del memory
    gc.collect()
    assert runtime.said == []
    del view
    gc.collect()
    assert runtime.said == [("device", 1), ("unregister", at)]


@pytest.mark.parametrize("given", [{"refuses": ("register",)}, {"failed": 0}])
def test_memory_that_cannot_be_locked_is_left_as_it_is(monkeypatch, given):
    runtime = Runtime(monkeypatch, **given)
    memory = np.zeros(4096, np.uint8)
    assert not lock_pages(memory, torch.device("cuda"))
    del memory
    gc.collect()
    assert "unregister" not in [what for what, *_ in runtime.said]
