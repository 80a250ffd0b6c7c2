"""Rows that move between a GPU's memory and the host's: whatever moves, and whoever reads meanwhile, an id leads to its row."""

import ctypes
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from dpiframe_core.embedding import shards
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.hot_rows import HotRows, Move, place_bytes
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.far_rows import host_rows
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.models.build import build_graph
from kernels.lookup import embedding
from kernels.lookup.descriptors import TABLE, whole
from kernels.lookup.embedding import DeviceLookup
from tests import oracle
from tests.dpiframe_core.embedding.test_shards import Exported, Mapped
from tests.dpiframe_core.embedding.test_tiers import ARCHITECTURE, CPU, DTYPES, Locked, looked_up
from tests.kernels import host_cuda
from tests.runner import scale_tensors, table_tensors

ARRIVE, CATCH_UP = HotRows.arrive, HotRows.catch_up
SEGMENT = np.dtype([("base", "<u8"), ("end", "<i8")])
SCHEMA = oracle.make_schema(dtype=("float32", "float16"), one_hot=3, context=1, bags=1, embedded_numbers=1)
SLOTS = 3


def row_of(placed, generation, table, row, schema=SCHEMA):
    """The bytes that a lookup of a generation finds, by nothing but what its descriptors say."""
    record = placed.descriptors.tables.numpy().view(TABLE).reshape(2, -1)[generation][table]
    segments = placed.descriptors.segments.numpy().view(SEGMENT).reshape(2, -1)[generation]
    assert row < record["rows"]
    place = row
    if record["ranks"]:
        place = int.from_bytes(ctypes.string_at(int(record["ranks"]) + 4 * row, 4), "little")
    begin = 0
    for at in range(record["next"] - 1, record["next"] - 1 + record["segments"]):
        base, end = segments[at]
        if place < end:
            size = schema.tables[table].row_bytes
            return ctypes.string_at(int(base) + int(place - begin) * size, size)
        begin = end
    raise AssertionError(f"place {place} of row {row} is behind all segments")


def home_of(schema, folder, gpus, seed, *, files=False):
    """Of every kind: rows in every tier or in few, in the order of ids or in any other."""
    rng = np.random.default_rng(seed)
    made = []
    for t in schema.tables:
        hot, warm, held = sorted(int(n) for n in rng.integers(0, t.rows + 1, 3))
        many = t.rows > 1
        made.append(TablePlacement(t.name, t.rows, hot, warm if gpus > 1 else hot, t.rows - held if files and many else 0))
    ranks = {t.name: rng.permutation(t.rows).astype(np.uint32) for t in schema.tables if rng.random() < 0.5}
    return Home(Placement(gpus, tuple(made), ranks), "small", folder, replan_s=1)


def drawn_moves(rng, placed, held):
    """Some rows of each table, of those that a memory holds, into any slots of those that its table shares."""
    moves, free = [], {}
    for table, moving in enumerate(placed.moving):
        if moving is not None:
            slots = free.setdefault(id(moving.slots), rng.permutation(len(moving.slots.rows)).tolist())
            n = min(len(held[table]), len(slots), int(rng.integers(1, 1 + len(moving.slots.rows))))
            moves.append(Move(table, rng.permutation(held[table])[:n], np.array([slots.pop() for _ in range(n)], np.int64)))
    return moves


class Machine(RuleBasedStateMachine):
    """Two processes of a host, whose batches each are of the generation that was told when they began. A batch may read at any
    time until it ends; who changes where rows lie waits for batches, and new ones begin meanwhile.
    """

    @initialize(seed=st.integers(0, 10_000), gpus=st.integers(1, 3))
    def start(self, seed, gpus):
        self.folder = tempfile.TemporaryDirectory()
        rng = np.random.default_rng(seed)
        tensors, _ = table_tensors(SCHEMA, oracle.make_tables(SCHEMA, rng))
        self.tables = [tensors[t.name] for t in SCHEMA.tables]
        self.rows = {  # the plain model: what each id reads
            (table, row): values[row].numpy().tobytes()
            for table, values in enumerate(self.tables)
            for row in range(len(values))
        }
        self.home = home_of(SCHEMA, Path(self.folder.name), gpus, seed)
        self.processes = [self.process() for _ in range(2)]
        self.batches = [[], []]

    def process(self):
        return Tiers(SCHEMA, self.tables, [None] * len(self.tables), self.home, CPU)

    def check(self, placed, generation):
        for (table, row), values in self.rows.items():
            assert row_of(placed, generation, table, row) == values, (table, row)

    def over(self, which, *, fails=False):
        """What `Tiers` waits for: batches read once more and end, while others begin."""

        def waited():
            placed = self.processes[which]
            for generation in [*self.batches[which], placed.generation]:
                self.check(placed, generation)
            if fails:
                raise Unavailable("engine: closed")
            self.batches[which] = [placed.generation]

        return waited

    def watched(self, which):
        """Batches read after each step of a change; a generation that one is of is not written to."""
        placed = self.processes[which]

        def generations():
            return [*self.batches[which], placed.generation]

        def arrive(hot, *of):
            ARRIVE(hot, *of)
            for generation in generations():
                self.check(placed, generation)

        def catch_up(hot, generation):
            assert generation not in generations()
            CATCH_UP(hot, generation)

        return mock.patch.multiple(HotRows, arrive=arrive, catch_up=catch_up)

    @rule(which=st.integers(0, 1))
    def a_batch_begins(self, which):
        self.batches[which].append(self.processes[which].generation)

    @precondition(lambda self: any(self.batches))
    @rule(which=st.integers(0, 1))
    def a_batch_ends(self, which):
        del self.batches[which][:1]

    @rule(which=st.integers(0, 1), seed=st.integers(0, 10_000), fails=st.booleans())
    def rows_move(self, which, seed, fails):
        rng = np.random.default_rng(seed)
        placed = self.processes[which]
        moves = drawn_moves(rng, placed, [np.arange(len(t)) for t in self.tables])
        before = placed.generation
        if not fails:
            with self.watched(which):
                assert placed.move(moves, self.over(which)) == sum(len(move.rows) for move in moves)
            assert placed.generation == before  # twice round
            return
        with self.watched(which), pytest.raises(Unavailable):
            placed.move(moves, self.over(which, fails=True))
        self.batches[which] = []  # the engine closes, but nothing is wrong before all is over

    @rule(which=st.integers(0, 1))
    def others_are_looked_for(self, which):
        self.processes[which].refresh(lambda: None, self.over(which))

    @rule(which=st.integers(0, 1))
    def a_process_is_replaced(self, which):
        self.processes[which].close()
        self.processes[which].descriptors = None
        self.processes[1 - which].refresh(lambda: None, self.over(1 - which))
        self.processes[which], self.batches[which] = self.process(), []

    @invariant()
    def every_batch_reads_what_it_should(self):
        for placed, batches in zip(self.processes, self.batches, strict=True):
            for generation in {placed.generation, *batches}:
                self.check(placed, generation)

    def teardown(self):
        for placed in self.processes:
            placed.close()
        self.folder.cleanup()


