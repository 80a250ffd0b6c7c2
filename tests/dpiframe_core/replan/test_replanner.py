"""What is read most comes into the GPU's memory, when traffic changes; how reads are sampled, counted and forgotten."""

import threading

import numpy as np
import pytest
import torch

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.far_rows import host_rows
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table
from dpiframe_core.replan import recent_reads
from dpiframe_core.replan.chosen_moves import chosen_moves
from dpiframe_core.replan.read_sample import EVERY_S, ReadSample
from dpiframe_core.replan.recent_reads import RecentReads
from dpiframe_core.replan.replanner import Replanner, TableReads
from tests.dpiframe_core.embedding.test_tiers import CPU, Locked
from tests.dpiframe_core.replan.blocks import block_of

ROWS, HOT, DIM = 2000, 100, 8
SCHEMA = FeatureSchema(
    features=(
        Categorical(name="user", scope="context", values="int", encoder=Identity(), table="u", missing_id=0, oov_id=1),
        Categorical(name="item", values="int", encoder=Identity(), table="i", first_order_table="i_w", missing_id=0, oov_id=1),
    ),
    tables=(Table(name="u", rows=ROWS, dim=DIM), Table(name="i", rows=ROWS, dim=DIM), Table(name="i_w", rows=ROWS, dim=1)),
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def placed_on(monkeypatch, move_bytes=1 << 20):
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    places = tuple(TablePlacement(t.name, ROWS, HOT, HOT) for t in SCHEMA.tables)
    home = Home(Placement(1, places), "m", None, replan_s=60, move_bytes=move_bytes)
    tables = [torch.arange(ROWS * t.dim, dtype=torch.float32).view(ROWS, t.dim) for t in SCHEMA.tables]
    return Tiers(SCHEMA, tables, [None] * 3, home, CPU), home


class Traffic:
    """Zipf's law over an order of the rows that may change."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.upto, self.order = np.cumsum(np.arange(1, ROWS + 1) ** -1.2), np.arange(ROWS)

    def block(self):
        users, items = (self.order[np.searchsorted(self.upto, self.rng.random(n) * self.upto[-1])] for n in (4, 128))
        return block_of(SCHEMA, users, items)


def hot_share(replanner, traffic, clock, seconds):
    """Of reads during so long a time."""
    before = replanner.reads
    for _ in range(int(seconds / 0.5)):
        for _ in range(5):
            clock.now += EVERY_S + 1e-6
            replanner.sample.offer([traffic.block()])
        replanner.step()
    after = replanner.reads
    return (after.hot - before.hot) / (sum_of(after) - sum_of(before))


def sum_of(reads: TableReads) -> int:
    return reads.hot + reads.peers + reads.host + reads.files


def test_the_share_of_hot_reads_recovers_when_other_rows_become_hot(monkeypatch):
    placed, home = placed_on(monkeypatch)
    clock, traffic, turns = Clock(), Traffic(), []
    replanner = Replanner(SCHEMA, placed, None, home, lambda: turns.append(placed.generation), clock=clock)
    planned = hot_share(replanner, traffic, clock, 50)
    assert planned > 0.7
    assert replanner.reads.rows_moved == 0
    traffic.order = np.random.default_rng(5).permutation(ROWS)
    drifted = hot_share(replanner, traffic, clock, 5)
    assert drifted < 0.3
    hot_share(replanner, traffic, clock, 130)  # two times that rows move
    assert hot_share(replanner, traffic, clock, 30) > 0.95 * planned
    assert replanner.reads.rows_moved > HOT
    assert turns == [1, 0] * (len(turns) // 2)
    placed.close()


def test_traffic_that_stays_moves_next_to_nothing_after_a_while(monkeypatch):
    placed, home = placed_on(monkeypatch)
    clock, traffic = Clock(), Traffic(seed=1)
    replanner = Replanner(SCHEMA, placed, None, home, lambda: None, clock=clock)
    hot_share(replanner, traffic, clock, 200)
    before = replanner.reads.rows_moved
    hot_share(replanner, traffic, clock, 120)
    assert replanner.reads.rows_moved - before < 0.2 * HOT * len(SCHEMA.tables)
    placed.close()


def test_a_move_takes_no_more_bytes_than_it_may_and_the_best_rows_first(monkeypatch):
    placed, _ = placed_on(monkeypatch)
    ids = np.arange(HOT, HOT + 50)
    counts = np.arange(50, 0, -1) * 10.0
    none = np.zeros(0, np.int64), np.zeros(0)
    sizes = [t.row_bytes for t in SCHEMA.tables]
    (first,) = chosen_moves([(ids, counts), none, none], placed.moving, sizes, 7 * sizes[0] + 3)
    assert (first.table, first.rows.tolist()) == (0, list(range(HOT, HOT + 7)))
    assert sorted(first.slots.tolist()) == list(range(HOT - 7, HOT))  # what was planned to be read least
    # A read of the small row spares the host as much, and takes fewer bytes.
    (small,) = chosen_moves([none, (ids, counts), (ids, counts)], placed.moving, sizes, 50 * sizes[2])
    assert small.table == 2
    assert chosen_moves([none] * 3, placed.moving, sizes, 1 << 20) == []
    assert chosen_moves([none] * 3, [None] * 3, sizes, 1 << 20) == []
    placed.close()


def test_a_table_that_is_read_more_takes_slots_of_another_whose_rows_have_its_form(monkeypatch):
    placed, _ = placed_on(monkeypatch)
    users, items, weights = placed.moving
    assert users.slots is items.slots
    assert users.slots is not weights.slots
    ids, none = np.arange(HOT, HOT + 150), (np.zeros(0, np.int64), np.zeros(0))
    counted = [(ids, np.full(150, 9.0)), (np.arange(HOT - 20), np.full(HOT - 20, 9.0)), none]
    (move,) = chosen_moves(counted, placed.moving, [t.row_bytes for t in SCHEMA.tables], 1 << 20)
    slots = np.sort(move.slots)
    assert (move.table, len(move.rows)) == (0, HOT + 20)  # all of the own slots, and those whose items nobody reads
    assert slots.tolist() == [*range(HOT), *range(2 * HOT - 20, 2 * HOT)]
    assert placed.move([move], lambda: None) == HOT + 20
    assert (placed.tiers_of(0, np.arange(HOT)) == 2).all()
    assert np.count_nonzero(placed.tiers_of(0, ids) == 0) == HOT + 20
    assert placed.tiers_of(1, np.arange(HOT)).tolist() == [0] * (HOT - 20) + [2] * 20
    (back,) = chosen_moves([none, (np.arange(HOT), np.full(HOT, 9.0)), none], placed.moving, [32, 32, 4], 1 << 20)
    assert sorted(back.rows.tolist()) == list(range(HOT - 20, HOT))
    assert sorted(back.slots.tolist()) == list(range(2 * HOT - 20, 2 * HOT))  # its own again
    placed.close()


def test_a_warm_row_comes_only_for_reads_that_outweigh_those_from_the_host(monkeypatch):
    """Who goes was hot at first, and is read in the host's memory then: a row takes 20 ns, a warm one 0.04 ns of its link."""
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    table = SCHEMA.tables[0]
    schema = FeatureSchema(features=SCHEMA.features[:1], tables=(table,))
    home = Home(Placement(2, (TablePlacement("u", ROWS, HOT, 2 * HOT),)), "m", None, replan_s=60)
    placed = Tiers(schema, [torch.zeros(ROWS, DIM)], [None], home, CPU)
    hot = placed.moving[0]
    ids = np.arange(HOT + 1)

    def moved(of_the_warm_one, gpus=2):
        counts = np.concatenate([np.full(HOT, 5.0), [of_the_warm_one]])
        return [m.rows.tolist() for m in chosen_moves([(ids, counts)], [hot], [table.row_bytes], 1 << 20, gpus)]

    assert moved(1000.0) == []
    assert moved(5000.0) == [[HOT]]
    # One that the host has comes at once, and one that came from there is worth its reads.
    far = np.array([2 * HOT])
    (move,) = chosen_moves([(far, np.array([3.0]))], [hot], [table.row_bytes], 1 << 20, 2)
    assert move.rows.tolist() == far.tolist()
    assert hot.warm(np.array([HOT - 1, HOT, 2 * HOT - 1, 2 * HOT])).tolist() == [False, True, True, False]
    placed.close()


def test_a_row_that_is_read_hardly_more_often_does_not_take_the_place_of_another(monkeypatch):
    placed, _ = placed_on(monkeypatch)
    near, far = np.arange(HOT), np.array([HOT, HOT + 1, HOT + 2])
    counts = np.concatenate([np.full(HOT, 10.0), [16.0, 17.0, 9.0]])
    counted = [(np.concatenate([near, far]), counts), (near, np.full(HOT, 10.0))]
    (move,) = chosen_moves(counted, placed.moving[:2], [32, 32], 1 << 20)
    assert move.rows.tolist() == [HOT + 1]
    placed.close()


def test_reads_are_told_by_the_tier_that_serves_them(monkeypatch):
    placed, home = placed_on(monkeypatch)
    replanner = Replanner(SCHEMA, placed, None, home, lambda: None)
    # 3 rows of user 5; items: hot, host, and none at all, which reads row 1.
    replanner.sample.offer([block_of(SCHEMA, [5], [7, HOT, ROWS + 9])])
    replanner.step()
    assert replanner.reads == TableReads(hot=3 + 2 * 2, peers=0, host=2, files=0, rows_moved=0)
    assert replanner._recent[1].counted()[0].tolist() == [1, 7, HOT]
    placed.close()


def test_a_sample_is_a_copy_of_some_rows_now_and_then():
    clock = Clock()
    sample = ReadSample(SCHEMA.block_layout, clock)
    block = block_of(SCHEMA, [3, 4], np.arange(1000))
    clock.now = 1.0
    sample.offer([block])
    sample.offer([block_of(SCHEMA, [9], [9])])  # too soon
    block.buffer[:] = 255  # the memory is another request's now
    clock.now += 2 * EVERY_S
    sample.offer([block_of(SCHEMA, [9], [8])])
    many, one = sample.take()
    items = many.column(SCHEMA.columns["item"])[:, 0].astype(int)
    assert len(items) == 256
    assert (np.diff(items) == 1).all()
    users = many.column(SCHEMA.columns["user"])[:, 0][many.request_of_row]
    assert (users == 3 + items % 2).all()
    assert one.column(SCHEMA.columns["item"]).tolist() == [[8]]
    assert sample.take() == []


def test_samples_that_nobody_counts_take_no_more_memory_than_some():
    clock = Clock()
    sample = ReadSample(SCHEMA.block_layout, clock)
    for i in range(1000):
        clock.now = float(i)
        sample.offer([block_of(SCHEMA, [1], [1])])
    assert len(sample.take()) == 64


def test_threads_offer_and_take_at_once():
    sample = ReadSample(SCHEMA.block_layout)
    taken, stop = [], threading.Event()

    def offer():
        while not stop.is_set():
            sample.offer([block_of(SCHEMA, [1], [1])])

    threads = [threading.Thread(target=offer) for _ in range(2)]
    for t in threads:
        t.start()
    while len(taken) < 3:
        taken += sample.take()
    stop.set()
    for t in threads:
        t.join()
    assert all(b.rows == 1 for b in taken)


def test_counts_add_up_fade_and_are_forgotten():
    recent = RecentReads()
    recent.add(np.array([5, 3, 5]), np.array([1, 2, 3]))
    recent.add(np.array([3]), np.array([1]))
    ids, counts = recent.counted()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 3.0, 5: 4.0}
    recent.add(np.array([7]), np.array([1]))
    recent.fade(0.5)
    recent.add(np.array([5]), np.array([1]))
    recent.fade(0.5)
    ids, counts = recent.counted()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 0.75, 5: 1.5}


@pytest.mark.parametrize("distinct", [9, 10, 40])
def test_no_more_rows_are_counted_than_memory_is_meant_for(monkeypatch, distinct):
    monkeypatch.setattr(recent_reads, "MOST_ROWS", 10)
    recent = RecentReads()
    ids = np.random.default_rng(0).permutation(distinct)
    recent.add(ids, ids + 1)
    kept, counts = recent.counted()
    assert kept.tolist() == list(range(max(0, distinct - 10), distinct))
    assert (counts == kept + 1).all()
