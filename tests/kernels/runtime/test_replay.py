"""A graph's replay in C against a CUDA that is none: what is called, who waits, and what becomes of errors."""

import ctypes
import subprocess
import threading
import time

import numpy as np
import pytest
import torch

from kernels.runtime import c_build
from kernels.runtime.replay import replay

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")
EXEC, STREAM = 1000, 2000
DRIVER = """
#include <stddef.h>
#include <unistd.h>
int launches, waits, launch_code, wait_code, exec_seen, stream_seen, at_once, words, patient, seen;
volatile int let_go;
int done[16];
static void finish(void) { for (int i = 0, number = done[0] + 1; i < words; ++i) done[i] = number; }
const char *cudaGetErrorString(int code) { return code == 700 ? "an illegal memory access" : "unknown"; }
int cudaGraphLaunch(void *exec, void *stream) {
    launches++, exec_seen = (int)(size_t)exec, stream_seen = (int)(size_t)stream;
    if (launch_code == 0 && at_once) finish();
    return launch_code;
}
int cudaStreamSynchronize(void *stream) {
    waits++;
    for (int i = 0; patient && !let_go && i < 5000; ++i) usleep(1000);
    seen = let_go;
    if (!at_once && wait_code == 0) finish();
    return wait_code;
}
static int begun, idled;
void meanwhile(void *with) { begun += *(int *)with; }
void idle(void *with) { idled += *(int *)with; }
int idled_of(int *begun_) { *begun_ = begun; int has = idled; begun = idled = 0; return has; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "driver.so", folder / "driver.c"], check=True)
    return ctypes.CDLL(str(folder / "driver.so"))


class Fake:
    """The driver's library, its variables in reach."""

    def __init__(self, library):
        self.library = library
        self.done = np.ctypeslib.as_array((ctypes.c_int * 16).in_dll(library, "done"))
        for name in ("launches", "waits", "launch_code", "wait_code", "at_once", "words", "patient", "seen", "let_go"):
            self[name] = 0
        self.done[:] = 0

    def __getitem__(self, name):
        return ctypes.c_int.in_dll(self.library, name).value

    def __setitem__(self, name, value):
        ctypes.c_int.in_dll(self.library, name).value = value

    def replay(self, *, watched=True):
        return replay(EXEC, STREAM, self.done if watched else None, self.library)


@pytest.fixture
def fake(library):
    return Fake(library)


def test_a_replay_launches_the_graph_on_its_stream_and_returns_when_the_words_came(fake):
    fake["at_once"], fake["words"] = 1, 3
    run = fake.replay()
    for number in (1, 2, 3):
        run(3)
        assert (fake["launches"], fake["exec_seen"], fake["stream_seen"]) == (number, EXEC, STREAM)
        assert fake.done[:4].tolist() == [number] * 3 + [0]
    assert fake["waits"] == 0


def test_words_that_do_not_come_leave_the_waiting_to_the_driver(fake):
    fake["words"] = 2
    fake.replay()(2)
    assert fake["waits"] == 1
    assert fake.done[:2].tolist() == [1, 1]


def test_one_word_behind_the_others_is_waited_for(fake):
    fake["at_once"], fake["words"] = 1, 2  # the third stays behind
    fake.replay()(3)
    assert fake["waits"] == 1


def test_a_graph_without_such_words_is_waited_for_by_the_driver(fake):
    fake["at_once"] = 1
    fake.replay(watched=False)(5)
    assert (fake["launches"], fake["waits"]) == (1, 1)


@pytest.mark.parametrize(("failing", "code"), [("launch_code", "700: an illegal memory access"), ("wait_code", "719: unknown")])
def test_an_error_of_the_driver_is_raised_with_its_code(fake, failing, code):
    fake[failing] = int(code.partition(":")[0])
    with pytest.raises(RuntimeError, match=f"graph replay: got CUDA error {code}"):
        fake.replay()(1)
    fake[failing], fake["words"] = 0, 1
    fake.replay()(1)  # and the next is as good as the first


def test_threads_of_python_run_while_the_driver_waits(fake):
    fake["patient"] = 1
    thread = threading.Thread(target=lambda: fake.__setitem__("let_go", 1))
    started = threading.Timer(0.05, thread.start)  # by then the driver waits
    started.start()
    fake.replay(watched=False)(0)
    assert fake["seen"] == 1
    started.join()
    thread.join()


class Replay(ctypes.Structure):
    """module.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("launch", "synchronize", "exec", "stream", "done")),
        ("most", ctypes.c_int64),
        ("words", ctypes.c_int64),
    )


def idles(fake):
    """How often `meanwhile` and `idle` are called by a replay that looks at one word."""
    lib, begun, with_ = fake.library, ctypes.c_int(), ctypes.c_int(1)
    address = lambda name: ctypes.cast(getattr(lib, name), ctypes.c_void_p).value  # noqa: E731
    given = Replay(address("cudaGraphLaunch"), address("cudaStreamSynchronize"), 1, 2, fake.done.ctypes.data, 16, 1)
    replayed = ctypes.CDLL(c_build.request_extension().__file__).dpi_replayed
    replayed(ctypes.byref(given), lib.meanwhile, lib.idle, ctypes.byref(with_))
    idled = lib.idled_of(ctypes.byref(begun))
    return begun.value, idled


def test_a_wait_of_some_microseconds_is_idle_once(fake):
    seen, tries, end = set(), 0, time.monotonic() + 20
    while tries < 50 or ((1, 1) not in seen and time.monotonic() < end):  # some end sooner, where others want the core
        seen.add(idles(fake))
        tries += 1
    assert seen - {(1, 0)} == {(1, 1)}


def test_words_that_came_at_once_and_launches_that_fail_leave_no_time(fake):
    fake["at_once"], fake["words"] = 1, 1
    assert idles(fake) == (1, 0)
    fake["at_once"], fake["launch_code"] = 0, 700
    assert idles(fake) == (1, 0)


@pytest.mark.parametrize("words", [-1, 0, 17])
def test_as_many_words_are_looked_at_as_there_are(fake, words):
    with pytest.raises(ValueError, match=f"words: got {words}, expected 1 to 16"):
        fake.replay()(words)
    assert fake["launches"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["c", "plain"])
def test_a_captured_graph_is_replayed_and_waited_for(way, monkeypatch):
    if way == "plain":
        monkeypatch.setattr(c_build, "request_extension", lambda: None)
    x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, pin_memory=True)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        out.copy_(x, non_blocking=True)
    run = replay(graph.raw_cuda_graph_exec(), stream.cuda_stream, None)
    for number in range(2, 20):
        run(0)
        assert out.eq(number).all()
    graph.reset()
