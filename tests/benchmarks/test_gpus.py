"""The suite of several GPUs without one: kernels on the emulator, others' memory by its address, collectives by gloo."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpus import collective, grid, large, loading, one_sided, places, repeated
from benchmarks.gpus.group import Group
from benchmarks.timing import Times
from dpiframe_core.embedding import shards
from dpiframe_core.embedding.placement import Links
from dpiframe_core.embedding.spares import Spares
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.engine.staging import Staging
from dpiframe_core.far_rows import host_rows
from dpiframe_core.far_rows.rows_ahead import RowsAhead
from kernels.lookup import embedding
from kernels.lookup.descriptors import whole
from tests.benchmarks.tiny import unexpected
from tests.dpiframe_core.embedding.test_shards import Exported, Mapped
from tests.dpiframe_core.embedding.test_tiers import CPU, Locked
from tests.kernels import host_cuda

ROOT = Path(__file__).parents[2]
ZEROS = torch.zeros


class Replayed:
    """In the place of `Captured`."""

    def __init__(self, work, holds=()):
        self._work = work
        work()

    def __call__(self):
        self._work()

    def replays_us(self, repeats):
        begin = time.perf_counter()
        self._work()
        return (time.perf_counter() - begin) * 1e6

    def close(self):
        pass


class Store:
    """In the place of `EmbeddingStore`, as if the CPU were a GPU; with a home beside a second process's."""

    def __init__(self, schema, tables, device, scales, home):
        ordered, none = [tables[t.name] for t in schema.tables], [None] * len(schema.tables)
        self.spares = self.ahead = None
        if home is not None and home.source is not None:
            self.spares = Spares(schema, home.placement, ordered, 1 << 20, readable=False)
            self.ahead = RowsAhead(self.spares.groups, schema.block_layout, home.source)
        spares = self.spares.rows if self.spares else ()
        self.all = [] if home is None else [Tiers(schema, ordered, none, home, device, spares) for _ in range(2)]
        self.descriptors = self.all[0].descriptors if home else whole(ordered, none, CPU)
        self.shared = bool(self.all) and self.all[0].shared
        self.generation, self.bytes_used, self.host_bytes = 0, 0, 0

    def placed(self, plan):
        return EmbeddingStore.placed(self, plan)

    @property
    def shares_missing(self):
        return self.all[0].shares_missing

    def refresh(self, place, over):
        if self.all[0].refresh(place, over):
            self.generation = 1

    def close(self):
        for t in (*self.all, *((self.ahead, self.spares) if self.ahead else ())):
            t.close()


class Unpinned(Staging):
    """Without a GPU no memory is pinned."""

    def __init__(self, layout, rows):
        with mock.patch.object(torch, "zeros", lambda *of, pin_memory=False, **how: ZEROS(*of, **how)):
            super().__init__(layout, rows)


class Two(Group):
    """As if a second process did the same."""

    def __init__(self):
        self.rank, self.size, self.device = 0, 2, CPU

    def pooled(self, values):
        return [*values, *values]


@pytest.fixture
def emulated(monkeypatch, run_folder, tmp_path):
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    monkeypatch.setattr(shards, "ExportedMemory", Exported)
    monkeypatch.setattr(shards, "MappedMemory", Mapped)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(one_sided, "EmbeddingStore", Store)
    monkeypatch.setattr(one_sided, "Captured", Replayed)
    monkeypatch.setattr(one_sided, "FOLDER", tmp_path)
    monkeypatch.setattr(one_sided, "compiled", lambda *_, **__: None)
    for part in (grid, places, large):
        monkeypatch.setattr(part, "compiled", lambda *_, **__: None)
    monkeypatch.setattr(repeated, "PATTERN", 8192)


def test_of_turns_the_middle_one_counts_and_a_system_that_fails_leaves_the_others():
    p50 = {"a": iter([5.0, 1.0, 9.0, 3.0, 4.0]), "b": iter([2.0, 8.0])}  # the third turn of b fails
    order, failures = [], []

    def turn(system):
        order.append(system)
        return Times(next(p50[system]), 0.0, 1), 0.0, 0.0

    found = places.in_turns({s: partial(turn, s) for s in p50}, lambda what, _: failures.append(what))
    assert {s: times.p50_us for s, (times, *_) in found.items()} == {"a": 4.0}
    assert order == [*"ababab", *"aa"]
    assert failures == ["b, one of its turns"]


def test_the_grid_has_a_record_of_each_system_and_cell_whose_values_are_right(emulated):
    found = list(grid.run(Group(), [grid.Set(2, 40, 32)], [5], [1, 4], grid.SYSTEMS, unexpected, seconds=0.0, seed=0))
    assert [(r["system"], r["cell"]["pooling"]) for r in found] == [
        ("one-sided", 1),
        ("one-sided", 4),
        ("nccl", 1),
        ("nccl", 4),
    ]
    shared = grid.run(Two(), [grid.Set(3, 41, 32)], [5], [4], ["one-sided"], unexpected, seconds=0.0, seed=0, alone=False)
    assert [r["cell"]["gpus"] for r in shared] == [2]


def test_three_placements_are_measured_and_the_plan_reads_the_host_no_more_than_they_do(emulated):
    given = {"hbm_bytes": 16 << 10, "tables": 2, "dim": 16, "pooling": 2, "links": Links(), "seconds": 0.0, "seed": 0}
    found = list(places.run(Two(), [0.5, 4], [0.8], [6], unexpected, **given))
    assert [r["system"] for r in found] == 2 * list(places.SYSTEMS)
    assert [r["reads"]["hot"] for r in found[:3]] == [1, 0, 1]
    replicated, partitioned, ours = (r["reads"] for r in found[3:])
    assert ours["cold"] < replicated["cold"]
    assert ours["cold"] == pytest.approx(partitioned["cold"], abs=0.2)


