"""An engine of the fan-in locks its ingresses' memory, and a GPU reads large requests there."""

import asyncio
import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from deployments.fanin.batcher import FanInBatcher
from deployments.fanin.scorer import FanInScorer
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.graph.architecture import DeepFM
from tests import oracle
from tests.deployments.fanin.doubles import FINGERPRINT, connect, rows_of, scorer_of
from tests.deployments.serving_doubles import LAYOUT, FakeDevice, numbered, numbers
from tests.runner import small_bundle

MOST = 4096


def test_the_memory_of_each_ingress_is_locked_as_it_comes_and_let_go_when_it_has_left() -> None:
    locked: list[weakref.ref[np.ndarray]] = []

    async def main() -> None:
        engine = FanInBatcher(
            FakeDevice(), LAYOUT, 1, FINGERPRINT, max_batch_rows=10, lanes=0, max_queued_rows=100,
            lock_pages=lambda memory: locked.append(weakref.ref(memory)),
        )  # fmt: skip
        scorers = [scorer_of(time.monotonic) for _ in range(2)]
        peers = [connect(scorer, engine)[1] for scorer in scorers]
        assert [own() is peer.memory for own, peer in zip(locked, peers, strict=True)] == [True, True]
        asked = asyncio.ensure_future(scorers[1].submit(numbered(7, 3)))
        await asyncio.sleep(0)
        engine.dispatcher.step()
        assert rows_of(await asked) == numbers(7, 3)
        del asked
        for peer in peers:
            engine.leave(peer)
            peer.sock.close()
        del peer
        peers.clear()
        for scorer in scorers:
            await scorer.close()
        engine.close(0)

    asyncio.run(main())
    gc.collect()
    assert [own() is None for own in locked] == [True, True]


@pytest.mark.gpu
def test_a_gpu_reads_a_large_request_in_its_ingresss_memory(tmp_path: Path) -> None:
    engine = Engine(small_bundle(tmp_path / "small", DeepFM(hidden_units=(16, 8))), "cuda:0", "fp32",
                    EngineOptions(max_batch_rows=MOST, buckets=(64, MOST), lanes=1))  # fmt: skip
    engine.warmup()
    block = oracle.make_block(engine.schema, MOST, 5, np.random.default_rng(0))
    want, staged = engine.run_batch([block]).scores, engine._pool.lanes[0]._staging.block.candidate_ids  # type: ignore[union-attr]

    async def main() -> None:
        batcher = FanInBatcher.of(engine, 3 * MOST, lambda seen: None)
        layout = engine.schema.block_layout
        scorer = FanInScorer("\0dpiframe-test-locked", "m", engine.bundle.fingerprint, layout, 1, most_rows=3 * MOST)
        _, peer = connect(scorer, batcher)
        for _ in range(3):
            theirs = scorer.allocate(layout, block.rows, block.contexts)
            theirs.fill((block,))
            staged[:] = 255
            assert np.array_equal((await scorer.submit(theirs)).scores, want)
            assert (staged == 255).all()
        await scorer.close()
        batcher.close(0)
        peer.sock.close()

    asyncio.run(main())
    engine.close()
