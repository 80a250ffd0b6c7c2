"""C code shares torch's threads: what several of them read is what one reads, and without a pool one does it all."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cpu import float_lookup, openmp_pool, rows_c
from kernels.cpu.float_lookup import FloatLookup
from kernels.cpu.lookup import PackedLookup
from kernels.cpu.rows_c import RowsByC
from kernels.lookup.plan import ALWAYS_ROW_0, IdColumn, Kind, Slot, TableShape, rows_of
from kernels.runtime.c_build import cpu_library
from tests.kernels.lookup.test_lookup import batch_of, in_records, plan_of, tables_of
from tests.kernels.runtime.test_c_build import wild

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="there is no C compiler")
F32 = torch.float32
ROWS = 3001


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def alone(monkeypatch):
    """Has the C code run in the calling thread."""

    def now():
        for module in (float_lookup, rows_c):
            monkeypatch.setattr(module, "pool_arguments", lambda: (None, 1))

    return now


def test_torch_computes_with_openmp_here_and_its_runtime_is_found():
    assert "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()
    assert openmp_pool.pool() is not None


def test_torchs_own_runtime_comes_before_the_systems_and_other_packages():
    site = "/site-packages"
    mapped = [f"{site}/scikit_learn.libs/libgomp-a3.so.1", "/usr/lib/libgomp.so.1", "/usr/lib/libc.so.6", "", "[heap]"]
    ranked = [*mapped[1::-1]]
    assert openmp_pool.ranked(mapped, Path(f"{site}/torch")) == ranked
    for own in (f"{site}/torch/lib/libiomp5.so", f"{site}/torch.libs/libgomp-24.so"):
        assert openmp_pool.ranked([*mapped, own], Path(f"{site}/torch")) == [own, *ranked]


@pytest.mark.parametrize("dim", [4, 16, 40])
@pytest.mark.parametrize("contexts", [1, 7])
def test_floats_of_several_threads_are_those_of_one(threads, alone, dim, contexts):
    """Rows, sums, FM's terms and the ids that were outside, of a number of rows that no piece divides."""
    tables = [TableShape(50 + i, dim, F32) for i in range(9)] + [TableShape(50 + i, 1, F32) for i in range(9)]
    columns = [IdColumn(i if i < 6 else 5 - i, i % 9, 1) for i in range(9)]
    columns += [IdColumn(c.source, 9 + i, 1) for i, c in enumerate(columns)]
    x = [Slot(Kind.GATHER, dim, i * dim, i, 1) for i in range(9)]
    plan = plan_of(tables, columns, x, [Slot(Kind.GATHER, 1, 0, 9 + i, 1) for i in range(9)], candidate=6, context=3)
    stacks = PackedLookup(plan, tables_of(plan)).float_tables
    reader = FloatLookup(stacks, [s.out for s in plan.x_slots], [], plan.x_width)
    batch = rows_of(in_records(plan, batch_of(plan, ROWS, contexts, ids=wild)), ROWS)
    got = reader(batch.addresses, True)
    alone()
    want = reader(batch.addresses, True)
    for several, one in zip(got[:3], want[:3], strict=True):
        assert torch.equal(several, one)
    assert got[3] == want[3] > 0


@pytest.mark.parametrize("zero_row", [10_000, 2**40])
def test_rows_of_several_threads_are_those_of_one(threads, alone, zero_row):
    plan = plan_of(
        [TableShape(200, 4, F32)], [IdColumn(0, 0, 3), IdColumn(ALWAYS_ROW_0, 0, 0), IdColumn(1, 0, 5)], [], candidate=2
    )
    rows = RowsByC(cpu_library(), plan, plan.columns, [0, 1000, 2000], zero_row)
    batch = rows_of(in_records(plan, batch_of(plan, 50_000, ids=wild)), 50_000)
    got, outside = rows(batch.addresses)
    alone()
    want, want_outside = rows(batch.addresses)
    assert np.array_equal(got, want)
    assert outside == want_outside > 0


def test_threads_that_look_up_at_once_do_not_meet(threads):
    plan = plan_of([TableShape(500, 8, F32)] * 3, [IdColumn(i, i, 1) for i in range(3)],
                   [Slot(Kind.GATHER, 8, 8 * i, i, 1) for i in range(3)], candidate=3)  # fmt: skip
    tables = tables_of(plan)
    lookup, wrong = PackedLookup(plan, tables), []

    def one(seed):
        batch = batch_of(plan, ROWS + seed, ids=lambda rng, n, size: rng.integers(0, size, n))
        ids = batch.candidate_ids.numpy()
        want = torch.cat([t[ids[:, i]] for i, t in enumerate(tables)], 1)
        records = in_records(plan, batch)
        wrong.extend(i for i in range(20) if not torch.equal(lookup(records, ROWS + seed)[0], want))

    with ThreadPoolExecutor(4) as workers:
        list(workers.map(one, range(4)))
    assert wrong == []


def test_without_a_pool_one_thread_does_it_all(monkeypatch):
    monkeypatch.setattr(openmp_pool, "_RUNTIMES", ("no such runtime",))
    openmp_pool.pool.cache_clear()
    try:
        assert openmp_pool.pool_arguments() == (None, torch.get_num_threads())
    finally:
        openmp_pool.pool.cache_clear()