class Kept(Exported):
    """Others have it mapped for some seconds more."""

    def close(self):
        pass


def without_a_gpu(monkeypatch):
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    monkeypatch.setattr(shards, "ExportedMemory", Kept)
    monkeypatch.setattr(shards, "MappedMemory", Mapped)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


def test_ids_lead_to_their_rows_whatever_moves_while_batches_read(monkeypatch):
    without_a_gpu(monkeypatch)
    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=10, deadline=None))


@pytest.mark.parametrize("seed", range(3))
def test_lookups_are_bit_equal_to_those_of_whole_tables_while_rows_move(tmp_path, monkeypatch, run_folder, seed):
    """The kernel itself, on the host: batches of both generations, ids that are no rows, rows of files."""
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    without_a_gpu(monkeypatch)
    schema = oracle.make_schema(dtype=DTYPES, bags=2)
    rng = np.random.default_rng(seed)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    tables, scales = [tensors[t.name] for t in schema.tables], [scale_tensors(schema).get(t.name) for t in schema.tables]
    (node,) = (n for n in fuse(build_graph(ARCHITECTURE, schema, 1)).nodes if n.op == "lookup")
    plan, home = plan_lookup(node, schema), home_of(schema, tmp_path, 1 + seed, seed, files=seed == 2)
    store = EmbeddingStore(schema, tensors, CPU, scale_tensors(schema), home)
    placed = Tiers(schema, tables, scales, home, CPU, store.spares)
    assert placed.moves
    lookup = DeviceLookup(store.placed(plan), placed.descriptors, torch.float32)
    of_whole = DeviceLookup(plan, whole(tables, scales, CPU), torch.float32)
    blocks = [oracle.make_block(schema, 20, 4, rng, wild=wild) for wild in (False, True)]
    want = [torch.cat(looked_up(of_whole, block), 1) for block in blocks]
    outside = int(of_whole._descriptors.out_of_range)

    def read(generations):
        for block, expected in zip(blocks, want, strict=True):
            with leased(store.ahead, [block]) as (ready,):
                for generation in generations:
                    assert torch.equal(torch.cat(looked_up(lookup, ready, generation), 1), expected)

    read([0])
    assert int(placed.descriptors.out_of_range) == outside
    for _ in range(3):
        held = [np.zeros(0, np.int64)] * len(tables)
        for table, moving in enumerate(placed.moving):
            if moving is not None:
                rows = np.flatnonzero(placed.tiers_of(table, np.arange(len(tables[table]))) < 3)
                if store.ahead is not None:  # rows of files stay there
                    p, ranks = home.placement.tables[table], home.placement.ranks.get(schema.tables[table].name)
                    rows = rows[(rows if ranks is None else ranks[rows]) < p.held]
                held[table] = rows
        moves = drawn_moves(rng, placed, held)
        former = placed.generation
        placed.move(moves, lambda former=former: read([placed.generation] + [former] * (placed.generation != former)))
        read([placed.generation])
        for move in moves:
            assert (placed.tiers_of(move.table, move.rows) == 0).all()
    placed.close()
    store.close()


def test_where_nothing_is_nearer_or_all_is_near_nothing_moves(monkeypatch):
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    tensors, _ = table_tensors(SCHEMA, oracle.make_tables(SCHEMA, np.random.default_rng(0)))
    tables = [tensors[t.name] for t in SCHEMA.tables]
    places = [TablePlacement(t.name, t.rows, *(2 * (t.rows if i % 2 else 0,))) for i, t in enumerate(SCHEMA.tables)]
    placed = Tiers(SCHEMA, tables, [None] * len(tables), Home(Placement(1, tuple(places)), "m", None, replan_s=1), CPU)
    assert not placed.moves
    assert place_bytes(places) == 0
    with pytest.raises(InputError, match=r"move\.table: got 0, expected one whose rows may move"):
        placed.move([Move(0, np.zeros(1, np.int64), np.zeros(1, np.int64))], lambda: None)
    placed.close()


def test_a_table_moves_only_if_its_places_fit_words_of_32_bits():
    assert HotRows.move(TablePlacement("t", 2**31, 2**30, 2**30), 0)
    assert not HotRows.move(TablePlacement("t", 2**32 - 5, 5, 5), 0)
