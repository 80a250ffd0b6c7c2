"""A lane's batches run in one call of C, against a CUDA of Python functions: which graph each runs on, and what comes back."""

import ctypes
import gc
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock
from dpiframe_core.operators.workspace import done_words
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.id_record import IdRecord
from kernels.runtime import c_build
from kernels.runtime.replay import replay_batches

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")
LAYOUT = BlockLayout(IdRecord((4, 2)), IdRecord((4, 1)), 1, 2)
MOST = 64
GRAPHS = (8, 11, False, 0, ()), (16, 12, True, 0, ()), (MOST, 13, True, 23, ())


class Lane:
    """Its memory, what was launched (handles, and what the header told then), and on which streams."""

    def __init__(self, graphs=GRAPHS, done=None, launch=lambda: None, tasks=2, carries=True, **given):
        self.stage = RowBlock.allocate(LAYOUT, MOST, MOST)
        self.beside = np.zeros((MOST, LAYOUT.carried_bytes), np.uint8)
        self.scores = np.random.default_rng(0).random((MOST, tasks), np.float32)
        self.launched, self.streams, self.waits, self.launch = [], set(), 0, launch
        pointer = ctypes.c_void_p
        self.cuda = SimpleNamespace(
            cudaGraphLaunch=ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(self._launch),
            cudaStreamSynchronize=ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._wait),
            cudaGetErrorString=ctypes.CFUNCTYPE(pointer, ctypes.c_int)(lambda code: 0),
        )
        own = {"layout": LAYOUT, "scores": self.scores, "result": BatchResult, **given}
        where = self.stage.buffer, self.stage.places, LAYOUT.sections
        beside = (self.beside, LAYOUT.context_ids.prefix_bytes) if carries else (None, 0)
        self.run = replay_batches(graphs, 2, done, where, beside, **own, cuda=self.cuda)

    def _launch(self, handle, stream):
        self.streams.add(stream)
        self.launched.append((handle, int(self.stage.header[HeaderWord.STAGED_ROWS])))
        self.launch()
        return 0

    def _wait(self, stream):
        self.streams.add(stream)
        self.waits += 1
        return 0


def block_of(rows, contexts=1, seed=0):
    rng = np.random.default_rng(seed)
    block = RowBlock.allocate(LAYOUT, rows, contexts)
    block.buffer[64:] = rng.integers(0, 256, block.buffer.size - 64)
    block.request_of_row[:] = np.sort(rng.integers(0, contexts, rows))
    return block


@pytest.mark.parametrize(
    ("rows", "handle", "bucket", "ahead"),
    [((1,), 11, 8, False), ((5, 3), 11, 8, False), ((9,), 12, 16, True), ((9, 8), 13, 64, True), ((64,), 13, 64, True)],
)
def test_a_batch_runs_on_the_smallest_graph_that_holds_it(rows, handle, bucket, ahead):
    lane, count = Lane(), sum(rows)
    result = lane.run([block_of(n, seed=n) for n in rows], False)
    assert lane.launched == [(handle, -1 if ahead else count)]
    assert (lane.streams, lane.waits) == ({2}, 1)
    assert type(result) is BatchResult
    assert result.bucket == bucket
    assert 0 < result.device_ms < 60_000
    np.testing.assert_array_equal(result.scores, lane.scores[:count])
    assert result.scores.flags.owndata
    assert lane.stage.request_of_row[count : bucket + 1].tolist() == [-1] * (bucket - count) + [0] * (bucket < MOST)


@pytest.mark.parametrize(
    ("contexts", "copied", "handle", "told"),
    [(1, True, 23, 40), (64, True, 23, 40), (1, False, 13, -1)],
)
def test_rows_are_copied_first_where_that_is_wanted_and_then_staged_before_the_launch(contexts, copied, handle, told):
    lane = Lane()
    lane.run([block_of(40, contexts)], copied)
    assert lane.launched == [(handle, told)]
    lane.run([block_of(9)], copied)
    assert lane.launched[1:] == [(12, -1)]


def test_no_more_contexts_are_copied_than_rows():
    lane = Lane(((8, 11, False, 21, ()), (MOST, 13, False, 0, ())))
    for contexts, handle in ((8, 21), (9, 11)):
        lane.run([block_of(3, contexts)], True)
        assert lane.launched.pop()[0] == handle


def test_a_block_of_an_equal_layout_is_one_of_the_same():
    lane, block = Lane(), block_of(3)
    block.layout = BlockLayout(IdRecord((4, 2)), IdRecord((4, 1)), 1, 2)
    assert len(lane.run([block], False).scores) == 3


def test_rows_of_one_context_have_no_choice_and_of_none_there_is_no_batch():
    lane, block = Lane(carries=False), block_of(3)
    block.request_of_row[:] = 7, -1, 99
    assert len(lane.run([block_of(2, 2), block], False).scores) == 5
    assert lane.stage.request_of_row[2:5].tolist() == [2] * 3
    block.contexts = 0
    none = RowBlock.allocate(LAYOUT, 0, 0)
    for wrong, found in ((block, "-1 to 99"), (none, "0 to 0")):
        with pytest.raises(ValueError, match=f"block: got rows of contexts {found}, expected 0 to -1"):
            lane.run([block_of(2, 2), wrong], False)
    assert len(lane.run([block_of(2, 2), RowBlock.allocate(LAYOUT, 0, 2)], False).scores) == 2
    assert len(lane.launched) == 2


