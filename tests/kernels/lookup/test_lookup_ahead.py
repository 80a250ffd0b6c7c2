"""A lookup that is launched ahead of its rows, against the same lookup of rows that are all there: to the bit, on one state."""

import time
from dataclasses import fields

import numpy as np
import pytest
import torch

from kernels.lookup.batch_header import HeaderWord
from kernels.runtime.launch import overlapping
from kernels.runtime.state import STATE_WORDS, StateWord
from tests.kernels.lane_state import lane_state
from tests.kernels.lookup.test_histories import ONCE
from tests.kernels.lookup.test_histories import plan as history_plan
from tests.kernels.lookup.test_lookup import OnDevice, batch_of, mixed_plan, on_the_bus, some_padding, tables_of

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1, 1), (1, 64, 1), (21, 64, 2), (126, 128, 5), (512, 512, 1), (513, 1024, 40), (1021, 1024, 3), (4093, 4096, 300),
          (4096, 4096, 1)]  # fmt: skip
CONTEXTS = "context_ids", "context_numbers"
ROWS = "request_of_row", "candidate_ids", "candidate_numbers", "carried"
# What a read that came too soon would find: rows of no request, ids outside their tables, no numbers.
POISON = {
    "request_of_row": -1,
    "context_ids": 0xA5,
    "candidate_ids": 0xA5,
    "context_numbers": np.nan,
    "candidate_numbers": np.nan,
    "carried": 0xA5,
}


class Lane:
    """A batch in pinned memory whose rows can be taken away and staged again, and a lookup that keeps its state."""

    def __init__(self, rows, bucket, contexts, once=()):
        plan = history_plan(3, 2, first_order=False) if once else mixed_plan((0, 3))
        self.rows, self.bucket = rows, bucket
        self.on_device = OnDevice(plan, tables_of(plan), "cuda:0", once=once)
        self.context_rows = torch.zeros(bucket, dtype=torch.int32, device="cuda:0") if once else None
        self.contexts = contexts if once else 0  # that the state tells of
        self.batch = on_the_bus(plan, batch_of(plan, rows, contexts, ids=some_padding, capacity=bucket))
        self.pinned = {f.name: getattr(self.batch, f.name).numpy() for f in fields(self.batch)}
        self.true = {name: memory.copy() for name, memory in self.pinned.items()}
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32, device="cuda:0")
        self.outs = [torch.zeros(bucket, width, device="cuda:0") for width in (-(-plan.x_width // 8) * 8, 1)]
        self.launches = 0

    def launch(self, ahead=True):
        self.on_device.lookup(
            self.batch, self.bucket, *self.outs, self.state, ahead=ahead, context_rows=self.context_rows
        )  # fmt: skip
        self.launches += 1

    def result(self):
        """All bits of both outputs, also where nothing was written; the state must be as a launch finds it."""
        torch.cuda.synchronize()
        want = lane_state(self.rows, "cuda:0", batch_number=self.launches)
        want[StateWord.CONTEXTS] = self.contexts
        assert torch.equal(self.state, want)
        return [out.cpu().view(torch.int32) for out in self.outs]

    def clear(self):
        for out in self.outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()

    def poison(self):
        for name, value in POISON.items():
            self.pinned[name][:] = value
        self.pinned["header"][HeaderWord.STAGED_ROWS] = -1

    def stage(self, stops, pause_s=0.0):
        """All contexts, rows up to each stop in turn, then the padding, and that all are there."""
        begin = 0
        try:
            for name in CONTEXTS:
                self.pinned[name][:] = self.true[name]
            for stop in stops:
                for name in ROWS:
                    self.pinned[name][begin:stop] = self.true[name][begin:stop]
                self.pinned["header"][HeaderWord.STAGED_ROWS] = -1 - stop
                begin = stop
                time.sleep(pause_s)
            for name, memory in self.pinned.items():
                if name != "header":
                    memory[:] = self.true[name]
        finally:  # else the device would wait for ever
            self.pinned["header"][HeaderWord.STAGED_ROWS] = self.rows

    def plain(self):
        """What a lookup that waits for nothing gives."""
        self.clear()
        self.launch(ahead=False)
        return self.result()


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("rows", "bucket", "contexts"), SHAPES)
def test_rows_that_are_all_there_come_out_as_without_waiting(rows, bucket, contexts):
    lane = Lane(rows, bucket, contexts)
    want = lane.plain()
    for _ in range(3):
        lane.clear()
        lane.launch()
        assert same(lane.result(), want)


@pytest.mark.parametrize("once", [(), ONCE])
@pytest.mark.parametrize(("rows", "bucket", "contexts"), SHAPES)
def test_rows_that_are_staged_after_the_launch_are_waited_for(rows, bucket, contexts, once):
    """Fifty times on one state, with plain launches between: whoever is last leaves it as it was."""
    lane, rng = Lane(rows, bucket, contexts, once), np.random.default_rng(rows)
    lane.launch()  # loads the kernel, which waits for the device
    want = lane.plain()
    for i in range(50):
        lane.clear()
        lane.poison()
        stops = sorted({*rng.integers(1, rows + 1, i % 7).tolist(), rows} if i % 3 else {*range(256, rows, 256)})
        lane.launch()
        if i % 2:
            time.sleep(1e-4)  # so that all blocks that can run wait
        lane.stage(stops, pause_s=float(rng.choice([0, 2e-5])))
        assert same(lane.result(), want), (i, stops)
        if i % 5 == 0:
            lane.launch(ahead=False)
            assert same(lane.result(), want)


def test_more_blocks_than_the_device_runs_at_once_wait_in_turn():
    lane = Lane(65_000, 65_536, 1000)
    lane.launch()
    want = lane.plain()
    for _ in range(5):
        lane.clear()
        lane.poison()
        lane.launch()
        lane.stage(range(4096, 65_000, 4096), pause_s=1e-4)
        assert same(lane.result(), want)


def test_launches_that_overlap_share_a_state():
    lane = Lane(1000, 1024, 7)
    lane.clear()
    lane.launch()
    want = lane.result()
    lane.clear()
    with overlapping():
        for _ in range(100):
            lane.launch()
    assert same(lane.result(), want)


def test_a_state_of_four_words_is_refused():
    lane = Lane(5, 8, 1)
    lane.state = lane.state[:4]
    with pytest.raises(ValueError, match="lookup state: got 4 words, expected 8 for rows that are staged after the launch"):
        lane.launch()
