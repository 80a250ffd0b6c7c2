"""An engine waits for its batches before it touches what they read, and its scores stay what they were while rows move."""

import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpiframe_core.embedding.follower import Follower
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.lane_pool import LanePool
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import Unavailable
from dpiframe_core.far_rows import host_rows
from dpiframe_core.graph.architecture import DeepFM
from tests import oracle
from tests.dpiframe_core.embedding.test_hot_rows import SCHEMA, drawn_moves, row_of
from tests.dpiframe_core.embedding.test_tiers import CPU, Locked
from tests.runner import small_bundle, table_tensors

ARCHITECTURE = DeepFM(hidden_units=(16, 8))


def engine_of(path):
    engine = Engine(small_bundle(path / "b", ARCHITECTURE), "cpu", None, EngineOptions(max_batch_rows=64, lanes=2))
    engine.warmup()
    return engine, oracle.make_block(engine.schema, 8, 1, np.random.default_rng(0))


class Waiting:
    """Has batches wait in their lanes, each until it is let go."""

    def __init__(self, engine, monkeypatch):
        self.inside, self.gates = threading.Semaphore(0), [threading.Event(), threading.Event(), threading.Event()]
        left = iter(self.gates)
        for lane in engine._pool.lanes:
            monkeypatch.setattr(lane, "run", self.waits(lane.run, left))

    def waits(self, run, left):
        def waited(*args):
            gate = next(left)
            self.inside.release()
            assert gate.wait(20)
            return run(*args)

        return waited


