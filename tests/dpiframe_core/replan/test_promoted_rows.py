"""Rows that only files hold come into nearer memory and go again: a lease leads to its rows before, meanwhile and after."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.errors import Overloaded, TooLarge, Unavailable
from dpiframe_core.far_rows import host_rows, near_rows, rows_ahead
from dpiframe_core.far_rows.far_reads import FarReads
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.far_rows.row_source import FileRows
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table
from dpiframe_core.graph.graph import Attrs, Node, Source
from dpiframe_core.replan.replanner import Replanner
from kernels.lookup import embedding
from kernels.lookup.descriptors import whole
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.mapped_lookup import MappedLookup
from tests.dpiframe_core.embedding.test_hot_rows import row_of
from tests.dpiframe_core.embedding.test_tiers import CPU, Locked, looked_up
from tests.dpiframe_core.replan.blocks import block_of
from tests.kernels import host_cuda

ROWS, DIM, OOV = 40, 3, 2
HELD = {"u": 12, "i": 10, "i_w": 20}
HOT = {"u": 4, "i": 5, "i_w": 6}
SCHEMA = FeatureSchema(
    features=(
        Categorical(name="user", scope="context", values="int", encoder=Identity(), table="u", missing_id=0, oov_id=OOV),
        Categorical(
            name="item", values="int", encoder=Identity(), table="i", first_order_table="i_w", missing_id=0, oov_id=OOV
        ),
    ),
    tables=(Table(name="u", rows=ROWS, dim=DIM), Table(name="i", rows=ROWS, dim=DIM), Table(name="i_w", rows=ROWS, dim=1)),
)
PLAN = plan_lookup(
    Node(
        "lookup", "lookup", (), ("x", "t"), "embedding",
        attrs=Attrs(concat=(Source("user", "u", DIM), Source("item", "i", DIM)), total=(Source("item", "i_w", 1),)),
    ),
    SCHEMA,
)  # fmt: skip
TABLES = {
    t.name: 100 * i + torch.arange(ROWS * t.dim, dtype=torch.float32).view(ROWS, t.dim) for i, t in enumerate(SCHEMA.tables)
}
PLAIN = {(name, row): values[row].tolist() for name, values in TABLES.items() for row in range(ROWS)}


class Files(FileRows):
    """Which fail while they are `broken`. `asked`: the tables and ids that were read."""

    broken = False

    def __init__(self, tables=TABLES):
        super().__init__([tables[t.name] for t in SCHEMA.tables])
        self.asked, self.mapped = [], None

    def parts(self, ids):
        return [np.arange(len(ids))[i::2] for i in range(min(2, len(ids)))]

    def read(self, wanted):
        if self.broken:
            raise OSError("the disk is gone")
        self.asked += [(SCHEMA.tables[table].name, row) for table, ids in wanted for row in ids.tolist()]
        return super().read(wanted)


def home_of(source, slots, *, ranks=None, hot=HOT, move_bytes=1 << 20):
    places = tuple(TablePlacement(t.name, ROWS, hot[t.name], hot[t.name], ROWS - HELD[t.name]) for t in SCHEMA.tables)
    # Of an item's two tables 16 bytes, of a user's 12: as many slots for each.
    return Home(Placement(1, places, ranks or {}), "m", None, 28 * slots, source, replan_s=1, move_bytes=move_bytes)


def drawn_ranks(seed):
    rng = np.random.default_rng(seed)
    return {t.name: rng.permutation(ROWS).astype(np.uint32) for t in SCHEMA.tables if rng.random() < 0.5}


def waited(ahead, block, source):
    """A lease whose rows are there; None: there is no room for them, or the source is broken."""
    try:
        lease = ahead.lease(block)
    except (Overloaded, TooLarge):
        return None
    try:
        lease.wait()
    except Unavailable:
        assert source.broken
        lease.close()
        return None
    return lease


def drawn_block(rng):
    """Ids of which few are read often."""
    ids = [np.minimum((rng.pareto(0.7, n) * 3).astype(int) + int(rng.integers(0, 30)), ROWS - 1) for n in (2, 4)]
    return block_of(SCHEMA, *ids)


def expected(users, items):
    """By the plain dict."""
    each = [users[i % len(users)] for i in range(len(items))]
    x = [[*PLAIN["u", u], *PLAIN["i", i]] for u, i in zip(each, items, strict=True)]
    return torch.tensor(x), torch.tensor([PLAIN["i_w", i] for i in items])


def ids_of(block):
    return [block.column(SCHEMA.columns[name])[:, 0].astype(int).tolist() for name in ("user", "item")]


class OnACpu(RuleBasedStateMachine):
    """Leases that are opened, read and closed at any time, while rows are told to stay in host memory, over files that fail."""

    @initialize(seed=st.integers(0, 1000), slots=st.integers(4, 14))
    def start(self, seed, slots):
        self.rng, self.source, self.open = np.random.default_rng(seed), Files(), []
        home = home_of(self.source, slots, ranks=drawn_ranks(seed))
        self.store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
        self.lookup = MappedLookup(PLAN, self.store.tables, spares=self.store.spares)
        self.replanner = Replanner(SCHEMA, None, self.store.ahead, home, lambda: None)

    @rule(often=st.integers(1, 3))
    def a_lease_is_opened(self, often):
        block = drawn_block(self.rng)
        for _ in range(often):
            if (lease := waited(self.store.ahead, block, self.source)) is None:
                return
            self.open.append((lease, *ids_of(block)))

    @precondition(lambda self: self.open)
    @rule()
    def a_lease_is_closed(self):
        self.open.pop(int(self.rng.integers(len(self.open))))[0].close()

    @rule(steps=st.integers(1, 3))
    def what_was_asked_for_is_counted_and_stays(self, steps):
        for _ in range(steps):
            self.replanner.step()
            self.replanner.move()

    @rule()
    def files_fail_or_do_not_any_more(self):
        self.source.broken = not self.source.broken

    @rule()
    def rows_that_are_late_read_that_of_unknown_values(self):
        block = drawn_block(self.rng)
        try:
            lease = self.store.ahead.lease(block)
        except (Overloaded, TooLarge):
            return
        failed = [read for read in lease.reads if read.exception(10)]
        assert (lease.settle() > 0) == bool(failed)
        users, items = ids_of(block)
        x, total = self.read(lease.block)
        want = [*expected(users, items), *expected([OOV] * len(users), [OOV] * len(items))]
        assert all(torch.equal(row, want[0][i]) or failed for i, row in enumerate(x))
        for i in range(len(items)):
            assert torch.equal(x[i, DIM:], want[0][i, DIM:]) == torch.equal(total[i], want[1][i])
            assert torch.equal(x[i, DIM:], want[0][i, DIM:]) or torch.equal(x[i, DIM:], want[2][i, DIM:])
        lease.close()

    def read(self, block):
        return self.lookup.read(block)

    @invariant()
    def every_open_lease_reads_its_rows(self):
        for lease, users, items in self.open:
            for got, want in zip(self.read(lease.block), expected(users, items), strict=True):
                assert torch.equal(got, want)

    def teardown(self):
        for lease, *_ in self.open:
            lease.close()
        assert self.store.ahead.held == 0
        self.store.close()


def test_leases_read_what_a_plain_dict_has_while_rows_are_told_to_stay_in_host_memory():
    run_state_machine_as_test(OnACpu, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


class OnAGpu(RuleBasedStateMachine):
    """Leases of which batches run, each of the generation that was told when it began; rows come into the GPU's memory and go,
    in place of such as the host has, while leases are open. The device is the host here: what descriptors say is followed.
    """

    @initialize(seed=st.integers(0, 1000), slots=st.integers(5, 14), cold=st.booleans())
    def start(self, seed, slots, cold):
        """cold: whether the host has rows that are not hot."""
        self.rng, self.source = np.random.default_rng(seed), Files()
        home = home_of(self.source, slots, ranks=drawn_ranks(seed), hot=HOT if cold else HELD)
        self.store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
        self.placed = Tiers(SCHEMA, list(TABLES.values()), [None] * 3, home, CPU, self.store.spares)
        self.replanner = Replanner(SCHEMA, self.placed, self.store.ahead, home, self.over, self.check)
        self.open, self.batches = [], []

    @rule()
    def a_lease_is_opened(self):
        block = drawn_block(self.rng)
        if (lease := waited(self.store.ahead, block, self.source)) is not None:
            self.open.append((lease, *ids_of(block)))

    @precondition(lambda self: self.open)
    @rule()
    def a_batch_begins(self):
        lease = self.open[int(self.rng.integers(len(self.open)))]
        self.batches.append((lease, self.placed.generation))

    @precondition(lambda self: self.open)
    @rule()
    def a_lease_is_closed(self):
        own = self.open.pop(int(self.rng.integers(len(self.open))))
        self.batches = [b for b in self.batches if b[0] is not own]
        own[0].close()

    @rule(late=st.booleans())
    def rows_move(self, late):
        for table in range(3):
            ids = np.unique((self.rng.pareto(0.7, 30) * 3).astype(int) + self.rng.integers(0, ROWS))
            ids = ids[ids < ROWS]
            self.replanner._recent[table].add(ids, self.rng.integers(1, 60, len(ids)))
        self.late = late
        self.replanner.step()
        self.replanner.move()

    @rule()
    def files_fail_or_do_not_any_more(self):
        self.source.broken = not self.source.broken

    def check(self):
        """While it is waited for leases some are closed; or none, for too long."""
        self.every_batch_reads_its_rows()
        if self.open and not self.late and self.rng.random() < 0.3:
            self.a_lease_is_closed()

    def over(self):
        self.every_batch_reads_its_rows()
        self.batches = [(lease, self.placed.generation) for lease in self.open]  # others begin meanwhile

    @invariant()
    def every_batch_reads_its_rows(self):
        now = [(lease, self.placed.generation) for lease in self.open]
        for (lease, *asked), generation in (*self.batches, *now):
            for found, wanted, of in zip(ids_of(lease.block), asked, (("u",), ("i", "i_w")), strict=True):
                for row, original in zip(found, wanted, strict=True):
                    for name in of:
                        table = list(TABLES).index(name)
                        assert row_of(self.placed, generation, table, row, SCHEMA) == TABLES[name][original].numpy().tobytes()

    @invariant()
    def a_row_of_files_lies_in_the_gpus_memory_in_all_its_tables_or_in_none(self):
        ids = np.arange(ROWS)
        for group, tables in enumerate(((0,), (1, 2))):
            near = self.store.ahead.near.promoted(group, ids)
            for hot in (self.placed.moving[table] for table in tables):
                files = hot.in_files(ids)
                assert ((hot.slot_of(ids) >= 0)[files] == near[files]).all()
        assert self.store.ahead.found.near == sum(self.store.ahead.near.promoted(g, ids).sum() for g in range(2))

    def teardown(self):
        for lease, *_ in self.open:
            lease.close()
        self.placed.close()
        self.store.close()


def test_leases_read_what_they_should_while_rows_of_files_come_into_the_gpus_memory_and_go(monkeypatch):
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    monkeypatch.setattr(near_rows, "_PATIENCE_S", 0.02)
    run_state_machine_as_test(OnAGpu, settings=settings(max_examples=60, stateful_step_count=20, deadline=None))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Served:
    """A store whose device is the host, with rows in the order of ids, and a replanner. Items' reads are `counted` by hand."""

    def __init__(self, monkeypatch, *, slots=12, check=lambda: None, hot=HOT, move_bytes=1 << 20, over=lambda: None):
        monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
        monkeypatch.setattr(near_rows, "_PATIENCE_S", 0.02)
        self.source = Files()
        home = home_of(self.source, slots, hot=hot, move_bytes=move_bytes)
        self.store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
        self.placed = Tiers(SCHEMA, list(TABLES.values()), [None] * 3, home, CPU, self.store.spares)
        self.replanner = Replanner(SCHEMA, self.placed, self.store.ahead, home, over, check)

    def counted(self, items, times=50):
        for table in (1, 2):
            self.replanner._recent[table].add(np.array(items), np.full(len(items), times))
        self.replanner.move()

    def near(self):
        """Items of files that lie in the GPU's memory."""
        return np.flatnonzero(self.store.ahead.near.promoted(1, np.arange(ROWS))).tolist()

    def close(self):
        self.placed.close()
        self.store.close()


