"""Rows staged behind a launch against a CUDA that is none: what a device would see, when, and what is left after errors."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.id_record import IdRecord
from kernels.runtime import c_build
from kernels.runtime.replay import replay_batches

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")
LAYOUT = BlockLayout(IdRecord((4, 2)), IdRecord((4, 2, 1)), 1, 2)
CANDIDATES = BlockLayout(IdRecord(), IdRecord((4,)), 0, 1)
WIDE = BlockLayout(IdRecord((4,) * 16), IdRecord((4,)), 1, 0)
# A launch starts a thread that watches the header as the device would, and compares what is told to be there with what should.
DRIVER = """
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
int launches, launch_code, at_launch, waits, told[100000], count, wrong;
int64_t row[6], context[6];  // bytes of each section, and where it lies
const uint8_t *got, *want;
static int started;
static pthread_t watcher;
static int missing(int64_t rows) {
    int found = 0;
    for (int i = 0; i < 6; i += 2) found += memcmp(got + row[i], want + row[i], rows * row[i + 1]) != 0;
    const int32_t contexts = rows ? ((const int32_t *)want)[11] : 0;  // all are there before any row
    for (int i = 0; i < 4; i += 2) found += memcmp(got + context[i], want + context[i], contexts * context[i + 1]) != 0;
    return found;
}
static void *watch(void *unused) {
    const int32_t *word = (const int32_t *)(got + 40);
    __atomic_store_n(&started, 1, __ATOMIC_RELEASE);
    for (int before = -1;;) {
        const int now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (now != before) wrong += missing(now < 0 ? -1 - now : now), told[count++] = now;
        if (now >= 0) return unused;
        before = now;
    }
}
const char *cudaGetErrorString(int code) { return code == 700 ? "an illegal memory access" : "unknown"; }
int cudaGraphLaunch(void *exec, void *stream) {
    launches++, at_launch = *(const int32_t *)(got + 40);
    if (launch_code) return launch_code;
    started = 0;
    if (pthread_create(&watcher, 0, watch, 0)) return 1;
    while (!__atomic_load_n(&started, __ATOMIC_ACQUIRE)) sched_yield();
    return 0;
}
int cudaStreamSynchronize(void *stream) {
    waits++;
    return pthread_join(watcher, 0);
}
"""


IDLE = """
int cudaGraphLaunch(void *exec, void *stream) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
const char *cudaGetErrorString(int code) { return "none"; }
"""


# The launch ends when the last byte of the rows' ids is there, or after a second.
SLOW = """
#include <unistd.h>
const volatile unsigned char *last;
int came;
const char *cudaGetErrorString(int code) { return "none"; }
int cudaGraphLaunch(void *exec, void *stream) {
    for (int i = 0; i < 1000 && !(came = *last == 1); ++i) usleep(1000);
    return 0;
}
int cudaStreamSynchronize(void *stream) { return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", folder / "driver.so", folder / "driver.c"], check=True)
    return ctypes.CDLL(str(folder / "driver.so"))


def batches(library, where, graphs=((64, 1, False, 0, ()),), *, done=None, beside=(None, 0), threads=0, layout=LAYOUT):
    """A lane's function of batches. Its scores are the rows' numbers."""
    rows = graphs[-1][0] or 1
    scores = np.arange(rows, dtype=np.float32)[:, None]
    return replay_batches(graphs, 2, done, where, beside, layout, scores, BatchResult, threads=threads, cuda=library)


def block_of(rows, contexts, seed):
    rng = np.random.default_rng(seed)
    block = RowBlock.allocate(LAYOUT, rows, contexts)
    block.buffer[64:] = rng.integers(0, 256, block.buffer.size - 64)
    block.request_of_row[:] = np.sort(rng.integers(0, contexts, rows))
    return block


class Staged:
    """A lane's memory of `capacity` rows and contexts, poisoned and told to be final; what it should hold for some blocks."""

    def __init__(self, library, blocks, bucket, capacity, ahead=True, carries=True):
        self.carries, self.library, self.bucket, self.blocks, self.ahead = carries, library, bucket, blocks, ahead
        self.stage, self.want = (RowBlock.over(np.full(LAYOUT.offsets(capacity, capacity)[-1], 0xA5, np.uint8), LAYOUT,
                                               capacity, capacity) for _ in range(2))  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c_build, "request_extension", lambda: None)
            rows = self.want.fill(blocks)
        self.want.request_of_row[rows:bucket] = -1
        self.stage.header[HeaderWord.STAGED_ROWS], self.want.header[HeaderWord.STAGED_ROWS] = 7, rows
        self.want.header[HeaderWord.STAGED_CONTEXTS] = sum(b.contexts for b in blocks)
        # Beside each row four of its context's six bytes of ids, and its number.
        self.beside, self.want_beside = (np.full((capacity, 8), 0xA5, np.uint8) for _ in range(2))
        of_row = self.want.request_of_row[:rows]
        self.want_beside[:rows, :4] = self.want.context_ids[of_row, :4]
        self.want_beside[:rows, 4:] = self.want.context_dense.view(np.uint8)[of_row]
        at = self.stage.places
        rows_at = at[0], 4, at[2], LAYOUT.candidate_ids.nbytes, at[4], 4 * LAYOUT.candidate_dense
        contexts_at = at[1], LAYOUT.context_ids.nbytes, at[3], 4 * LAYOUT.context_dense
        for name, numbers in (("row", rows_at), ("context", contexts_at)):
            (ctypes.c_int64 * 6).in_dll(library, name)[: len(numbers)] = numbers
        for name, block in (("got", self.stage), ("want", self.want)):
            ctypes.c_void_p.in_dll(library, name).value = block.buffer.ctypes.data
        for name in ("launches", "launch_code", "at_launch", "waits", "count", "wrong"):
            self[name] = 0

    def __getitem__(self, name):
        return ctypes.c_int.in_dll(self.library, name).value

    def __setitem__(self, name, value):
        ctypes.c_int.in_dll(self.library, name).value = value

    @property
    def told(self):
        return list((ctypes.c_int * 100000).in_dll(self.library, "told"))[: self["count"]]

    def run(self, done=None, threads=0):
        where = self.stage.buffer, self.stage.places, LAYOUT.sections
        beside = (self.beside, 4) if self.carries else (None, 0)
        graphs = [(self.bucket, 1, self.ahead, 0, ())]
        return batches(self.library, where, graphs, done=done, beside=beside, threads=threads)(self.blocks, False)

    def check(self):
        at_launch = -1 if self.ahead else sum(b.rows for b in self.blocks)
        assert (self["launches"], self["at_launch"], self["wrong"]) == (1, at_launch, 0)
        assert self.stage.buffer.tobytes() == self.want.buffer.tobytes()
        assert not self.carries or self.beside.tobytes() == self.want_beside.tobytes()


