"""Warm rows on several GPUs: whoever holds a share and whoever comes and goes, lookups read the rows that they should."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.embedding import shards
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.far_rows import host_rows
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.models.build import build_graph
from kernels.lookup import embedding
from kernels.lookup.descriptors import whole
from kernels.lookup.embedding import DeviceLookup
from tests import oracle
from tests.dpiframe_core.embedding.test_tiers import ARCHITECTURE, CPU, DTYPES, Locked, looked_up
from tests.kernels import host_cuda
from tests.runner import scale_tensors, small_bundle, table_tensors


class Exported:
    """In the place of `ExportedMemory`, without a GPU: a handle is the number of one of these."""

    made: ClassVar[list["Exported"]] = []

    def __init__(self, nbytes, device):
        self.bytes, self.handle = torch.zeros(nbytes, dtype=torch.uint8), str(len(self.made)).encode()
        self.address = self.bytes.data_ptr()
        self.made.append(self)

    def close(self):
        self.bytes.fill_(0xEE)  # what nobody may read any more: no number of the tables


class Mapped:
    def __init__(self, handle, device):
        if handle == b"stale":
            raise RuntimeError("device memory: got cudaErrorInvalidResourceHandle, expected a handle")
        self.address, self.closed = Exported.made[int(handle)].address, False

    def close(self):
        self.closed = True


def home_of(schema, folder, gpus, seed=0):
    rng = np.random.default_rng(seed)
    tables = []
    for t in schema.tables:
        hot, warm = sorted(int(n) for n in rng.integers(0, t.rows + 1, 2))
        tables.append(TablePlacement(t.name, t.rows, hot, warm))
    ranks = {t.name: rng.permutation(t.rows).astype(np.uint32) for t in schema.tables if rng.random() < 0.5}
    return Home(Placement(gpus, tuple(tables), ranks), "small", folder)


class Process:
    """What one process has: its tiers and a lookup over them."""

    def __init__(self, schema, plan, tables, scales, home):
        self.tiers = Tiers(schema, tables, scales, home, CPU)
        self.lookup = DeviceLookup(plan, self.tiers.descriptors, torch.float32)

    def follow(self):
        """As the engine does; whether anything changed."""
        return self.tiers.refresh(self.lookup.place, lambda: None)

    def scores(self, block):
        return torch.cat(looked_up(self.lookup, block, self.tiers.generation), 1)


@pytest.mark.parametrize(("gpus", "seed"), [(2, 0), (3, 1), (3, 2)])
def test_every_process_reads_the_same_rows_while_others_come_go_and_are_replaced(tmp_path, monkeypatch, run_folder, gpus, seed):
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    monkeypatch.setattr(shards, "ExportedMemory", Exported)
    monkeypatch.setattr(shards, "MappedMemory", Mapped)
    monkeypatch.setattr(shards, "GRACE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    schema = oracle.make_schema(dtype=DTYPES, bags=2)
    rng = np.random.default_rng(seed)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    tables = [tensors[t.name] for t in schema.tables]
    scales = [scale_tensors(schema).get(t.name) for t in schema.tables]
    (node,) = (n for n in fuse(build_graph(ARCHITECTURE, schema, 1)).nodes if n.op == "lookup")
    plan, block = plan_lookup(node, schema), oracle.make_block(schema, 20, 4, rng)
    want = torch.cat(looked_up(DeviceLookup(plan, whole(tables, scales, CPU), torch.float32), block), 1)
    home = home_of(schema, tmp_path, gpus, seed)
    made = [Process(schema, plan, tables, scales, home) for _ in range(gpus + 1)]  # one more than there are slots
    for p in made:
        assert torch.equal(p.scores(block), want)
    assert [p.follow() for p in made] == [True] * (gpus - 1) + [False] * 2  # the last two have found all others
    for p in made:
        assert None not in p.tiers._shards.bases
        assert torch.equal(p.scores(block), want)
    gone = made.pop(0)
    gone.tiers.close()
    for p in made[:-1]:
        assert p.follow()
        assert torch.equal(p.scores(block), want)
    assert made[-1].follow()  # takes the slot that is free now
    for p in made:
        p.follow()
        assert None not in p.tiers._shards.bases
        assert not p.follow()
        assert torch.equal(p.scores(block), want)
    for p in made:
        p.tiers.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"] * gpus


def test_a_share_that_this_device_does_not_reach_is_read_from_the_host(tmp_path, monkeypatch, run_folder, caplog):
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    monkeypatch.setattr(shards, "ExportedMemory", Exported)
    monkeypatch.setattr(shards, "MappedMemory", lambda handle, device: Mapped(b"stale", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    schema = oracle.make_schema()
    rng = np.random.default_rng(0)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    tables, none = [tensors[t.name] for t in schema.tables], [None] * len(schema.tables)
    (node,) = (n for n in fuse(build_graph(ARCHITECTURE, schema, 1)).nodes if n.op == "lookup")
    plan, block = plan_lookup(node, schema), oracle.make_block(schema, 20, 4, rng)
    want = torch.cat(looked_up(DeviceLookup(plan, whole(tables, none, CPU), torch.float32), block), 1)
    first, second = (Process(schema, plan, tables, none, home_of(schema, tmp_path, 2)) for _ in range(2))
    assert "shard 0 of small" in caplog.text
    assert "is read from host memory: device memory: got cudaErrorInvalidResourceHandle" in caplog.text
    assert not second.follow()  # nor is it told twice
    assert caplog.text.count("shard 0") == 1
    assert second.tiers._shards.bases[0] is None
    for p in (first, second):
        assert torch.equal(p.scores(block), want)
        p.tiers.close()


CHILD = """
import sys
from pathlib import Path
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from tests.dpiframe_core.embedding.test_shards import home_of
bundle = read_bundle(sys.argv[1])
engine = Engine(bundle, "cuda:0", "tf32", EngineOptions(max_batch_rows=64, policy="waves", recall=False),
                home_of(bundle.manifest.feature_schema, Path(sys.argv[2]), 2))