def test_a_placement_that_cannot_be_held_leaves_the_others_measured(emulated, monkeypatch):
    lookups, failures, measured = [], [], places.measured

    def noted(group, lookup, *of, **how):
        lookups.append(lookup)
        return measured(group, lookup, *of, **how)

    monkeypatch.setattr(places, "measured", noted)
    made = iter([ValueError("no room"), None])
    given = {"hbm_bytes": 16 << 10, "tables": 2, "dim": 16, "pooling": 2, "links": Links(), "seconds": 0.0, "seed": 0}

    def lookup_over(*of):
        if failure := next(made, None):
            raise failure
        return one_sided.lookup_over(*of)

    monkeypatch.setattr(places, "lookup_over", lookup_over)
    found = list(places.run(Two(), [4], [0.8], [6], lambda what, _: failures.append(what), **given))
    assert [r["system"] for r in found] == ["partitioned", "one-sided"]
    assert [what.split()[0] for what in failures] == ["replicated"]
    first, second, *more = lookups
    assert (first is not second, more) == (True, 4 * [first, second])
    assert all(np.isfinite(one._descriptors.cold_reads) for one in (first, second))
    alone = list(places.run(Group(), [4], [0.8], [6], unexpected, **given))
    assert [r["system"] for r in alone] == ["replicated", "one-sided"]


def test_tables_that_repeat_a_file_are_as_long_as_wished_and_begin_elsewhere_in_it(monkeypatch):
    monkeypatch.setattr(repeated, "PATTERN", 8192)
    with repeated.repeated("ab", 20_000, 32, seed=3) as tables:
        want = np.random.default_rng(3).standard_normal((8192, 32), np.float32).astype(np.float16)
        begin = 7919 * 4096 // 64 % 8192
        assert (tables["a"].numpy() == want[np.arange(20_000) % 8192]).all()
        assert (tables["b"].numpy() == want[(np.arange(20_000) + begin) % 8192]).all()


def test_tables_of_a_repeated_pattern_are_looked_up(emulated):
    given = {"tables": 3, "dim": 32, "zipf": 1.05, "links": Links(), "seconds": 0.0, "seed": 0}
    found = list(large.run(Two(), 3 * 5000 * 64, 200_000, [7], **given))
    assert [r["all_rows"] for r in found] == [15_000]
    assert found[0]["stages_s"].keys() == {"memory", "locked", "copied", "awaited", "share"}


def test_rows_of_a_pattern_for_which_the_host_has_no_room_are_read_as_if_from_files(emulated, monkeypatch):
    monkeypatch.setattr(large, "Staging", Unpinned)
    monkeypatch.setattr(large, "_NEW", 3)
    given = {"tables": 3, "dim": 32, "zipf": 0.8, "links": Links(), "seconds": 0.0, "seed": 0, "host_bytes": 500_000}
    found = list(large.run(Two(), 3 * 5000 * 64, 100_000, [40], **given))
    assert [r["system"] for r in found] == ["one-sided", "files"]
    assert found[0]["files"] > 0.05
    assert found[0]["cell"]["files_mib"] == 0  # 0.3
    assert found[0]["hot"] + found[0]["warm"] + found[0]["cold"] + found[0]["files"] == pytest.approx(1, abs=1e-3)


def test_tables_of_files_are_loaded(emulated, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_forget", lambda: None)
    found = list(loading.run(Two(), tmp_path / "files", 3 * 500 * 64, tables=3, dim=32, seed=0))
    assert [r["cell"]["cached"] for r in found] == [False, True]
    assert not (tmp_path / "files").exists()


COLLECTIVE = """
import torch
from benchmarks.gpus.collective import FORMS, Collective, Share
from benchmarks.gpus.group import Group
from benchmarks.timing import Times
group = Group()
tables = torch.randn(3, 10, 8, generator=torch.Generator().manual_seed(1)).half()
ids = [torch.randint(0, 10, (5, 6), generator=torch.Generator().manual_seed(group.rank), dtype=torch.int32)]
want = torch.cat([tables[t][ids[0][:, 2 * t : 2 * t + 2].long()].double().sum(1) for t in range(3)], 1)
own = tables[:, 5 * group.rank : 5 * group.rank + 5].contiguous()
for form in FORMS:
    got = Collective(group, Share(own, 5 * group.rank), ids, 2, form)(0)
    assert (got.double() - want).abs().max() < 0.01, form
assert group.most(group.rank) == 1
assert group.bytes(bytes([7, group.rank])) == [bytes([7, 0]), bytes([7, 1])]
group.close()
"""


@pytest.mark.slow
def test_collectives_of_two_processes_give_each_the_sums_of_its_own_bags(tmp_path):
    (tmp_path / "job.py").write_text(COLLECTIVE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*start, "--nproc-per-node", "2", tmp_path / "job.py"], check=True, timeout=120, env=environment)


def test_sums_of_a_share_are_of_its_own_rows_alone():
    weight = torch.arange(12).view(1, 6, 2).half()
    out = torch.full((2, 2), torch.nan, dtype=torch.float16)
    ids = torch.tensor([[0, 5, 11], [4, 10, 12]], dtype=torch.int32)
    collective.pooled(collective.Share(weight, 5), ids, 3, out)
    assert out.tolist() == [[0.0, 1.0], [10.0, 11.0]]
