"""Large blocks in page-locked memory: the same scores, to the bit, as of rows that were copied into the batch."""

import gc
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dpiframe_core.engine import cuda_lane
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.graph.architecture import DeepFM
from tests import oracle
from tests.runner import small_bundle

MOST = 4096
ON = [("cuda:0", pytest.mark.gpu), ("cuda:1", pytest.mark.gpu2)]  # the second beside the current device, the first


@pytest.fixture(scope="module", params=[pytest.param((on, ahead), marks=mark) for on, mark in ON for ahead in (10**9, 512)])
def engine(request, tmp_path_factory):
    """One that stages all rows before the launch, and one that launches first."""
    device, ahead = request.param
    bundle = small_bundle(tmp_path_factory.mktemp("bundles") / "small", DeepFM(hidden_units=(16, 8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_lane, "AHEAD_ROWS", ahead)
        made = Engine(bundle, device, "fp32", EngineOptions(max_batch_rows=MOST, buckets=(64, 2048, MOST), lanes=1))
        made.warmup()
    yield made
    made.close()


@pytest.fixture
def locked(engine):
    """Memory for a block of the most rows and contexts, and for as many rows behind it."""
    layout = engine.schema.block_layout
    memory = np.frombuffer(mmap.mmap(-1, 2 * layout.offsets(MOST, MOST)[-1]), np.uint8)
    engine.lock_pages(memory)
    return memory


def least(engine):
    """Rows of 16 KB."""
    record, numbers = engine.schema.block_layout.widths[2::2]
    return -(-(16 << 10) // (record + numbers))


def in_memory(block, memory):
    copy = RowBlock.formatted(
        memory[: block.layout.offsets(block.rows, block.contexts)[-1]], block.layout, block.rows, block.contexts
    )
    copy.fill((block,))
    return copy


def staged(engine):
    return engine._pool.lanes[0]._staging.block


@pytest.mark.parametrize("contexts", [1, 7, 1000])
def test_scores_are_those_of_copied_rows(engine, locked, contexts):
    rng = np.random.default_rng(contexts)
    for rows in (least(engine), 2047, 2048, 2049, 3000, MOST):
        block = oracle.make_block(engine.schema, rows, min(contexts, rows), rng)
        want = engine.run_batch([block]).scores
        theirs = in_memory(block, locked)
        for _ in range(3):
            staged(engine).candidate_ids[:] = 255
            assert np.array_equal(engine.run_batch([theirs]).scores, want)
            assert (staged(engine).candidate_ids == 255).all()
        window = theirs.window(5, rows)
        assert np.array_equal(engine.run_batch([window]).scores, engine.run_batch([in_plain(window)]).scores)
        small = oracle.make_block(engine.schema, 60, 1, rng)
        for blocks in ([small], [theirs.window(0, 40), small.window(0, 9)]):  # which are copied, behind such a batch
            many = [in_plain(b) for b in blocks]
            assert np.array_equal(engine.run_batch(blocks).scores, engine.run_batch(many).scores)


def in_plain(block):
    copy = RowBlock.allocate(block.layout, block.rows, block.contexts)
    copy.fill((block,))
    return copy


def test_a_thread_that_has_called_nothing_of_cuda_yet_has_them_read_in_place_too(engine, locked):
    block = oracle.make_block(engine.schema, MOST, 7, np.random.default_rng(2))
    want, theirs = engine.run_batch([block]).scores, in_memory(block, locked)
    for _ in range(3):
        staged(engine).candidate_ids[:] = 255
        with ThreadPoolExecutor(1) as thread:
            assert np.array_equal(thread.submit(engine.run_batch, [theirs]).result().scores, want)
        assert (staged(engine).candidate_ids == 255).all()


def scored_in_own_memory(engine, block):
    """And a weak reference to that."""
    memory = np.frombuffer(mmap.mmap(-1, block.layout.offsets(MOST, MOST)[-1]), np.uint8)
    engine.lock_pages(memory)
    return engine.run_batch([in_memory(block, memory)]).scores, weakref.ref(memory)


def test_the_graph_reads_its_batch_again_when_the_memory_is_gone(engine):
    block = oracle.make_block(engine.schema, MOST, 3, np.random.default_rng(0))
    want = engine.run_batch([block]).scores
    for _ in range(3):
        scores, memory = scored_in_own_memory(engine, block)
        assert np.array_equal(scores, want)
        gc.collect()
        assert memory() is None
        assert engine._pool.lanes[0].replay_us(MOST, 3) > 0
        torch.cuda.synchronize(engine.device)
        assert np.array_equal(engine.run_batch([block]).scores, want)


def test_memory_that_is_locked_already_is_left_as_it_is(engine, locked):
    engine.lock_pages(locked)  # which the driver refuses
    block = oracle.make_block(engine.schema, MOST, 1, np.random.default_rng(1))
    assert np.array_equal(engine.run_batch([in_memory(block, locked)]).scores, engine.run_batch([block]).scores)
