"""What lanes refuse that check their batches themselves, as those of a GPU do: in whose words, and what is counted."""

from unittest.mock import Mock

import numpy as np
import pytest

from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.features.row_block import BatchResult, RowBlock
from dpiframe_core.graph.architecture import DeepFM
from tests import oracle
from tests.runner import small_bundle


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One of a CPU, whose lane is taken for one that checks its batches."""
    bundle = small_bundle(tmp_path_factory.mktemp("bundle") / "b", DeepFM(hidden_units=(8,)))
    engine = Engine(bundle, "cpu", "fp32", EngineOptions(max_batch_rows=64, lanes=1))
    engine.warmup()
    yield engine
    engine.close()


@pytest.fixture
def lane(engine, monkeypatch):
    monkeypatch.setattr(engine, "_checks", False)
    (lane,) = engine._pool.lanes
    monkeypatch.setattr(lane, "run", Mock())
    return lane


def block_of(engine, rows, contexts=1):
    return oracle.make_block(engine.schema, rows, contexts, np.random.default_rng(0))


def stray(engine):
    block = block_of(engine, 3, 2)
    block.request_of_row[1] = 2
    return block


@pytest.mark.parametrize("error", [ValueError("block: x"), TypeError("block: x"), AttributeError("block: x")])
def test_what_a_lane_refuses_is_told_in_words_of_inputs_and_else_as_it_is(engine, lane, error):
    lane.run.side_effect = error
    refused = (
        ([], "batch rows: got 0, expected 1 to 64"),
        ([block_of(engine, 65)], "batch rows: got 65"),
        ([block_of(engine, 9, 65)], "batch contexts: got 65, expected at most 64"),
        ([stray(engine)], r"row block request_of_row: got \[\d, 2\], expected within \[0, 2\)"),
    )
    for times, (blocks, words) in enumerate(refused):
        with pytest.raises(InputError, match=words):
            engine.run_batch(blocks)
        assert lane.run.call_count == times + 1  # nobody looks at them before the lane does
    with pytest.raises(type(error), match="block: x"):  # as of a block that ends too soon
        engine.run_batch([block_of(engine, 3)])
    engine.check()  # a batch that is refused is no fault of the device
    lane.run = Mock(return_value=BatchResult(np.zeros((3, 1), np.float32), 0.1, 64))
    assert engine.run_batch([block_of(engine, 3)]).bucket == 64  # its lane is free again


def test_batches_are_counted_by_rows_that_have_scores(engine, lane):
    before = engine.batch_sizes
    lane.run.return_value = BatchResult(np.zeros((3, 1), np.float32), 0.1, 64)
    engine.run_batch([block_of(engine, 3)])
    lane.run.side_effect = ValueError
    with pytest.raises(InputError):
        engine.run_batch([])
    assert np.flatnonzero(engine.batch_sizes - before).tolist() == [3]


def test_rows_of_files_are_not_read_for_what_is_no_batch(engine, lane, monkeypatch):
    monkeypatch.setattr(engine, "reads_ahead", True)
    monkeypatch.setattr(engine._store, "ahead", Mock())
    other = RowBlock.allocate(engine.schema.block_layout, 65)
    with pytest.raises(InputError, match="batch rows: got 65"):
        engine.run_batch([other])
    assert not engine._store.ahead.mock_calls
    assert not lane.run.called


def test_before_a_lane_of_a_cpu_batches_are_checked(tmp_path):
    engine = Engine(small_bundle(tmp_path / "b", DeepFM(hidden_units=(8,))), "cpu")
    with pytest.raises(InputError, match="batch rows: got 0"):  # of what is no batch, before all else
        engine.run_batch([])
    with pytest.raises(Unavailable, match="not warmed up"):
        engine.run_batch([block_of(engine, 1)])