def test_a_row_of_files_that_is_read_often_comes_is_read_no_more_and_goes_when_others_are_read(monkeypatch):
    served = Served(monkeypatch)
    served.counted([30, 31])
    assert served.near() == [30, 31]
    assert (served.placed.tiers_of(1, np.array([30, 31, 32])) == [0, 0, 3]).all()
    asked = len(served.source.asked)
    with leased(served.store.ahead, [block_of(SCHEMA, [0], [30, 31])]) as (ready,):
        assert ids_of(ready)[1] == [30, 31]
    assert len(served.source.asked) == asked
    assert served.store.ahead.found == FarReads(promoted=2, near=2)
    served.counted([33, 34, 35, 36, 37, 38])  # there are six places for weights
    assert not {30, 31} & set(served.near())
    assert len(served.near()) == 6
    with leased(served.store.ahead, [block_of(SCHEMA, [0], [30, 33])]) as (ready,):
        assert ids_of(ready)[1][0] >= ROWS
        assert ids_of(ready)[1][1] == 33
    served.close()


def test_a_row_comes_in_all_tables_that_its_id_reads_in_files_or_in_none(monkeypatch):
    served = Served(monkeypatch, hot={"u": 4, "i": 5, "i_w": 1})  # there is one place for weights
    served.counted([30, 31, 32])
    assert len(served.near()) == 1
    served.counted([12, 13, 14])  # whose weights the host has: they need no place
    assert {12, 13, 14} <= set(served.near())
    served.close()


