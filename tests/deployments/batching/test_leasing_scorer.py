"""What a request does while rows of it are read: it waits, alone, as long as it may."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.batching.leasing_scorer import LeasingScorer, ahead_of
from deployments.batching.scorer import Scored
from deployments.config_tables import TablesHome
from dpiframe_core.errors import DeadlineExceeded, Unavailable
from tests.dpiframe_core.far_rows.test_rows_ahead import Gate, block_of, schema_of
from tests.dpiframe_core.far_rows.test_rows_ahead import ahead_of as rows_ahead

F0 = schema_of().columns["f0"]


class Scorer:
    """Answers with the ids that it is given."""

    accepting = True

    async def submit(self, block, deadline=None, priority=0):
        return Scored(block.column(F0).astype(np.float32), 1.0, 2.0)


def test_a_request_waits_for_its_rows_and_others_overtake_it():
    source = Gate(opened=False)
    ahead, _ = rows_ahead(source)

    async def serve():
        scorer = LeasingScorer(Scorer(), ahead.lease)
        slow = asyncio.create_task(scorer.submit(block_of(150)))
        fast = await scorer.submit(block_of(3))
        assert not slow.done()
        source.gate.set()
        return fast, await slow

    fast, slow = asyncio.run(serve())
    assert fast.scores[0, 0] == 3
    assert slow.scores[0, 0] >= 400
    assert (slow.degraded_rows, ahead.held) == (0, 0)
    assert slow.queue_ms > 1.0
    ahead.close()


def test_past_its_budget_a_request_is_answered_with_rows_of_unknown_values():
    source = Gate(opened=False)
    ahead, _ = rows_ahead(source)
    scored = asyncio.run(LeasingScorer(Scorer(), ahead.lease, 0.001).submit(block_of(150, 3, 151)))
    assert scored.scores[:, 0].tolist() == [0, 3, 0]
    assert scored.degraded_rows == 2
    source.gate.set()
    assert ahead.held == 0
    ahead.close()


def test_with_a_budget_a_row_that_cannot_be_read_is_late_and_without_one_a_failure():
    source = Gate()
    source.broken = True
    ahead, _ = rows_ahead(source)
    scored = asyncio.run(LeasingScorer(Scorer(), ahead.lease, 5.0).submit(block_of(150)))
    assert scored.degraded_rows == 1
    with pytest.raises(Unavailable, match="the disk is gone"):
        asyncio.run(LeasingScorer(Scorer(), ahead.lease).submit(block_of(150)))
    assert ahead.held == 0
    ahead.close()


def test_a_deadline_that_passes_meanwhile_ends_the_wait():
    source = Gate(opened=False)
    ahead, _ = rows_ahead(source)
    now = iter([0.0, 10.0, 10.0])
    scorer = LeasingScorer(Scorer(), ahead.lease, clock=lambda: next(now))
    with pytest.raises(DeadlineExceeded):
        asyncio.run(scorer.submit(block_of(150), deadline=0.001))
    source.gate.set()
    ahead.close()
    assert ahead.held == 0


def test_a_client_that_hangs_up_gives_its_slots_back():
    source = Gate(opened=False)
    ahead, _ = rows_ahead(source)

    async def hang_up():
        task = asyncio.create_task(LeasingScorer(Scorer(), ahead.lease).submit(block_of(150)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(hang_up())
    assert ahead.held == 0
    source.gate.set()
    ahead.close()


def test_only_models_with_rows_in_files_pay_for_it():
    scorer = Scorer()
    assert ahead_of(scorer, SimpleNamespace(reads_ahead=False), None) is scorer
    tables = TablesHome(hbm_gib=1, miss_budget_ms=3)
    before = ahead_of(scorer, SimpleNamespace(reads_ahead=True, lease=None), tables)
    assert isinstance(before, LeasingScorer)
    assert before._budget_s == 0.003
