"""Lanes that launch large batches before their rows are staged, or have rows copied to the device: the same scores, to the bit,
as of rows that were staged before and are read in place.
"""

import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dpiframe_core.engine import cuda_bucket, cuda_lane
from dpiframe_core.engine.cuda_bucket import CapturedBucket, EagerBucket, LaneBuckets, batch_runner
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.engine.staging import Staging
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.features.row_block import BatchResult, RowBlock
from dpiframe_core.graph.architecture import DeepFM
from dpiframe_core.operators.workspace import done_words
from kernels.lookup.batch_header import HeaderWord
from tests import oracle
from tests.runner import small_bundle

BUCKETS = (64, 1024, 4096)
ROWS = (1, 63, 64, 65, 255, 256, 257, 500, 1000, 1023, 1024, 1025, 2049, 4000, 4095, 4096)
NODES = [SimpleNamespace(op=op) for op in ("lookup", "linear", "lookup")]


def decides(rows=512, lookups=1, **of_lane):
    program = SimpleNamespace(graph=SimpleNamespace(nodes=NODES[: 2 * lookups]))
    return CudaLane._ahead(SimpleNamespace(**{"_capture": True, "_has_head": True, **of_lane}), program, rows)


def test_large_buckets_of_one_lookup_are_launched_ahead(monkeypatch):
    monkeypatch.setattr(cuda_lane, "stages", lambda: True)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert decides()
    assert not decides(rows=511)
    assert not decides(lookups=2)
    assert not decides(_capture=False)
    assert not decides(_has_head=False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert not decides()
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert decides()
    monkeypatch.setattr(cuda_lane, "stages", lambda: False)
    assert not decides()


def lane_of(ran, **given):
    run = lambda blocks, copied: ran.append((blocks, copied))  # noqa: E731
    return SimpleNamespace(_run=run, _generation=0, _several=False, _copied={}, _overlaps=None, **given)


def test_rows_are_copied_first_while_other_lanes_compute_where_large_buckets_can_be():
    ran, blocks = [], [oracle.make_block(oracle.make_schema(), 1, 1, np.random.default_rng(0))]
    own = lane_of(ran)
    CudaLane.run(own, blocks)
    assert ran.pop() == (blocks, False)
    own._copied = {4096: None}
    CudaLane.run(own, blocks)
    assert ran.pop() == (blocks, False)
    for overlaps, copied, want in ((True, None, True), (False, None, False), (True, False, False), (False, True, True)):
        own._overlaps = lambda overlaps=overlaps: overlaps
        CudaLane.run(own, blocks, copied=copied)
        assert ran.pop() == (blocks, want)


def test_a_lane_goes_over_to_another_generation_once():
    switched, ran = [], []
    own = lane_of(ran, _switch=switched.append)
    for generation in (0, 1):
        CudaLane.run(own, [], generation)
    assert switched == [1]
    assert len(ran) == 2


def test_a_lane_that_is_not_prepared_takes_no_batch():
    with pytest.raises(Unavailable, match="lane: got a batch"):
        cuda_lane._not_ready([], False)


def test_what_runs_a_lanes_batches_is_made_with_its_device_as_the_current_one(monkeypatch):
    current, seen = [0], []  # as a process's threads begin

    @contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(cuda_lane, "batch_runner", lambda buckets: seen.append((current[-1], [*buckets.ready])))
    monkeypatch.setattr(cuda_lane, "loading", lambda sources: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", device)
    lane = SimpleNamespace(_device=1, buckets=(8, 64), _ready=[], _copied={}, _on_device=None, _done=None, _result=None,
                           _streams=[Mock()], _staging=Mock(), _sources=list, _issuing=lambda: device(1),
                           _compile_regions=lambda: None, _prepared=lambda rows, pool: rows)  # fmt: skip
    CudaLane.prepare(lane)
    assert seen == [(1, [8, 64])]


@pytest.fixture
def staging(monkeypatch):
    """A lane's, in memory that is not pinned, of another batch's rows."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", partial(unpinned, torch.zeros))
        own = Staging(oracle.make_schema().block_layout, 64)
    own.block.request_of_row[:] = 7
    return own


def unpinned(zeros, *shape, dtype, pin_memory):
    assert pin_memory
    return zeros(*shape, dtype=dtype)


def test_rows_are_staged_and_those_behind_become_padding(staging):
    schema, rng = oracle.make_schema(), np.random.default_rng(0)
    blocks = [oracle.make_block(schema, 5, 2, rng), oracle.make_block(schema, 3, 1, rng)]
    layout = schema.block_layout
    want = RowBlock.over(np.zeros(layout.offsets(64, 64)[-1], np.uint8), layout, 64, 64)
    want.request_of_row[:] = 7
    want.fill(blocks)
    want.request_of_row[8:16] = -1
    want.header[HeaderWord.STAGED_ROWS], want.header[HeaderWord.STAGED_CONTEXTS] = 8, 3
    assert staging.stage(blocks, 16) == 8
    assert staging.block.buffer[: want.buffer.size].tobytes() == want.buffer.tobytes()
    carried, prefix = staging.carried, layout.context_ids.prefix_bytes
    assert (carried[:8, :prefix] == want.context_ids[want.request_of_row[:8], :prefix]).all()
    assert (carried[:8, prefix:].view(np.float32) == want.context_dense[want.request_of_row[:8]]).all()
    assert not carried[8:].any()
    assert carried.shape[1] == prefix + 4 * layout.context_dense == layout.carried_bytes


def test_nothing_is_staged_beside_rows_that_no_lookup_reads_there(monkeypatch):
    monkeypatch.setattr(torch, "zeros", partial(unpinned, torch.zeros))
    own = Staging(oracle.make_schema().block_layout, 8, carries=False)
    assert own.carried is None
    assert own.batch.carried.shape == (8, 0)
    assert own.stage([oracle.make_block(oracle.make_schema(), 5, 2, np.random.default_rng(0))], 8) == 5


@pytest.fixture
def captured(monkeypatch):
    """Makes captured buckets without a device, whose launches and runs it appends to `ran`."""
    ran = []
    runtime = SimpleNamespace(graphLaunch=lambda *handles: ran.append(("launch", *handles)))
    for name, module in (("cupy", SimpleNamespace()), ("cupy.cuda", SimpleNamespace(runtime=runtime))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda_bucket, "replay", lambda handle, stream, done: lambda words: ran.append((handle, words)))

    def make(handle, ahead=False):
        graph = Mock(raw_cuda_graph_exec=Mock(return_value=handle), raw_cuda_graph=Mock(return_value=100 + handle))
        return CapturedBucket(graph, SimpleNamespace(cuda_stream=22), None, ahead=ahead)

    return SimpleNamespace(ran=ran, make=make)


def test_a_captured_bucket_launches_its_graph_and_releases_it(captured):
    bucket = captured.make(11, ahead=True)
    bucket.launch()
    bucket.run(3)
    assert captured.ran == [("launch", 11, 22), (11, 3)]
    assert bucket.ahead
    bucket.release()
    bucket.graph.reset.assert_called_once_with()


def test_an_eager_bucket_issues_and_waits():
    ran, stream = [], Mock()
    stream.synchronize.side_effect = lambda: ran.append("waited")
    bucket = EagerBucket(lambda: ran.append("issued"), stream)
    bucket.run(1)
    assert ran == ["issued", "waited"]
    assert not bucket.ahead


@pytest.mark.parametrize("in_c", [False, True])
def test_batches_run_in_c_where_all_buckets_are_captured(staging, captured, in_c, monkeypatch):
    made, places = [], []
    reader = SimpleNamespace(given=(1, 2, 3, 4))
    monkeypatch.setattr(
        cuda_bucket, "row_reader", lambda graph, where: places.append(where) or (reader if graph == 111 else None)
    )
    monkeypatch.setattr(cuda_bucket, "copy_threads", lambda: 3)
    monkeypatch.setattr(
        cuda_bucket, "replay_batches", lambda *given, threads: made.append((*given, threads)) or ("in C" if in_c else None)
    )
    block, layout, done = staging.block, staging.block.layout, np.zeros(8, np.int32)
    scores = np.random.default_rng(0).random((64, 1), np.float32)
    ready = {16: captured.make(11), 64: captured.make(12, ahead=True)}
    buckets = LaneBuckets(ready, {16: captured.make(13)}, staging, done, scores, 22)
    run = batch_runner(buckets)
    assert made[0][0] == [(16, 11, False, 13, (1, 2, 3, 4)), (64, 12, True, 0, ())]
    own = block.candidate_ids.ctypes.data, block.candidate_dense.ctypes.data
    assert places[:2] == [dict(zip(("ids", "numbers"), own, strict=True))] * 2
    assert made[0][1:3] == (22, done)
    stage, carried = (block.buffer, block.places, layout.sections), (staging.carried, layout.context_ids.prefix_bytes)
    assert made[0][3:] == (stage, carried, layout, scores, BatchResult, 3)
    if in_c:
        assert run == "in C"
        eager = EagerBucket(lambda: captured.ran.append((12, done_words(60))), Mock())
        run = batch_runner(replace(buckets, ready=ready | {64: eager}))
    monkeypatch.setattr(cuda_bucket, "time", SimpleNamespace(perf_counter=count(0, 0.5).__next__))
    schema, rng = oracle.make_schema(), np.random.default_rng(0)
    cases = (5, 2, False, 11), (5, 2, True, 13), (5, 17, True, 11), (16, 16, True, 13), (60, 1, True, 12)
    for rows, contexts, wanted, handle in cases:
        staging.block.request_of_row[:] = 7
        result = run([oracle.make_block(schema, rows, contexts, rng)], wanted)
        assert captured.ran.pop() == (handle, done_words(rows))
        assert (result.bucket, result.device_ms) == (64 if handle == 12 else 16, 500.0)
        np.testing.assert_array_equal(result.scores, scores[:rows])
        assert not np.shares_memory(result.scores, scores)
        assert (staging.block.request_of_row[rows : result.bucket] == -1).all()
    for blocks, words in (([], "batch rows: got 0"), ([oracle.make_block(schema, 65, 1, rng)], "batch rows: got 65")):
        with pytest.raises(InputError, match=words):
            run(blocks, False)
    assert not captured.ran


@pytest.fixture(scope="module", params=["auto", "breadth_first"])
def engines(request, tmp_path_factory):
    """One that never launches ahead, one that does, and one that copies large buckets' rows, by the choices of the first."""
    bundle = small_bundle(tmp_path_factory.mktemp("bundles") / "small", DeepFM(hidden_units=(16, 8)))
    made = []
    for first, copied in ((10**9, 10**9), (cuda_lane.AHEAD_ROWS, 10**9), (cuda_lane.AHEAD_ROWS, 10**4)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{request.param}"))
            patch.setattr(cuda_lane, "AHEAD_ROWS", first)
            patch.setattr(cuda_lane, "COPIED_BYTES", copied)
            options = EngineOptions(max_batch_rows=4096, buckets=BUCKETS, lanes=2, policy=request.param)
            made.append(Engine(bundle, "cuda:0", "fp32", options))
            made[-1].warmup()
            assert [[*lane._copied] for lane in made[-1]._pool.lanes] == [[4096, 1024] * (copied == 10**4)] * 2
    for lane in made[-1]._pool.lanes:
        lane._overlaps = lambda: True
    yield made
    for engine in made:
        engine.close()


def blocks_of(engine, rows, seed):
    """Up to nine blocks of so many rows, some of them windows of larger ones."""
    rng = np.random.default_rng(seed)
    stops = sorted({*rng.integers(1, rows + 1, seed % 9).tolist(), rows})
    blocks = []
    for n in np.diff([0, *stops]).tolist():
        more = int(rng.integers(0, 5))
        block = oracle.make_block(engine.schema, n + more, int(rng.integers(1, n + 1)), rng)
        blocks.append(block.window(more, n + more) if more else block)
    return blocks


@pytest.mark.gpu
def test_only_large_buckets_are_launched_ahead(engines):
    for engine, want in zip(engines, ([False] * 3, *[[False, True, True]] * 2), strict=True):
        for own in engine._pool.lanes:
            assert [one.ahead for one in own._ready] == want
            assert not any(one.ahead for one in own._copied.values())


@pytest.mark.gpu
@pytest.mark.parametrize("way", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_scores_are_those_of_rows_staged_before(engines, rows, way):
    plain, other = engines[0], engines[way]
    for seed in range(12):
        blocks = blocks_of(plain, rows, seed)
        want, got = plain.run_batch(blocks), other.run_batch(blocks)
        assert np.array_equal(got.scores, want.scores)
        assert got.bucket == want.bucket


@pytest.mark.gpu
@pytest.mark.parametrize("way", [1, 2])
def test_two_lanes_at_once_keep_their_rows_apart(engines, way):
    plain, other = engines[0], engines[way]
    batches = [blocks_of(plain, rows, 100 + rows) for rows in ROWS]
    want = [plain.run_batch(blocks).scores for blocks in batches]
    wrong = []

    def client(seed):
        for i in np.random.default_rng(seed).integers(0, len(batches), 200).tolist():
            if not np.array_equal(other.run_batch(batches[i]).scores, want[i]):
                wrong.append(ROWS[i])

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.gpu
def test_a_lane_goes_on_after_blocks_that_cannot_be_staged_and_after_replays(engines):
    plain, ahead, _ = engines
    own = ahead._pool.lanes[0]
    block = oracle.make_block(ahead.schema, 3000, 5, np.random.default_rng(0))
    want = plain.run_batch([block]).scores
    torn = RowBlock(block.layout, 10, 1, block.buffer[:64], block.places)
    for _ in range(3):
        assert np.array_equal(own.run([block]).scores, want)
        with pytest.raises(ValueError, match="expected some of 64"):
            own.run([block, torn])
        assert own.replay_us(3000, 5) > 0  # would wait for ever if rows were told to be missing
        assert own._workspace.state[[2, 4]].tolist() == [0, 0]
    assert np.array_equal(own.run([block]).scores, want)
    torch.cuda.synchronize()
