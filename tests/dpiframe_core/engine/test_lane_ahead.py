"""Lanes that launch large batches before their rows are staged, or have rows copied to the device: the same scores, to the bit,
as of rows that were staged before and are read in place.
"""

import sys
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dpiframe_core.engine import cuda_bucket, cuda_lane
from dpiframe_core.engine.cuda_bucket import CapturedBucket, EagerBucket
from dpiframe_core.engine.cuda_lane import CudaLane
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.engine.staging import Staging
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.graph.architecture import DeepFM
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


def test_a_batch_goes_to_the_smallest_bucket_that_holds_it_with_a_word_for_every_eight_rows():
    schema, rng, ran = oracle.make_schema(), np.random.default_rng(0), []
    ready = [SimpleNamespace(run_batch=lambda words, blocks, b=b: ran.append((b, words, blocks))) for b in BUCKETS]
    switched = []
    own = SimpleNamespace(
        buckets=BUCKETS, _ready=ready, _generation=0, _switch=switched.append, _several=False,
        _result=rng.random((4096, 1), np.float32), _copied={}, _overlaps=None,
    )  # fmt: skip
    for rows, bucket, words in (((1,), 64, 1), ((60, 4), 64, 8), ((60, 5), 1024, 9), ((4096,), 4096, 512)):
        blocks = [oracle.make_block(schema, n, 1, rng) for n in rows]
        result = CudaLane.run(own, blocks)
        assert ran.pop() == (bucket, words, blocks)
        assert result.bucket == bucket
        assert result.scores.tolist() == own._result[: sum(rows)].tolist()
        assert not np.shares_memory(result.scores, own._result)
    assert not switched
    own._copied = {4096: SimpleNamespace(run_batch=lambda words, blocks: ran.append("copied"))}
    cases = (4096, True, None, "copied"), (4096, False, None, 4096), (4096, True, False, 4096), (4096, False, True, "copied")
    for rows, overlaps, copied, want in (*cases, (60, True, True, 64)):
        own._overlaps = lambda overlaps=overlaps: overlaps
        CudaLane.run(own, [oracle.make_block(schema, rows, 1, rng)], copied=copied)
        last = ran.pop()
        assert want == (last if last == "copied" else last[0])
    CudaLane.run(own, [oracle.make_block(schema, 4000, 1, rng), oracle.make_block(schema, 90, 4096, rng)], copied=True)
    assert ran.pop()[0] == 4096  # no more contexts are copied than rows
    CudaLane.run(own, blocks, generation=1)
    assert switched == [1]


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


@pytest.mark.parametrize("in_c", [False, True])
def test_a_captured_bucket_stages_rows_itself_only_without_c(staging, in_c, monkeypatch):
    runtime = SimpleNamespace(graphLaunch=lambda *handles: ran.append(("launch", *handles)))
    for name, module in (("cupy", SimpleNamespace()), ("cupy.cuda", SimpleNamespace(runtime=runtime))):
        monkeypatch.setitem(sys.modules, name, module)
    ran = []
    monkeypatch.setattr(cuda_bucket, "replay", lambda *_, **__: ran.append)
    monkeypatch.setattr(
        cuda_bucket, "replay_batch", lambda *_, **__: (lambda words, blocks: ran.append("in C")) if in_c else None
    )
    graph, stream = Mock(raw_cuda_graph_exec=Mock(return_value=11)), SimpleNamespace(cuda_stream=22)
    bucket = CapturedBucket(graph, stream, staging, 16, None, ahead=in_c)
    block = oracle.make_block(oracle.make_schema(), 5, 2, np.random.default_rng(0))
    bucket.run_batch(1, [block])
    assert ran == (["in C"] if in_c else [1])
    assert staging.block.request_of_row[4:17].tolist() == ([7] * 13 if in_c else [block.request_of_row[4], *[-1] * 11, 7])
    bucket.launch()
    assert ran[1:] == [("launch", 11, 22)]
    assert bucket.ahead == in_c
    bucket.release()
    graph.reset.assert_called_once_with()


def test_an_eager_bucket_stages_rows_then_issues_and_waits(staging):
    ran, stream = [], Mock()
    stream.synchronize.side_effect = lambda: ran.append("waited")
    bucket = EagerBucket(lambda: ran.append(staging.block.header[HeaderWord.STAGED_ROWS]), stream, staging, 16)
    bucket.run_batch(1, [oracle.make_block(oracle.make_schema(), 5, 1, np.random.default_rng(0))])
    assert ran == [5, "waited"]
    assert not bucket.ahead


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
    torn = SimpleNamespace(rows=10, contexts=1, base=0, buffer=block.buffer[:64], places=block.places)
    for _ in range(3):
        assert np.array_equal(own.run([block]).scores, want)
        with pytest.raises(ValueError, match="expected some of 64"):
            own.run([block, torn])
        assert own.replay_us(3000, 5) > 0  # would wait for ever if rows were told to be missing
        assert own._workspace.state[[2, 4]].tolist() == [0, 0]
    assert np.array_equal(own.run([block]).scores, want)
    torch.cuda.synchronize()