engine.warmup()
print(engine._store.shares_missing, flush=True)
sys.stdin.read()
"""


def child(bundle, memory, gpu):
    made = subprocess.Popen(
        [sys.executable, "-c", CHILD, bundle, memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    )  # fmt: skip
    return made, made.stdout.readline()


# On one GPU or on two: processes share memory by the same handles. The other process sees its own GPU alone, as Ray has it.
@pytest.mark.parametrize("gpu", [pytest.param(None, marks=pytest.mark.gpu), pytest.param("1", marks=pytest.mark.gpu2)])
@pytest.mark.slow
def test_no_score_is_wrong_while_a_process_that_shares_rows_is_killed_and_another_comes(tmp_path, first_ways, gpu):
    small_bundle(tmp_path / "b", ARCHITECTURE, dtype=DTYPES, bags=2)
    bundle = read_bundle(tmp_path / "b")
    schema = bundle.manifest.feature_schema
    block = oracle.make_block(schema, 50, 7, np.random.default_rng(3))
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a disk's files cannot be locked
    options = EngineOptions(max_batch_rows=64, policy="waves", recall=False)
    plain, engine = (Engine(bundle, "cuda:0", "tf32", options, home) for home in (None, home_of(schema, memory, 2)))
    plain.warmup()
    want = plain.submit(block)
    engine.warmup()
    seen, load = set(), ThreadPoolExecutor(4)

    def score(seconds, there=None):
        """Scores without a pause, several requests at once, until the other's share is there, or gone; each is right."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for scores in load.map(engine.submit, [block] * 16):
                np.testing.assert_array_equal(scores, want)
            now = engine._store.shares_missing == 0
            seen.add((now, engine._store.generation))
            if now == there:
                return
        assert there is None, "the other process was not found, or not missed"

    for _ in range(2):
        other, said = child(tmp_path / "b", memory, gpu)
        assert said == "0\n"
        score(60, there=True)
        score(1)
        os.kill(other.pid, signal.SIGKILL)
        score(60, there=False)
        score(6)  # until what it had shared is unmapped
        other.communicate()
    assert {there for there, _ in seen} == {True, False}
    for one in (plain, engine):
        one.close()
    shutil.rmtree(memory)