def test_what_a_comparison_of_layouts_raises_is_raised():
    class Broken:
        def __eq__(self, other):
            raise LookupError("no layout")

        __hash__ = None

    lane, block = Lane(), block_of(3)
    block.layout = Broken()
    with pytest.raises(LookupError, match="no layout"):
        lane.run([block_of(1), block], False)
    assert not lane.launched


@pytest.mark.parametrize("rows", [1, 8, 9, 64])
def test_a_call_ends_when_the_words_of_its_rows_have_come(rows):
    done, words = np.full(done_words(MOST), 6, np.uint32), done_words(rows)

    def write(count):
        done[:count] = done[0] + 1

    lane = Lane(done=done, launch=lambda: write(words))
    lane.run([block_of(rows)], False)
    assert lane.waits == 0
    lane = Lane(done=done, launch=lambda: write(words - 1))
    lane.run([block_of(rows)], False)
    assert lane.waits == 1


def test_a_row_whose_context_somebody_changes_meanwhile_is_of_the_blocks_first_one():
    """Blocks lie in memory that another process may write to."""
    block = block_of(12, 2)
    for wild in ((0, 99, -7), (0, 2**31 - 1, -(2**31))):
        block.request_of_row[:] = 0
        lane = Lane(launch=partial(block.request_of_row.__setitem__, slice(3), wild))
        lane.run([block_of(3, 3), block], False)
        prefix = LAYOUT.context_ids.prefix_bytes
        assert (lane.beside[3:6, :prefix] == block.context_ids[0, :prefix]).all()
        assert lane.stage.request_of_row[3:6].tolist() == [3] * 3


def test_nothing_that_a_lane_runs_with_is_kept():
    block = block_of(3)
    lane = Lane()
    lane.run((block,), False)  # whose scores' view stays
    held = [block, block.layout, lane.scores, lane.stage.buffer, BatchResult, GRAPHS]
    gc.collect()
    before = [sys.getrefcount(each) for each in held]
    for _ in range(20):
        lane.run((block,), False)
        Lane(scores=lane.scores)
    gc.collect()
    assert [sys.getrefcount(each) for each in held] == before


def test_a_call_takes_no_memory_whatever_comes_of_it():
    good, short = Lane(), Lane(scores=7)  # scores that cannot be copied
    stray = block_of(3, 2)
    stray.request_of_row[1] = 2
    before = sys.getallocatedblocks()
    for _ in range(300):
        good.run([block_of(3), block_of(2, 2)], True)
        for lane, block in ((good, stray), (short, stray), (short, block_of(1)), (good, block_of(MOST + 1))):
            with pytest.raises((ValueError, TypeError)):
                lane.run([block_of(1), block], False)
        good.launched.clear()
        short.launched.clear()
    gc.collect()
    assert sys.getallocatedblocks() - before < 200


def test_a_result_tells_the_milliseconds_until_the_scores_were_there():
    lane, start = Lane(launch=lambda: time.sleep(0.02)), time.perf_counter()
    told = lane.run([block_of(3)], False).device_ms
    assert 20 <= told <= (time.perf_counter() - start) * 1e3


def test_windows_are_checked_by_contexts_of_their_own():
    whole = block_of(40, 40)
    whole.request_of_row[:] = range(40)
    lane = Lane()
    assert len(lane.run([block_of(5, 3), whole.window(10, 30)], False).scores) == 25
    assert lane.stage.request_of_row[5:25].tolist() == list(range(3, 23))
    for row, context, told in ((10, 9, "-1 to 19"), (29, 30, "1 to 20")):
        torn = block_of(40, 40)
        torn.request_of_row[:] = range(40)
        part = torn.window(10, 30)
        torn.request_of_row[10:30] = range(11, 31) if context == 30 else [9, *range(11, 30)]
        assert torn.request_of_row[row] == context
        with pytest.raises(ValueError, match=f"block: got rows of contexts {told}, expected 0 to 19"):
            lane.run([block_of(5, 3), part], False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"graphs": ()}, TypeError, "graphs: expected a tuple of at least one"),
        ({"graphs": ((8, 11, False, 0),)}, TypeError, "graphs: expected tuples of four integers and a reader"),
        ({"graphs": ((8, 11, False, 0, ()), (8, 12, False, 0, ()))}, ValueError, "graphs: got 8 rows behind 8"),
        ({"graphs": ((0, 11, False, 0, ()),)}, ValueError, "graphs: got 0 rows behind 0"),
        ({"graphs": ((2**31, 11, False, 0, ()),)}, ValueError, "graphs: got 2147483648 rows"),
        ({"result": list}, TypeError, "result: expected a type of tuples"),
        ({"result": BatchResult(np.zeros((1, 1), np.float32), 0.0, 1)}, TypeError, "result: expected a type of tuples"),
    ],
)
def test_what_is_no_lane_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        Lane(**change)


def test_scores_that_cannot_be_copied_are_an_error_of_the_call():
    with pytest.raises(TypeError):
        Lane(scores=7).run([block_of(1)], False)
