"""Rows in the GPU's memory and in the host's, in any order: lookups and scores are those of tables that lie whole."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.far_rows import host_rows
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DeepFM
from dpiframe_core.models.build import build_graph
from kernels.lookup import embedding
from kernels.lookup.descriptors import whole
from kernels.lookup.embedding import DeviceLookup
from kernels.lookup.plan import Batch
from kernels.runtime.host_memory import PrivateMemory
from tests import oracle
from tests.kernels import host_cuda
from tests.kernels.lane_state import lane_state
from tests.runner import scale_tensors, small_bundle, table_tensors

ARCHITECTURE = DeepFM(hidden_units=(16, 8))
DTYPES = ("float32", "float16", "int8")
CPU = torch.device("cpu")


class Locked:
    """In the place of `DeviceReadable`, without a GPU."""

    def __init__(self, memory):
        self.address, self.closed = memory.data_ptr(), False

    def close(self):
        self.closed = True


def home_of(schema, folder, seed=0, name="small"):
    """Of every kind of table: all hot, none, some; in the order of ids, and in any other."""
    rng = np.random.default_rng(seed)
    tables = [TablePlacement(t.name, t.rows, hot := int(rng.integers(0, t.rows + 1)), hot) for t in schema.tables]
    ranks = {t.name: rng.permutation(t.rows).astype(np.uint32) for t in schema.tables if rng.random() < 0.5}
    return Home(Placement(1, tuple(tables), ranks, cold_reads=2.5), name, folder)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shared", [True, False])
def test_a_lookup_over_a_placement_is_bit_equal_to_one_over_whole_tables(tmp_path, monkeypatch, run_folder, seed, shared):
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    schema = oracle.make_schema(dtype=DTYPES, bags=2)
    rng = np.random.default_rng(seed)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    tables = [tensors[t.name] for t in schema.tables]
    scales = [scale_tensors(schema).get(t.name) for t in schema.tables]
    (node,) = (n for n in fuse(build_graph(ARCHITECTURE, schema, 1)).nodes if n.op == "lookup")
    plan, block = plan_lookup(node, schema), oracle.make_block(schema, 20, 4, rng)
    placed = Tiers(schema, tables, scales, home_of(schema, tmp_path if shared else None, seed), CPU)
    found = [looked_up(DeviceLookup(plan, d, torch.float32), block) for d in (placed.descriptors, whole(tables, scales, CPU))]
    for of_tiers, of_whole in zip(*found, strict=True):
        assert torch.equal(of_tiers, of_whole)
    assert placed.descriptors.cold_reads == 2.5  # as planned
    assert len(list(tmp_path.iterdir())) == int(shared)
    placed.close()
    assert list(tmp_path.iterdir()) == []


def looked_up(lookup, block, generation=0):
    rows = block.rows
    header = torch.zeros(16, dtype=torch.int32)
    header[10], header[11] = rows, block.contexts
    arrays = block.request_of_row, block.context_ids, block.candidate_ids, block.context_dense, block.candidate_dense
    x = torch.full((rows, -(-lookup.plan.x_width // 8) * 8), torch.nan)
    total, state = torch.full((rows, 1), torch.nan), lane_state(0, CPU, generation=generation)
    lookup(Batch(header, *(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)), rows, x, total, state)
    return x[:, : lookup.plan.x_width], total


def test_a_second_process_or_engine_takes_the_rows_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    tables, none = [tensors[t.name] for t in schema.tables], [None] * len(schema.tables)
    home = home_of(schema, tmp_path)
    first = Tiers(schema, tables, none, home, CPU)
    second = Tiers(schema, [torch.zeros_like(t) for t in tables], none, home, CPU)  # of the same name: what is in it is taken
    other = Tiers(schema, tables, none, home_of(schema, tmp_path, seed=1), CPU)
    assert torch.equal(first._host._memory.bytes, second._host._memory.bytes)
    assert first._host._memory.bytes.any()
    assert len(list(tmp_path.iterdir())) == 2
    for one in (first, second, other):
        one.close()
    assert list(tmp_path.iterdir()) == []


def changed(home, **other):
    p = home.placement
    return Home(
        Placement(other.get("gpus", p.gpus), other.get("tables", p.tables), other.get("ranks", p.ranks)), home.name, None
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: changed(h, tables=h.placement.tables[1:]), "tables: got .* expected the model's, "),
        (
            lambda h: changed(h, ranks={"c1": np.zeros(10, np.uint32)}),
            "of c1: got 'a rank twice', expected each of 10 once",
        ),
        (lambda h: changed(h, ranks={"c1": np.arange(1, 11, dtype=np.uint32)}), r"ranks of c1: got .* an order of 10 rows"),
    ],
)
def test_a_placement_of_other_tables_is_refused(change, said):
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    tables = [tensors[t.name] for t in schema.tables]
    with pytest.raises(InputError, match=said):
        Tiers(schema, tables, [None] * len(tables), change(home_of(schema, None)), CPU)


def test_memory_that_may_not_be_locked_is_said_and_given_back(tmp_path, monkeypatch):
    def refused(memory):
        raise RuntimeError("host memory: got cudaErrorMemoryAllocation for 5 bytes, expected to lock them")

    monkeypatch.setattr(host_rows, "DeviceReadable", refused)
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    tables = [tensors[t.name] for t in schema.tables]
    with pytest.raises(Unavailable, match=r"host tables: got host memory: got cudaErrorMem.* expected memory for 0\.0 GiB"):
        Tiers(schema, tables, [None] * len(tables), home_of(schema, tmp_path), CPU)
    assert list(tmp_path.iterdir()) == []


def test_memory_that_the_host_refuses_is_said(monkeypatch):
    monkeypatch.setattr(host_rows, "PrivateMemory", lambda nbytes: PrivateMemory(nbytes and 1 << 60))
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    tables = [tensors[t.name] for t in schema.tables]
    with pytest.raises(Unavailable, match=r"host tables: got .*memory.*, expected memory for 0\.0 GiB of rows"):
        Tiers(schema, tables, [None] * len(tables), home_of(schema, None), CPU)


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("replan_s", [None, 1])
def test_ids_at_the_borders_of_tiers_and_beyond_the_last_row_read_as_from_whole_tables(
    monkeypatch, run_folder, ranked, replan_s
):
    """Places that rows have behind the last one, where rows move, are no ids."""
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    schema = oracle.make_schema(context=0, bags=0, embedded_numbers=0)
    rng = np.random.default_rng(0)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    tables, none = [tensors[t.name] for t in schema.tables], [None] * len(schema.tables)
    (node,) = (n for n in fuse(build_graph(ARCHITECTURE, schema, 1)).nodes if n.op == "lookup")
    plan = plan_lookup(node, schema)
    places = tuple(TablePlacement(t.name, t.rows, t.rows // 3, 2 * t.rows // 3) for t in schema.tables)
    ranks = {t.name: np.arange(t.rows, dtype=np.uint32)[::-1].copy() for t in schema.tables} if ranked else {}
    placed = Tiers(schema, tables, none, Home(Placement(2, places, ranks), "small", None, replan_s=replan_s), CPU)
    assert placed.moves == (replan_s is not None)
    every = sorted({0, 255, *(at for t in schema.tables for b in (t.rows // 3, 2 * t.rows // 3, t.rows, t.rows + t.rows // 3)
                              for at in (b - 1, b, b + 1))})  # fmt: skip
    block = oracle.make_block(schema, len(every), 1, rng)
    for f in schema.features:
        if f.is_id:
            block.column(schema.columns[f.name])[:, 0] = every
    found, wants = (DeviceLookup(plan, d, torch.float32) for d in (placed.descriptors, whole(tables, none, CPU)))
    for generation in range(2):
        for got, want in zip(looked_up(found, block, generation), looked_up(wants, block), strict=True):
            assert torch.equal(got, want)
    assert int(placed.descriptors.out_of_range) == int(wants._descriptors.out_of_range) > 0
    placed.close()


def test_a_folder_whose_memory_cannot_be_locked_is_not_used(tmp_path, monkeypatch, caplog):
    asked = []

    def of_memory_alone(memory):
        asked.append(len(memory))
        if len(asked) == 1:
            raise RuntimeError("host memory: got cudaErrorInvalidValue")
        return Locked(memory)

    monkeypatch.setattr(host_rows, "DeviceReadable", of_memory_alone)
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    tables = [tensors[t.name] for t in schema.tables]
    placed = Tiers(schema, tables, [None] * len(tables), home_of(schema, tmp_path), CPU)
    assert asked == [placed.host_bytes] * 2
    assert "this process keeps" in caplog.text
    assert list(tmp_path.iterdir()) == []
    placed.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_scores_alike_from_tables_that_it_reads_in_place(tmp_path, dtype):
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE, dtype=dtype, bags=2)
    block = oracle.make_block(bundle.manifest.feature_schema, 50, 7, np.random.default_rng(3))
    plain, mapped = (
        Engine(bundle, "cpu", None, EngineOptions(max_batch_rows=64), home)
        for home in (None, home_of(bundle.manifest.feature_schema, None))
    )
    assert mapped.warmup().golden_error <= 1e-5
    plain.warmup()
    np.testing.assert_allclose(mapped.submit(block), plain.submit(block), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["auto", "waves", "breadth_first"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_scores_bit_equal_wherever_rows_lie(tmp_path, first_ways, dtype, policy):
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE, dtype=dtype, bags=2)
    schema = bundle.manifest.feature_schema
    block = oracle.make_block(schema, 50, 7, np.random.default_rng(3))
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a disk's files cannot be locked
    options = EngineOptions(max_batch_rows=64, policy=policy, recall=False)
    homes = [None, home_of(schema, memory), home_of(schema, None, seed=1)]
    engines = [Engine(bundle, "cuda:0", "tf32", options, home) for home in homes]
    for engine in engines:
        engine.warmup()
    assert len(list(memory.iterdir())) == 1
    if policy != "auto":  # which takes what is fastest, in each engine for itself
        want, *found = [engine.submit(block) for engine in engines]
        for scores in found:
            np.testing.assert_array_equal(scores, want)
    for engine in engines:
        engine.close()
    memory.rmdir()  # for nothing is left in it