def test_a_row_that_a_lease_holds_stays_until_that_is_closed(monkeypatch):
    served = Served(monkeypatch, hot={"u": 1, "i": 1, "i_w": 1})
    served.counted([30])
    lease = served.store.ahead.lease(block_of(SCHEMA, [0], [30]))
    users = np.arange(20, 24)
    served.replanner._recent[0].add(users, np.full(4, 90))
    served.counted([31], times=500)
    ids = served.near()
    assert 30 in ids
    assert row_of(served.placed, served.placed.generation, 1, 30, SCHEMA) == TABLES["i"][30].numpy().tobytes()
    lease.close()
    served.counted([31], times=500)
    assert 30 not in served.near()
    assert 31 in served.near()
    served.close()


def test_an_engine_that_closes_ends_the_wait_for_leases(monkeypatch):
    def closed():
        raise Unavailable("engine: closed")

    served = Served(monkeypatch, check=closed, hot={"u": 1, "i": 1, "i_w": 1})
    monkeypatch.setattr(near_rows, "_PATIENCE_S", 60)
    served.counted([30])
    with leased(served.store.ahead, [block_of(SCHEMA, [0], [30])]), pytest.raises(Unavailable, match="engine: closed"):
        served.counted([31], times=500)
    served.close()


def test_rows_that_cannot_be_read_stay_in_files_and_come_when_they_can(monkeypatch):
    served = Served(monkeypatch)
    served.source.broken = True
    served.counted([30, 31])
    assert served.near() == []
    assert (served.placed.tiers_of(1, np.array([30, 31])) == 3).all()
    served.source.broken = False
    served.counted([30, 31])
    assert served.near() == [30, 31]
    served.close()