SIZES = st.tuples(st.sampled_from([0, 1, 2, 19, 255, 256, 257]), st.integers(1, 5), st.integers(0, 2**32), st.booleans())


@given(st.lists(SIZES, max_size=6), st.integers(0, 300), st.integers(0, 10), st.booleans())
def test_what_is_staged_for_a_launch_is_what_fill_stages_and_no_row_is_told_of_too_soon(library, sizes, more, room, ahead):
    blocks = []
    for rows, contexts, seed, window in sizes:
        block = block_of(rows, contexts, seed)
        blocks.append(block.window(seed % rows // 2, rows) if window and rows > 1 else block)
    rows = sum(b.rows for b in blocks)
    bucket = max(rows, sum(b.contexts for b in blocks)) + more
    assume(rows)
    staged = Staged(library, blocks, bucket, bucket + room, ahead)
    staged.run()
    staged.check()
    *before, last = staged.told
    assert last == rows
    assert all(n == -1 or -n % 256 == 1 for n in before)
    assert before == sorted(before, reverse=True)


def test_a_device_sees_the_rows_come(library):
    """Here a thread, which may not get a core in time: one run in which it did is enough."""
    blocks = [block_of(100_000, 3, 1), block_of(300, 300, 2)]
    for _ in range(100):
        staged = Staged(library, blocks, 100_480, 100_480)
        staged.run()
        staged.check()
        if len(set(staged.told)) > 4:
            return
    pytest.fail(f"told: got {staged.told}, expected some numbers between")


LARGE = st.tuples(st.sampled_from([0, 1, 63, 4_000, 9_000]), st.integers(1, 5), st.integers(0, 2**32), st.booleans())


@settings(max_examples=40, deadline=None)
@given(st.lists(LARGE, min_size=1, max_size=8), st.integers(1, 9), st.booleans())
def test_several_threads_stage_a_large_batch_and_tell_of_no_row_too_soon(library, sizes, threads, ahead):
    blocks = [block_of(17_000, 2, 7)]  # 16 bytes a row: more than one thread copies alone
    for rows, contexts, seed, window in sizes:
        block = block_of(rows, contexts, seed)
        blocks.append(block.window(seed % rows // 2, rows) if window and rows > 1 else block)
    rows = sum(b.rows for b in blocks)
    staged = Staged(library, blocks, rows + 3, rows + 40, ahead)
    staged.run(threads=threads)
    staged.check()
    assert staged.told[-1] == rows
    assert staged.told[:-1] == sorted(staged.told[:-1], reverse=True)


@pytest.mark.parametrize(("threads", "came"), [(1, 1), (0, 0)])
def test_threads_that_help_begin_while_the_graph_is_launched(tmp_path, threads, came):
    (tmp_path / "slow.c").write_text(SLOW)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "slow.so", tmp_path / "slow.c"], check=True)
    cuda, block, own = ctypes.CDLL(str(tmp_path / "slow.so")), block_of(20_000, 1, 1), RowBlock.allocate(LAYOUT, 20_000)
    block.candidate_ids[:] = 1
    ctypes.c_void_p.in_dll(cuda, "last").value = own.buffer.ctypes.data + own.places[2] + own.candidate_ids.size - 1
    where = own.buffer, own.places, LAYOUT.sections
    batches(cuda, where, [(20_000, 1, True, 0, ())], threads=threads)([block], False)
    assert ctypes.c_int.in_dll(cuda, "came").value == came
    assert (own.candidate_ids == 1).all()


def test_large_batches_of_several_lanes_are_staged_at_once(tmp_path):
    """They share the threads that help; each is whole when its own call returns."""
    (tmp_path / "idle.c").write_text(IDLE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "idle.so", tmp_path / "idle.c"], check=True)
    cuda, rows = ctypes.CDLL(str(tmp_path / "idle.so")), 20_000
    blocks = [[block_of(rows - i, 2, i), block_of(i, 3, 50 + i)] for i in (5, 70, 900, 3_000)]
    stages = [RowBlock.allocate(LAYOUT, rows, 5) for _ in blocks]
    wanted = [RowBlock.allocate(LAYOUT, rows, 5) for _ in blocks]
    for own, block in zip(wanted, blocks, strict=True):
        own.buffer[64:] = 0xA5
        own.header[HeaderWord.STAGED_ROWS] = own.fill(block)
        own.header[HeaderWord.STAGED_CONTEXTS] = sum(b.contexts for b in block)

    def stage(own, block):
        run = batches(cuda, (own.buffer, own.places, LAYOUT.sections), [(rows, 1, False, 0, ())], threads=3)
        for _ in range(10):
            own.buffer[64:] = 0xA5
            run(block, False)
            assert own.buffer.tobytes() == want_of[id(own)].buffer.tobytes()

    want_of = {id(own): want for own, want in zip(stages, wanted, strict=True)}
    with ThreadPoolExecutor(len(blocks)) as lanes:
        list(lanes.map(stage, stages, blocks))


def test_words_that_the_device_writes_are_waited_for_as_ever(library):
    staged = Staged(library, [block_of(20, 1, 0)], 64, 64)
    staged.run(np.zeros(8, np.int32))  # which nobody writes, so that the driver's wait ends it
    staged.check()
    assert staged["waits"] == 1


def test_a_launch_that_is_refused_is_raised_and_leaves_the_rows_staged(library):
    staged = Staged(library, [block_of(300, 2, 0), block_of(5, 5, 1)], 512, 512)
    staged["launch_code"] = 700
    with pytest.raises(RuntimeError, match="graph replay: got CUDA error 700: an illegal memory access"):
        staged.run()
    staged.check()
    assert staged["waits"] == 0
    again = Staged(library, staged.blocks, 512, 512)
    again.run()
    again.check()


def cut(block):
    return SimpleNamespace(rows=9, contexts=1, base=0, buffer=block.buffer[:-64], places=block.places, layout=LAYOUT)


GOOD = block_of(9, 1, 0)
STRAY = block_of(9, 2, 0)
STRAY.request_of_row[[0, 1]] = 1, -1
FAULTS = {
    "no block": (AttributeError, "no attribute 'layout'", {"blocks": [GOOD, None]}),
    "no blocks": (TypeError, "not iterable", {"blocks": None}),
    "a block that ends too soon": (ValueError, "expected some of", {"blocks": [GOOD, cut(GOOD)]}),
    "more rows than the largest bucket": (
        ValueError,
        "batch: got 9 rows of 1 contexts, expected 1 to 8 of each",
        {"bucket": 8},
    ),
    "no rows": (ValueError, "batch: got 0 rows of 0 contexts, expected 1 to 64", {"blocks": []}),
    "more contexts": (ValueError, "batch: got 9 rows of 70 contexts", {"blocks": [block_of(9, 70, 0)]}),
    "another layout": (ValueError, "block: got layout BlockLayout", {"blocks": [GOOD, RowBlock.allocate(WIDE, 1)]}),
    "a row of no context": (ValueError, "block: got rows of contexts -1 to 1, expected 0 to 1", {"blocks": [GOOD, STRAY]}),
    "a bucket beyond the memory": (ValueError, "expected some of", {"bucket": 4000}),
    "no bucket": (TypeError, "integer", {"bucket": None}),
    "memory at no whole words": (ValueError, "expected it at whole words", {"shift": 1}),
    "memory without a header": (ValueError, "got bytes 0 to 64, expected some of 63", {"size": 63, "blocks": []}),
    "five places": (TypeError, "expected a tuple of six offsets", {"places": GOOD.places[:5]}),
    "a section that is none": (ValueError, "expected 1 to 4", {"sections": ((5, 8),)}),
    "more words than there are": (ValueError, "words: got 2, expected 1 to 1", {"words": 1}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_a_batch_is_refused_before_the_launch(library, fault):
    """The header stays as it was, as a lookup that it left waiting would wait for ever; and no reference is kept."""
    error, message, change = FAULTS[fault]
    staged = Staged(library, [GOOD], 64, 64)
    done, memory = np.zeros(change.get("words", 8), np.int32), staged.stage.buffer
    shift, size = change.get("shift", 0), change.get("size", memory.size)
    where = memory[shift:size], change.get("places", staged.stage.places), change.get("sections", LAYOUT.sections)
    before = memory.tobytes()
    graphs = [(change.get("bucket", 64), 1, True, 0, ())]

    def call():
        with pytest.raises(error, match=message):
            batches(library, where, graphs, done=done)(change.get("blocks", [GOOD]), False)

    call()
    held = [GOOD, GOOD.buffer, GOOD.places, STRAY, STRAY.buffer, LAYOUT, *where]
    counts = [sys.getrefcount(each) for each in held]
    for _ in range(20):
        call()
    assert [sys.getrefcount(each) for each in held] == counts
    assert memory.tobytes() == before
    assert staged["launches"] == 0


def test_a_function_of_batches_takes_blocks_and_whether_they_are_copied(library):
    run = batches(library, (GOOD.buffer, GOOD.places, LAYOUT.sections))
    with pytest.raises(TypeError, match="arguments: got 1, expected 2"):
        run([GOOD])
    assert sys.getrefcount(run) == 2


def test_the_memory_is_held_as_long_as_the_function(library):
    memories = bytearray(GOOD.buffer.size), bytearray(64)
    where = memories[0], GOOD.places, LAYOUT.sections
    run = batches(library, where, beside=(memories[1], 4))
    for memory in memories:
        with pytest.raises(BufferError):
            memory.clear()
    del run
    for memory in memories:
        memory.clear()


def test_staging_keeps_no_reference_to_what_it_read(library):
    staged = Staged(library, [GOOD] * 3, 64, 64)
    held = [GOOD, GOOD.buffer, GOOD.places, staged.stage.buffer, staged.stage.places, staged.blocks]
    before = [sys.getrefcount(each) for each in held]
    for _ in range(20):
        staged.run()
    assert [sys.getrefcount(each) for each in held] == before


def test_what_is_no_replay_is_refused():
    replay_batches = c_build.request_extension().replay_batches
    with pytest.raises(ValueError, match="replay: got 3 bytes, expected 48"):
        replay_batches(
            b"abc", 1, ((64, 1, True, 0, ()),), 0, bytearray(64), GOOD.places, (), None, 0, LAYOUT, [], BatchResult, bytes(32)
        )
    with pytest.raises(TypeError, match="arguments: got 2, expected 13"):
        replay_batches(bytes(48), 1)
    for driver in (bytes(15), None):
        with pytest.raises(TypeError, match="driver: expected the bytes of three functions and a context"):
            replay_batches(
                bytes(48),
                1,
                ((64, 1, True, 0, ()),),
                0,
                bytearray(64),
                GOOD.places,
                (),
                None,
                0,
                LAYOUT,
                [],
                BatchResult,
                driver,
            )


@pytest.mark.parametrize(("prefix", "layout"), [(12, LAYOUT), (2, LAYOUT), (0, CANDIDATES), (64, WIDE)])
def test_what_rows_cannot_carry_is_refused(library, prefix, layout):
    """More than a context's ids, no whole words, nothing, and more than rows carry."""
    block = RowBlock.allocate(layout, 2)
    where = block.buffer, block.places, layout.sections
    with pytest.raises(ValueError, match=f"carried: got {prefix} bytes of ids"):
        batches(library, where, beside=(bytearray(64), prefix), layout=layout)


def test_rows_of_no_context_are_refused(library):
    staged = Staged(library, [RowBlock.allocate(LAYOUT, 2, 0)], 8, 8)
    with pytest.raises(ValueError, match="block: got rows of contexts 0 to 0, expected 0 to -1"):
        staged.run()


def test_more_rows_than_there_is_room_beside_are_refused(library):
    staged = Staged(library, [block_of(5, 2, 1)], 8, 8)
    staged.beside = staged.beside[:4].copy()
    with pytest.raises(ValueError, match="block: got bytes 0 to 40, expected some of 32"):
        staged.run()
    assert staged["launches"] == 0


def test_without_c_there_is_none(monkeypatch):
    monkeypatch.setattr(c_build, "request_extension", lambda: None)
    assert batches(None, (GOOD.buffer, GOOD.places, ())) is None


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=70), st.integers(0, 7))
def test_the_range_of_contexts_is_that_of_the_words_wherever_they_lie(words, at):
    functions = c_build.request_extension()
    buffer = np.zeros(at + 4 * len(words), np.uint8)
    buffer[at:] = np.frombuffer(np.array(words, np.int32).tobytes(), np.uint8)
    assert functions.context_range(buffer, at, len(words)) == (min(words), max(words))
    for wrong in ((at, len(words) + 1), (at + 1, len(words)), (at, 0), (-1, 1), (at, -1)):
        with pytest.raises(ValueError, match=r"got .*, expected"):
            functions.context_range(buffer, *wrong)
    for wrong in ((), (buffer, at), (words, at, 1), (buffer, at, "1")):
        with pytest.raises(TypeError):
            functions.context_range(*wrong)