def started(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def test_batches_that_run_are_waited_for_and_those_that_begin_meanwhile_are_not(tmp_path, monkeypatch):
    engine, block = engine_of(tmp_path)
    waiting = Waiting(engine, monkeypatch)
    batches = [started(engine.submit, block)]
    assert waiting.inside.acquire(timeout=20)
    looked = threading.Event()  # at the lanes that are taken
    monkeypatch.setattr(engine, "check", looked.set)
    over = started(engine._batches_over)
    assert looked.wait(20)
    batches.append(started(engine.submit, block))
    assert waiting.inside.acquire(timeout=20)
    over.join(0.1)
    assert over.is_alive()
    waiting.gates[0].set()
    over.join(20)
    assert not over.is_alive()
    assert not waiting.gates[1].is_set()
    waiting.gates[1].set()
    for batch in batches:
        batch.join(20)
    assert engine._pool.taken() == set()
    engine._batches_over()
    engine.close()


def test_an_engine_that_closes_tells_who_waits_for_its_batches(tmp_path, monkeypatch):
    engine, block = engine_of(tmp_path)
    waiting = Waiting(engine, monkeypatch)
    batch = started(engine.submit, block)
    assert waiting.inside.acquire(timeout=20)
    said = []

    def wait():
        with pytest.raises(Unavailable) as e:
            engine._batches_over()
        said.append(str(e.value))

    over = started(wait)
    closing = started(engine.close)
    over.join(20)
    assert said == ["engine: closed"]
    waiting.gates[0].set()
    for thread in (batch, closing):
        thread.join(20)


def test_a_step_that_fails_is_not_taken_again_and_the_others_are(monkeypatch, caplog):
    monkeypatch.setattr("dpiframe_core.embedding.follower.EVERY_S", 0.001)
    taken, enough = [], threading.Event()

    def fails():
        taken.append("fails")
        raise OSError("the folder is gone")

    def goes_on():
        taken.append("goes on")
        if taken.count("goes on") > 3:
            enough.set()

    follower = Follower(torch.device("cpu"), [fails, goes_on])
    assert enough.wait(20)
    follower.close()
    assert taken.count("fails") == 1
    assert "is not followed any more: the folder is gone" in caplog.text
    after = len(taken)
    time.sleep(0.02)
    assert len(taken) == after


def test_threads_that_read_while_another_moves_rows_find_what_they_should(monkeypatch):
    """An engine's way to wait for batches, tiers that move, and batches that read by descriptors alone, all at once."""
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    rng = np.random.default_rng(0)
    tensors, _ = table_tensors(SCHEMA, oracle.make_tables(SCHEMA, rng))
    tables = [tensors[t.name] for t in SCHEMA.tables]
    places = tuple(TablePlacement(t.name, t.rows, t.rows // 2, t.rows // 2) for t in SCHEMA.tables)
    placed = Tiers(SCHEMA, tables, [None] * len(tables), Home(Placement(1, places), "m", None, replan_s=1), CPU)
    moving = [i for i, hot in enumerate(placed.moving) if hot is not None]
    lanes = [object() for _ in range(3)]
    pool = LanePool(lanes)
    wrong, ended, reads = [], threading.Event(), [0]

    def read(seed):
        own = np.random.default_rng(seed)
        while not ended.is_set():
            lane = pool.take(None, 0)
            generation = placed.generation
            for table in moving:
                time.sleep(0)  # others run between two reads of a batch
                for row in own.integers(0, len(tables[table]), 5).tolist():
                    if row_of(placed, generation, table, row) != tables[table][row].numpy().tobytes():
                        wrong.append((generation, table, row))
            reads[0] += 1
            pool.put(lane)

    threads = [started(read, seed) for seed in range(3)]
    for _ in range(30):
        moves = drawn_moves(rng, placed, [np.arange(len(t)) for t in tables])
        placed.move(moves, lambda: pool.await_taken(lambda: None))
    ended.set()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert reads[0] > 30
    placed.close()


def test_a_cpu_reads_in_place_and_moves_nothing(tmp_path):
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE)
    places = tuple(TablePlacement(t.name, t.rows, 1, 1) for t in bundle.manifest.feature_schema.tables)
    engine = Engine(bundle, "cpu", None, EngineOptions(max_batch_rows=64), Home(Placement(1, places), "m", None, replan_s=1))
    engine.warmup()
    assert engine.table_reads is None
    engine.close()


def with_files(schema, hot):
    """Of tables that ids read, half of the rows lie in files."""
    return tuple(
        TablePlacement(t.name, t.rows, *(2 * (max(1, int(t.rows * hot)),)), t.rows // 2 if t.rows > 1 else 0)
        for t in schema.tables
    )


def test_no_score_of_a_cpu_is_wrong_while_rows_of_files_are_told_to_stay(tmp_path, monkeypatch):
    """Rows are read in two lanes, of few slots, at every look of the thread that counts."""
    monkeypatch.setattr("dpiframe_core.embedding.follower.EVERY_S", 0.005)
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE, dtype=("float32", "float16", "int8"), bags=2)
    schema = bundle.manifest.feature_schema
    options = EngineOptions(max_batch_rows=64, lanes=2)
    home = Home(Placement(1, with_files(schema, 0.25)), "small", None, ahead_bytes=1 << 14, replan_s=1e-6)
    whole, engine = (Engine(bundle, "cpu", None, options, replace(home, replan_s=after)) for after in (None, home.replan_s))
    for one in (whole, engine):
        one.warmup()
    blocks = [oracle.make_block(schema, 20, 3, np.random.default_rng(i)) for i in range(8)]
    want = [whole.submit(block) for block in blocks]
    wrong, scored, staying = [], [0], [0]

    def score(first):
        for i in range(first, first + 120):
            if not np.array_equal(engine.submit(blocks[i % 8]), want[i % 8]):
                wrong.append(i)
            scored[0] += 1
            staying[0] = max(staying[0], engine.far_reads.staying)

    threads = [started(score, 40 * i) for i in range(3)]
    for thread in threads:
        thread.join(200)
    assert wrong == []
    assert scored[0] == 360
    assert staying[0] > 0  # while they are asked for
    assert engine.far_reads.promoted == 0
    assert engine.table_reads.files > 0
    assert whole.table_reads is None
    for one in (whole, engine):
        one.close()


@pytest.mark.gpu
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_no_score_of_a_gpu_is_wrong_while_rows_move(tmp_path, first_ways, seed, files):
    """Rows are read in two lanes while all that is read far comes near, at every look."""
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE, dtype=("float32", "float16", "int8"), bags=2)
    schema, rng = bundle.manifest.feature_schema, np.random.default_rng(seed)
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a disk's files cannot be locked
    places = tuple(TablePlacement(t.name, t.rows, *(2 * (max(1, t.rows // 4),))) for t in schema.tables)
    places = with_files(schema, 0.25) if files else places
    ranks = {t.name: rng.permutation(t.rows).astype(np.uint32) for t in schema.tables[::2]}
    home = Home(Placement(1, places, ranks), "small", memory, replan_s=1e-6)
    options = EngineOptions(max_batch_rows=64, policy="waves", recall=False, lanes=2)
    blocks = [oracle.make_block(schema, 50, 7, np.random.default_rng(i)) for i in range(16)]
    plain, engine = (Engine(bundle, "cuda:0", "tf32", options, own) for own in (None, home))
    for one in (plain, engine):
        one.warmup()
    want = [plain.submit(block) for block in blocks]
    end = time.monotonic() + 8
    wrong = []

    def score(first):
        at = first
        while time.monotonic() < end and not wrong:
            # Traffic that dwells on one block for a second, so that its rows come near.
            at = (at + 1) % 4 + 4 * (int(end - time.monotonic()) % 4)
            if not np.array_equal(engine.submit(blocks[at]), want[at]):
                wrong.append(at)

    threads = [started(score, i) for i in range(3)]
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.table_reads.rows_moved > 0
    if files:
        assert engine.far_reads.promoted > 0
    for one in (plain, engine):
        one.close()
    shutil.rmtree(memory)
