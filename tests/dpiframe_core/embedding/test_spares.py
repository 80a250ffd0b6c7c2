"""Rows that only files hold: lookups and scores are those of tables that lie whole, on both devices."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dpiframe_core.embedding import spares as spares_file
from dpiframe_core.embedding.home import Home
from dpiframe_core.embedding.layout import plan_lookup
from dpiframe_core.embedding.placement import Placement, TablePlacement
from dpiframe_core.embedding.store import EmbeddingStore
from dpiframe_core.embedding.tiers import Tiers
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.far_rows import host_rows
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.architecture import DeepFM
from dpiframe_core.models.build import build_graph
from kernels.lookup import embedding
from kernels.lookup.descriptors import whole
from kernels.lookup.embedding import DeviceLookup
from tests import oracle
from tests.dpiframe_core.embedding.test_tiers import Locked, looked_up
from tests.kernels import host_cuda
from tests.runner import scale_tensors, small_bundle, table_tensors

ARCHITECTURE = DeepFM(hidden_units=(16, 8))
DTYPES = ("float32", "float16", "int8")
CPU = torch.device("cpu")


def home_of(schema, seed=0, folder=None, ahead_bytes=1 << 20):
    """Tables that ids read have rows in files, in the order of ids or in any other; a feature's two tables alike or not."""
    rng = np.random.default_rng(seed)
    tables, ranks = [], {}
    for t in schema.tables:
        hot, held = sorted(int(n) for n in rng.integers(0, t.rows + 1, 2))
        tables.append(TablePlacement(t.name, t.rows, hot, hot, t.rows - held if t.rows > 1 else 0))
        if rng.random() < 0.5 and t.rows > 1:
            ranks[t.name] = rng.permutation(t.rows).astype(np.uint32)
    return Home(Placement(1, tuple(tables), ranks), "small", folder, ahead_bytes)


@pytest.mark.parametrize("seed", range(4))
def test_a_lookup_with_rows_in_files_is_bit_equal_to_one_over_whole_tables(monkeypatch, run_folder, seed):
    host_cuda.put_under(monkeypatch, embedding, run_folder)
    monkeypatch.setattr(host_rows, "DeviceReadable", Locked)
    schema = oracle.make_schema(dtype=DTYPES, bags=2)
    rng = np.random.default_rng(seed)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, rng))
    tables, scales = [tensors[t.name] for t in schema.tables], scale_tensors(schema)
    (node,) = (n for n in fuse(build_graph(ARCHITECTURE, schema, 1)).nodes if n.op == "lookup")
    plan, home = plan_lookup(node, schema), home_of(schema, seed)
    store = EmbeddingStore(schema, tensors, CPU, scales, home)
    in_order = [scales.get(t.name) for t in schema.tables]
    placed = Tiers(schema, tables, in_order, home, CPU, store.spares)
    of_tiers = DeviceLookup(store.placed(plan), placed.descriptors, torch.float32)
    of_whole = DeviceLookup(plan, whole(tables, in_order, CPU), torch.float32)
    for wild in (False, True):
        block = oracle.make_block(schema, 20, 4, rng, wild=wild)
        before = block.buffer.copy()
        with leased(store.ahead, [block]) as (ready,):
            assert ready.staged
            for got, expected in zip(looked_up(of_tiers, ready), looked_up(of_whole, block), strict=True):
                assert torch.equal(got, expected)
        assert np.array_equal(block.buffer, before)
    placed.close()
    store.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_scores_alike_with_rows_in_files(tmp_path, dtype, seed):
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE, dtype=dtype, bags=2)
    schema = bundle.manifest.feature_schema
    block = oracle.make_block(schema, 150, 7, np.random.default_rng(3))
    options = EngineOptions(max_batch_rows=64)
    plain, ahead = (Engine(bundle, "cpu", None, options, home) for home in (None, home_of(schema, seed)))
    assert ahead.reads_ahead
    assert not plain.reads_ahead
    assert ahead.warmup().golden_error <= 1e-5
    plain.warmup()
    np.testing.assert_allclose(ahead.submit(block), plain.submit(block), rtol=0, atol=1e-6)
    with pytest.raises(Unavailable, match="expected a model with rows in files"):
        plain.lease(block)
    for engine in (plain, ahead):
        engine.close()