def test_a_promoted_row_is_never_late(monkeypatch):
    served = Served(monkeypatch)
    served.counted([30])
    served.source.broken = True
    lease = served.store.ahead.lease(block_of(SCHEMA, [0], [30, 31]))
    assert [type(read.exception(10)) for read in lease.reads] == [OSError]
    assert lease.settle() == 1
    assert ids_of(lease.block)[1] == [30, OOV]
    lease.close()
    near = served.store.ahead.lease(block_of(SCHEMA, [0], [30]))
    assert not near.reads
    assert near.settle() == 0
    near.close()
    served.close()


def test_no_more_bytes_of_files_come_at_a_time_than_may_move(monkeypatch):
    served = Served(monkeypatch, move_bytes=2 * (4 * DIM + 4) + 3)
    served.counted(range(25, 32))
    assert 1 <= len(served.near()) <= 2
    served.close()


def test_a_sample_counts_rows_of_files_by_their_ids_wherever_they_lie(monkeypatch):
    served = Served(monkeypatch)
    served.counted([30])
    with leased(served.store.ahead, [block_of(SCHEMA, [25], [30, 31, 31])]) as (ready,):
        assert ids_of(ready)[1][1] >= ROWS
        served.replanner.sample.offer([ready])
        served.replanner.step()
    assert served.replanner._recent[0].counted()[0].tolist() == [25]
    ids, counts = served.replanner._recent[1].counted()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True))[31] == 2
    reads = served.replanner.reads
    assert (reads.hot, reads.host, reads.files) == (2, 0, 3 + 4)  # the user's 3, an item's embeddings and weights
    served.close()


def test_a_new_version_begins_with_what_its_placement_says(monkeypatch):
    served = Served(monkeypatch)
    served.counted([30])
    other = Served(monkeypatch)
    assert other.near() == []
    with leased(other.store.ahead, [block_of(SCHEMA, [0], [30])]) as (ready,):
        assert ids_of(ready)[1][0] >= ROWS
    served.close()
    other.close()


def test_on_a_cpu_rows_that_are_asked_for_often_outlive_those_that_pass():
    source = Files()
    home = home_of(source, 8)
    store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
    replanner = Replanner(SCHEMA, None, store.ahead, home, lambda: None)

    def asked(items):
        before = len([row for table, row in source.asked if table == "i"])
        with leased(store.ahead, [block_of(SCHEMA, [0], items)]):
            pass
        return len([row for table, row in source.asked if table == "i"]) - before

    for _ in range(3):
        asked([20, 21, 22, 23])
    replanner.step()
    replanner.move()
    assert store.ahead.found.staying == 4
    for start in range(24, 40, 2):
        asked([start, start + 1])
    assert asked([20, 21, 22, 23]) == 0
    assert store.ahead.found == FarReads(memory=12, file=4 + 16, staying=4)
    for _ in range(6):
        replanner.move()  # nobody asks for them any more
    assert store.ahead.found.staying == 0
    store.close()


