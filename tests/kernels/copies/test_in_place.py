"""Rows that are read where their block lies: a graph is told so for one launch, and of its batch again once it is launched."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dpiframe_core.features.block_layout import BlockLayout
from dpiframe_core.features.row_block import BatchResult, RowBlock
from kernels.lookup.batch_header import HeaderWord
from kernels.lookup.id_record import IdRecord
from kernels.runtime import c_build
from kernels.runtime.replay import replay_batches

pytestmark = pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")
LAYOUT = BlockLayout(IdRecord((4, 2)), IdRecord((4, 1)), 1, 2)
PLAIN = BlockLayout(IdRecord((4, 2)), IdRecord((4, 1)), 0, 0)
LEAST = 1024  # rows of 8 bytes of ids and 8 of numbers that are 16 KB
MOST = 2048
NODE, PARAMS, CONTEXT = 7, 9, 13
RANGE_START, RANGE_SIZE = 11, 12


class Lane:
    """A CUDA of Python functions, whose `said` are the calls in order: places that are set, and launches with those of then.

    Args:
        fails: the numbers of sets that are refused, from 1 on, "attributes" or "enter".
    """

    def __init__(self, layout=LAYOUT, *, ahead=False, copied=0, reader=True, fails=()):
        self.stage = RowBlock.allocate(layout, MOST, MOST)
        self.beside = np.zeros((MOST, layout.carried_bytes), np.uint8)
        self.scores = np.arange(MOST, dtype=np.float32)[:, None].copy()  # which has its memory itself
        self.places = ctypes.c_uint64(), ctypes.c_uint64()
        self.locked, self.said, self.fails, self.sets, self.waits = [], [], set(fails), 0, 0
        self.entered = 0
        self.code, self.asked = 0, []  # of launches; addresses of which the driver was asked
        self.own = self.at(self.stage)
        self.places[0].value, self.places[1].value = self.own
        numbers = ctypes.addressof(self.places[1]) if layout.candidate_dense else 0
        given = (NODE, PARAMS, ctypes.addressof(self.places[0]), numbers) if reader is True else reader
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        many, pointers = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
        cuda = SimpleNamespace(
            cudaGraphLaunch=ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(self._launch),
            cudaStreamSynchronize=ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._wait),
            cudaGetErrorString=ctypes.CFUNCTYPE(pointer, ctypes.c_int)(lambda code: ctypes.addressof(self._words)),
        )
        self._words = ctypes.create_string_buffer(b"no such node")
        libcuda = SimpleNamespace(
            cuGraphExecKernelNodeSetParams_v2=ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer)(self._set),
            cuCtxGetCurrent=self._context,
            cuCtxSetCurrent=ctypes.CFUNCTYPE(ctypes.c_int, pointer)(self._enter),
            cuPointerGetAttributes=ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, many, pointers, number)(self._attributes),
        )
        self._functions = cuda, libcuda  # of which C has the addresses alone
        stage = self.stage.buffer, self.stage.places, layout.sections
        graphs = ((LEAST, 11, ahead, copied, given), (MOST, 12, ahead, 0, given))
        beside = (self.beside if layout.carried_bytes else None, layout.context_ids.prefix_bytes)
        self.run = replay_batches(
            graphs, 2, None, stage, beside, layout, self.scores, BatchResult, threads=2, cuda=cuda, libcuda=libcuda
        )

    @staticmethod
    def at(block):
        memory = block.buffer.ctypes.data
        return memory + block.places[2], memory + block.places[4]

    def _set(self, handle, node, params):
        self.sets += 1
        assert self.entered > self.sets - 1
        if self.sets in self.fails:
            return 1
        assert (node, params) == (NODE, PARAMS)
        self.said.append(("set", handle, *(p.value for p in self.places)))
        return 0

    @staticmethod
    def _context(out):
        out._obj.value = CONTEXT
        return 0

    def _enter(self, context):
        assert context == CONTEXT
        self.entered += 1
        return int("enter" in self.fails)

    def _launch(self, handle, stream):
        self.said.append(("launch", handle, int(self.stage.header[HeaderWord.STAGED_ROWS])))
        return self.code

    def _wait(self, stream):
        self.waits += 1
        return 0

    def _attributes(self, count, which, out, at):
        """Of memory that is not locked all are 0, and that is no error."""
        assert self.entered  # else nothing is told of it
        self.asked.append(at)
        starts = {memory.ctypes.data: memory.nbytes for memory in self.locked}
        start = next((s for s, size in starts.items() if s <= at < s + size), 0)
        known = {RANGE_START: start, RANGE_SIZE: starts.get(start, 0)}
        for i in range(count):
            ctypes.c_uint64.from_address(out[i]).value = known[which[i]]
        return int("attributes" in self.fails)

    def ran(self):
        said, self.said = self.said, []
        return said


def block_of(rows, contexts=1, layout=LAYOUT, room=MOST, skew=0):
    """Of random rows, in memory that has room for so many of them."""
    rng = np.random.default_rng(rows + contexts)
    memory = np.zeros(layout.offsets(room, room)[-1] + 64, np.uint8)
    skew += -memory.ctypes.data % 64
    block = RowBlock.formatted(memory[skew:], layout, rows, contexts)
    for section in (block.context_ids, block.candidate_ids):
        section[:] = rng.integers(0, 256, section.shape)
    for numbers in (block.context_dense, block.candidate_dense):
        numbers[:] = rng.random(numbers.shape)
    block.request_of_row[:] = np.sort(rng.integers(0, contexts, rows))
    return block


@pytest.mark.parametrize("layout", [LAYOUT, PLAIN])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("rows", "contexts", "handle"), [(LEAST, 1, 11), (LEAST + 1, 40, 12), (MOST, MOST, 12)])
def test_a_large_block_alone_is_read_where_it_lies(rows, contexts, handle, ahead, layout):
    if layout is PLAIN and rows < MOST:
        rows, handle = MOST, 12  # of half the bytes
    lane, block = Lane(layout, ahead=ahead), block_of(rows, contexts, layout)
    lane.locked.append(block.buffer)
    ids, numbers = lane.at(block)
    numbers = numbers if layout.candidate_dense else lane.own[1]
    for _ in range(2):
        assert len(lane.run([block], False).scores) == rows
        assert lane.ran() == [
            ("set", handle, ids, numbers), ("launch", handle, -1 if ahead else rows), ("set", handle, *lane.own),
        ]  # fmt: skip
    assert lane.stage.header[HeaderWord.STAGED_ROWS] == rows
    assert not lane.stage.candidate_ids.any()
    assert not lane.stage.candidate_dense.any()
    np.testing.assert_array_equal(lane.stage.request_of_row[:rows], block.request_of_row)
    np.testing.assert_array_equal(lane.stage.context_ids[:contexts], block.context_ids)
    np.testing.assert_array_equal(lane.stage.context_dense[:contexts], block.context_dense)
    if layout.carried_bytes:
        np.testing.assert_array_equal(lane.beside[:rows], block.carried(rows))


def test_a_window_is_read_from_its_first_row_on():
    lane, block = Lane(), block_of(MOST, 9)
    lane.locked.append(block.buffer)
    part = block.window(3, 3 + LEAST)
    lane.run([part], False)
    ids, numbers = lane.at(block)
    assert lane.ran()[0] == ("set", 11, ids + 3 * 8, numbers + 3 * 8)
    np.testing.assert_array_equal(lane.stage.request_of_row[:LEAST], part.request_of_row)


@pytest.mark.parametrize(
    ("change", "blocks", "given", "copied"),
    [
        ("two blocks", [LEAST, 3], {}, False),
        ("less than 16 KB", [LEAST - 1], {}, False),
        ("memory that is not locked", [LEAST], {}, False),
        ("memory that is not locked as far as the graph reads", [LEAST + 1], {}, False),
        ("no whole words", [LEAST], {}, False),
        ("a graph whose kernel is not known", [LEAST], {"reader": ()}, False),
        ("rows that go to the device first", [LEAST], {"copied": 21}, True),
        ("a place that the driver refuses", [LEAST], {"fails": [1]}, False),
        ("memory of which the driver tells nothing", [LEAST], {"fails": ["attributes"]}, False),
        ("a context that cannot be had", [LEAST], {"fails": ["enter"]}, False),
    ],
)
def test_all_else_is_copied_into_the_batch(change, blocks, given, copied):
    lane = Lane(**given)
    made = [block_of(n, skew=2 if change == "no whole words" else 0) for n in blocks]
    if "not locked as far" in change:
        end = made[0].places[4] + (MOST - 1) * 8
        lane.locked.append(made[0].buffer[:end])
    elif change != "memory that is not locked":
        lane.locked += [block.buffer for block in made]
    count = sum(blocks)
    lane.run(made, copied)
    handle = 21 if copied else 11 if count <= LEAST else 12
    assert lane.ran() == [("launch", handle, count)]
    np.testing.assert_array_equal(lane.stage.candidate_ids[:count], np.concatenate([b.candidate_ids for b in made]))
    np.testing.assert_array_equal(lane.stage.candidate_dense[:count], np.concatenate([b.candidate_dense for b in made]))
    assert lane.sets == ("refuses" in change)


def test_locked_as_far_as_the_graph_reads_is_enough():
    lane, block = Lane(), block_of(LEAST + 1)
    lane.locked.append(block.buffer[: block.places[4] + MOST * 8])
    lane.run([block], False)
    assert [what for what, *_ in lane.ran()] == ["set", "launch", "set"]


def test_a_graph_that_could_not_be_told_of_its_batch_again_is_told_before_it_runs_anything_else():
    lane, block, small = Lane(fails=[2, 3]), block_of(LEAST), block_of(5)
    lane.locked.append(block.buffer)
    for said in (["set", "launch"], []):  # the second time nothing is launched
        with pytest.raises(RuntimeError, match="graph replay: got CUDA error 1: no such node"):
            lane.run([block if said else small], False)
        assert [what for what, *_ in lane.ran()] == said
    assert len(lane.run([small], False).scores) == 5
    assert lane.ran() == [("set", 11, *lane.own), ("launch", 11, 5)]
    np.testing.assert_array_equal(lane.stage.candidate_ids[:5], small.candidate_ids)
    lane.run([small], False)
    assert lane.ran() == [("launch", 11, 5)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_graph_whose_launch_is_refused_is_told_of_its_batch_again(ahead):
    lane, block, small = Lane(ahead=ahead), block_of(LEAST), block_of(5)
    lane.locked.append(block.buffer)
    lane.code = 700
    with pytest.raises(RuntimeError, match="graph replay: got CUDA error 700"):
        lane.run([block], False)
    assert [what for what, *_ in lane.ran()] == ["set", "launch", "set"]
    assert tuple(place.value for place in lane.places) == lane.own
    lane.code = 0
    lane.run([small], False)
    assert [what for what, *_ in lane.ran()] == ["launch"]


def test_the_driver_is_asked_of_ids_and_numbers_of_rows_alone():
    lane, block = Lane(), block_of(MOST, 3)
    lane.locked.append(block.buffer)
    lane.run([block], False)
    assert lane.asked == [*lane.at(block)]


def test_a_small_graph_moved_by_an_error_is_not_mixed_up_with_a_large_one():
    lane, small, large = Lane(fails=[2]), block_of(LEAST), block_of(MOST)
    lane.locked += [small.buffer, large.buffer]
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        lane.run([small], False)
    lane.ran()
    lane.run([large], False)  # the other graph has its own kernel, at its own batch
    assert [said[:2] for said in lane.ran()] == [("set", 12), ("launch", 12), ("set", 12)]
    lane.run([block_of(3)], False)
    assert lane.ran() == [("set", 11, *lane.own), ("launch", 11, 3)]


def test_scores_are_of_as_many_rows_as_the_batch_has_whatever_the_last_one_had():
    lane = Lane()
    kept = []
    for rows in (5, 5, 3, 9, 9, 1, MOST, 2):
        scores = lane.run([block_of(rows)], False).scores
        assert scores[:, 0].tolist() == [*range(rows)]
        kept.append(scores)
    lane.scores[:] = -1
    assert all((scores >= 0).all() for scores in kept)  # they are copies


def test_a_lane_that_is_gone_lets_go_of_its_scores():
    lane = Lane()
    lane.run([block_of(5)], False)
    before = sys.getrefcount(lane.scores)
    lane.run = None
    after = sys.getrefcount(lane.scores)
    assert before - after == 2  # its own, and that of the view of the last batch's


@pytest.mark.parametrize("reader", [(1, 2), [1, 2, 3, 4], (1, 2, 3, 4, 5), 7])
def test_what_is_no_reader_is_refused(reader):
    with pytest.raises(TypeError, match="reader: expected a tuple of four integers, or of none"):
        Lane(reader=reader)
    with pytest.raises(ValueError, match="got -1, expected"):
        Lane(reader=(1, 2, 3, -1))