def test_rows_of_two_tables_by_one_id_come_from_the_source_once_and_together(tmp_path):
    schema = oracle.make_schema(one_hot=3, context=0, bags=0, embedded_numbers=0)
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    tables = tuple(TablePlacement(t.name, t.rows, 1, 1, t.rows - 2 if t.name == "c2" else 0) for t in schema.tables)
    asked = []

    class Source:
        closed, mapped = False, None

        def parts(self, ids):
            return [np.arange(len(ids))]

        def read(self, wanted):
            asked.append([(schema.tables[table].name, ids.tolist()) for table, ids in wanted])
            return [tensors[schema.tables[table].name][torch.from_numpy(ids)] for table, ids in wanted]

        def close(self):
            self.closed = True

    source = Source()
    store = EmbeddingStore(schema, tensors, CPU, None, Home(Placement(1, tables), "small", None, source=source))
    block = oracle.make_block(schema, 4, 1, np.random.default_rng(0))
    block.column(schema.columns["c2"])[:, 0] = [1, 16, 9, 16]  # unknown values read row 1, which is held
    for _ in range(2):
        with leased(store.ahead, [block]) as (ready,):
            ids = ready.column(schema.columns["c2"])[:, 0].astype(int)
            assert ids[0] == 1
            assert ids[1] == ids[3] >= 17
            for i, t in enumerate(schema.tables):
                if t.name in ("c2", "c2_w"):
                    assert torch.equal(store.spares[i][ids[[1, 2]] - 17], tensors[t.name][[16, 9]])
    assert asked == [[("c2", [9, 16]), ("c2_w", [9, 16])]]
    store.close()
    assert source.closed


def test_tables_whose_rows_cannot_be_in_files_are_named():
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    home = home_of(schema)
    numbers = [replace(p, hot=0, warm=0, in_files=1) if p.table == "n0" else p for p in home.placement.tables]
    with pytest.raises(InputError, match=r"tables\.n0: got '1 rows in files', expected none, as no id reads it"):
        EmbeddingStore(schema, tensors, CPU, None, replace(home, placement=Placement(1, tuple(numbers))))


def test_memory_for_them_that_may_not_be_locked_is_said(monkeypatch):
    def refused(memory):
        raise RuntimeError("host memory: got cudaErrorMemoryAllocation for 5 bytes")

    monkeypatch.setattr(spares_file, "DeviceReadable", refused)
    schema = oracle.make_schema()
    tensors, _ = table_tensors(schema, oracle.make_tables(schema, np.random.default_rng(0)))
    with pytest.raises(Unavailable, match=r"rows in files: got host memory: .* expected memory for 1 MiB of them"):
        EmbeddingStore(schema, tensors, torch.device("cuda:0"), None, home_of(schema))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2))
def test_a_gpu_scores_bit_equal_with_rows_in_files(tmp_path, first_ways, dtype, seed):
    bundle = small_bundle(tmp_path / "b", ARCHITECTURE, dtype=dtype, bags=2)
    schema = bundle.manifest.feature_schema
    block = oracle.make_block(schema, 150, 7, np.random.default_rng(3))
    options = EngineOptions(max_batch_rows=64, policy="waves", recall=False)
    engines = [Engine(bundle, "cuda:0", "tf32", options, home) for home in (None, home_of(schema, seed))]
    scores = []
    for engine in engines:
        engine.warmup()
        scores.append(engine.submit(block))
        engine.close()
    np.testing.assert_array_equal(*scores)