def test_rows_that_stay_leave_a_quarter_of_the_slots_to_others():
    home = home_of(Files(), 8)
    store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
    replanner = Replanner(SCHEMA, None, store.ahead, home, lambda: None)
    for _ in range(4):
        with leased(store.ahead, [block_of(SCHEMA, [0], np.arange(20, 28))]):
            pass
    replanner.step()
    replanner.move()
    assert store.ahead.found.staying == 6
    with leased(store.ahead, [block_of(SCHEMA, [0], np.arange(30, 38))]):  # who needs all slots has them
        pass
    store.close()


def test_what_nobody_counts_takes_no_more_memory_than_some_leases(monkeypatch):
    monkeypatch.setattr(rows_ahead, "_MOST_KEYS", 6)
    store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home_of(Files(), 8))
    for counts in (False, True):
        for item in range(20, 40):
            for _ in range(10):
                with leased(store.ahead, [block_of(SCHEMA, [0], [item])]):
                    pass
        asked = store.ahead.asked()
        # The last ones: of item 39, the second of two groups.
        assert [keys.tolist() for keys in asked] == ([[ROWS + 39]] * 6 if counts else [])
        assert store.ahead.asked() == []
        store.ahead.count()
    for item in range(20, 40):
        for _ in range(10):
            with leased(store.ahead, [block_of(SCHEMA, [0], [item])]):
                pass
    assert len(store.ahead._asked) == 128
    store.close()


def test_a_cpu_tells_reads_of_the_host_and_of_files_apart():
    home = home_of(Files(), 8)
    store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
    replanner = Replanner(SCHEMA, None, store.ahead, home, lambda: None)
    with leased(store.ahead, [block_of(SCHEMA, [0, 30], [3, 15, 30])]) as (ready,):
        replanner.sample.offer([ready])
    replanner.step()
    # Users 0 (twice) and 30; items 3 by both tables, 15 by its weight alone, 30 by none.
    assert (replanner.reads.host, replanner.reads.files) == (2 + 2 + 1, 1 + 1 + 2)
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_reads_bit_equal_rows_before_during_and_after_they_come(monkeypatch, run_folder, seed):
    """The kernel itself, on the host: leases of before, of meanwhile and of after, batches of both generations."""
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    monkeypatch.setattr(near_rows, "_PATIENCE_S", 0.02)
    rng = np.random.default_rng(seed)
    home = home_of(Files(), 24, ranks=drawn_ranks(seed))
    store = EmbeddingStore(SCHEMA, TABLES, CPU, None, home)
    placed = Tiers(SCHEMA, list(TABLES.values()), [None] * 3, home, CPU, store.spares)
    lookup = DeviceLookup(store.placed(PLAN), placed.descriptors, torch.float32)
    of_whole = DeviceLookup(PLAN, whole(list(TABLES.values()), [None] * 3, CPU), torch.float32)
    blocks = [drawn_block(rng), block_of(SCHEMA, [ROWS, 39], [*range(ROWS - 6, ROWS + 4)])]  # ids that are none's, too
    want = [torch.cat(looked_up(of_whole, block), 1) for block in blocks]
    held = [store.ahead.lease(blocks[0])]
    held[0].wait()

    def read(generations):
        for block, expected_rows in zip(blocks, want, strict=True):
            with leased(store.ahead, [block]) as (ready,):
                for generation in generations:
                    assert torch.equal(torch.cat(looked_up(lookup, ready, generation), 1), expected_rows)
        for lease in held:
            assert torch.equal(torch.cat(looked_up(lookup, lease.block, placed.generation), 1), want[0])

    former, came = 0, []
    replanner = Replanner(SCHEMA, placed, store.ahead, home, lambda: read({former, placed.generation}))
    for _ in range(4):
        for table in range(3):
            ids = np.unique(rng.integers(0, ROWS, 8))
            replanner._recent[table].add(ids, rng.integers(1, 90, len(ids)))
        former = placed.generation
        replanner.move()
        read({placed.generation})
        came.append(store.ahead.found.near)
        held[0].close()
        held = [store.ahead.lease(blocks[0])]
        held[0].wait()
    assert max(came) > 0
    held[0].close()
    placed.close()
    store.close()
