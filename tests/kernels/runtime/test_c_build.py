"""What C does on a CPU is what NumPy and torch do there, to the bit where rows are read; and the product runs without C."""

import logging
import os
import stat
import sys

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.cpu import lookup
from kernels.cpu.dense import Fm
from kernels.cpu.rows_c import RowsByC
from kernels.cpu.rows_numpy import RowsByNumpy
from kernels.lookup.id_record import IdRecord, RowArrays
from kernels.lookup.plan import ALWAYS_ROW_0, IdColumn, Kind, Slot, TableShape, rows_of
from kernels.runtime import c_build
from tests.kernels.lookup.test_lookup import (
    batch_of,
    expected,
    in_records,
    mixed_plan,
    plan_of,
    scales_of,
    some_padding,
    tables_of,
)

LIBRARY = c_build.cpu_library()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="there is no C compiler")
F32 = torch.float32


def of_candidates(records):
    """Rows with no more than ids of their own."""
    rows, none = len(records), np.zeros((1, 0), np.float32)
    return RowArrays.of(np.zeros(rows, np.int32), records, none.astype(np.uint8), np.zeros((rows, 0), np.float32), none)


def wild(rng, n, size):
    """Any id that the column's width may hold, as often as not one of the table's."""
    ids = rng.integers(-1, max(2 * size, 255), n)
    return np.where(rng.random(n) < 0.5, ids, ids % size)


@needs_compiler
@pytest.mark.parametrize("width", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("zero_row", [1000, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize(("rows", "contexts"), [(1, 1), (2, 2), (65, 7), (300, 1)])
def test_ids_of_every_width_and_side_name_the_rows_that_numpy_names(width, zero_row, rows, contexts):
    tables = [TableShape(n, 4, F32) for n in (1, 30, 200, 254)]
    columns = [IdColumn(0, 0, 0), IdColumn(-1, 1, 3), IdColumn(2, 2, 5, True), IdColumn(1, 3, 0), IdColumn(ALWAYS_ROW_0, 0, 0),
               IdColumn(-2, 2, 7, True), IdColumn(0, 3, 1), IdColumn(3, 2, 5, True)]  # fmt: skip
    plan = plan_of(tables, columns, [], context=2, candidate=4, width=width)
    first = [0, 1, 40, zero_row - 300, 7, 50, zero_row - 254, 41]
    batch = in_records(plan, batch_of(plan, rows, contexts, ids=wild))
    ids = batch.request_of_row.numpy(), batch.candidate_ids.numpy(), batch.context_ids.numpy()
    want, want_outside = RowsByNumpy(plan, columns, first, zero_row)(*ids)
    got, outside = RowsByC(LIBRARY, plan, columns, first, zero_row)(rows_of(batch, rows).addresses)
    assert got.tolist() == want.tolist()
    assert outside == want_outside


@needs_compiler
def test_the_farthest_ids_of_eight_bytes_read_the_oov_row():
    plan = plan_of([TableShape(2**31 + 5, 4, F32)], [IdColumn(0, 0, 9)], [], candidate=1)
    ids = np.array([[2**31 + 4], [2**31 + 5], [-1], [-7], [2**63 - 1], [-(2**63)], [0]])
    records = np.zeros((7, 8), np.uint8)
    plan.candidate_ids.pack(ids, records)
    rows = RowsByC(LIBRARY, plan, plan.columns, [100], 2**31 + 105)
    got, outside = rows(of_candidates(records).addresses)
    assert got[:, 0].tolist() == [2**31 + 104, 109, 109, 109, 109, 109, 100]
    assert outside == 5


@needs_compiler
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 10, 16, 32, 40])
@pytest.mark.parametrize("rows", [1, 2, 127, 2000])
def test_one_call_reads_and_sums_what_two_ways_read_and_sum(rows, dim, monkeypatch):
    """Embeddings and first-order weights of 39 columns, in blocks that do not divide the rows."""
    sizes = [3 + 11 * i for i in range(39)]
    tables = [TableShape(n, dim, F32) for n in sizes] + [TableShape(n, 1, F32) for n in sizes]
    columns = [IdColumn(38 - i % 39, i, 1) for i in range(78)]
    x = [Slot(Kind.GATHER, dim, i * dim, i, 1) for i in range(39)]
    plan = plan_of(tables, columns, x, [Slot(Kind.GATHER, 1, 0, 39 + i, 1) for i in range(39)], candidate=39)
    values, batch = tables_of(plan), batch_of(plan, rows, ids=wild)
    fast = lookup.PackedLookup(plan, values)
    assert fast.float_tables is not None
    monkeypatch.setattr(lookup, "cpu_library", lambda: None)
    slow = lookup.PackedLookup(plan, values)
    assert slow.float_tables is None
    got, want = (lookup(in_records(plan, batch), rows) for lookup in (fast, slow))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=39 * 8 * 2.0**-23)
    assert fast.out_of_range == slow.out_of_range > 0 or rows == 1


@needs_compiler
@pytest.mark.parametrize("dim", [1, 6, 16, 37])
@pytest.mark.parametrize("rows", [1, 5, 900])
def test_bags_are_summed_in_the_same_call(rows, dim):
    """Of one, four and two ids, some of them padding, beside an embedding times a number; summed weights too."""
    counts, sizes = (1, 4, 1, 2), (9, 300, 1, 70_000)
    tables = [TableShape(n, width, F32) for width in (dim, 1) for n in sizes]
    columns, x, total, first = [], [], [], np.cumsum([0, *counts, *counts]).tolist()
    for i, count in enumerate((*counts, *counts)):
        source = first[i] % 8
        sources = [ALWAYS_ROW_0] if i % 4 == 2 else range(source, source + count)
        columns += [IdColumn(s, i, 0, count > 1) for s in sources]
        out, kind = (i * dim, x) if i < 4 else (0, total)
        kind.append(Slot(Kind.SCALE if i % 4 == 2 else Kind.GATHER, dim if i < 4 else 1, out, first[i], count,
                         **({"number": 0} if i % 4 == 2 else {})))  # fmt: skip
    x.append(Slot(Kind.COPY, 1, 4 * dim, number=0))
    plan = plan_of(tables, columns, x, total, candidate=8, candidate_numbers=1)
    values, batch = tables_of(plan), batch_of(plan, rows, ids=some_padding)
    stacked = lookup.PackedLookup(plan, values)
    assert stacked.float_tables is not None
    got_x, got_total = stacked(in_records(plan, batch), rows)
    want_x, want_total = (t.double() for t in reference.lookup(plan, values, batch, rows))
    torch.testing.assert_close(got_x.double(), want_x, rtol=0, atol=4 * 8 * 2.0**-23)
    torch.testing.assert_close(got_total.double(), want_total, rtol=0, atol=8 * 8 * 2.0**-23)


@pytest.mark.parametrize("int8", [(), (0, 1, 3, 4), range(7)])
@pytest.mark.parametrize("rows", [1, 19, 1031])
def test_without_a_compiler_every_kind_of_slot_is_read_all_the_same(rows, int8, monkeypatch):
    monkeypatch.setattr(lookup, "cpu_library", lambda: None)
    plan = mixed_plan(int8)
    tables, batch = tables_of(plan), batch_of(plan, rows, contexts=min(rows, 5), ids=some_padding)
    x, total = lookup.PackedLookup(plan, tables, scales_of(plan))(in_records(plan, batch), rows)
    want_x, want_total = expected(plan, tables, scales_of(plan), batch, rows)
    torch.testing.assert_close(x, want_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total, want_total, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_a_model_of_numbers_alone_reads_no_record():
    plan = plan_of([TableShape(1, 4, F32)], [IdColumn(ALWAYS_ROW_0, 0, 0)], [])
    assert plan.candidate_ids == IdRecord()
    at, outside = RowsByC(LIBRARY, plan, plan.columns, [5], 6)(of_candidates(np.zeros((3, 0), np.uint8)).addresses)
    assert (at.tolist(), outside) == ([[5]] * 3, 0)


@needs_compiler
def test_records_of_another_plan_are_refused():
    plan = plan_of([TableShape(9, 4, F32)], [IdColumn(0, 0, 0)], [], candidate=1)
    rows = RowsByC(LIBRARY, plan, plan.columns, [0], 9)
    for records, width in ((np.zeros((2, 4), np.int32), 16), (np.zeros((2, 8), np.uint8), 8)):
        with pytest.raises(ValueError, match=rf"lookup rows: got \(4, 0, {width}, 0, 0\) bytes .*, expected \(4, 0, 4, 0, 0\)"):
            rows(of_candidates(records).addresses)


def test_arrays_of_different_batches_are_refused():
    none = np.zeros((1, 0), np.float32)
    with pytest.raises(ValueError, match=r"lookup rows: got .*\(3, 4\).*, expected as many of rows, and as many of contexts"):
        RowArrays.of(
            np.zeros(2, np.int32), np.zeros((3, 4), np.uint8), none.astype(np.uint8), np.zeros((2, 0), np.float32), none
        )


@pytest.mark.parametrize(("fields", "dim"), [(1, 1), (2, 3), (39, 16), (26, 10), (3, 257)])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_fm_is_the_sum_over_all_pairs(rows, fields, dim):
    x = torch.randn(rows, 5 + fields * dim + 3, generator=torch.Generator().manual_seed(rows))
    v = x[:, 5 : 5 + fields * dim].double().view(rows, fields, dim)
    pairs = [(v[:, i] * v[:, j]).sum(1) for i in range(fields) for j in range(i)]
    want = sum(pairs, torch.zeros(rows, dtype=torch.float64))[:, None]
    terms = (v.sum(1).square() + v.square().sum(1)).sum(1, keepdim=True)
    for got in (Fm(5, fields, dim)(x), reference.fm(x, 5, fields, dim)):
        assert ((got.double() - want).abs() <= 8 * 2.0**-23 * terms).all()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """No cache but an empty one, and a library that has not been asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    c_build.cpu_library.cache_clear()
    yield tmp_path / "cache" / "dpiframe"
    c_build.cpu_library.cache_clear()


def built():
    """As `cpu_library` has it, of one file, which takes seconds less."""
    return c_build._loaded(("cpu/dense.c",), (), c_build.ctypes.CDLL, "nobody")


@needs_compiler
def test_it_is_built_once_and_kept_for_the_next_process(fresh, monkeypatch):
    assert built() is not None
    (kept,) = fresh.iterdir()
    monkeypatch.setattr(c_build.subprocess, "run", None)
    assert built() is not None
    assert [kept] == list(fresh.iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(fresh):
    fresh.parent.write_text("a file where a folder should be")
    assert built() is not None


@needs_compiler
@pytest.mark.parametrize("left", [b"", b"no library"])
def test_a_kept_file_that_cannot_be_loaded_is_built_anew(fresh, left):
    kept = c_build._loaded(("cpu/dense.c",), (), lambda path: path, "nobody")
    sound = kept.read_bytes()
    kept.write_bytes(left)
    assert c_build._loaded(("cpu/dense.c",), (), lambda path: c_build.ctypes.CDLL(str(path)), "nobody").dpi_fm
    assert len(kept.read_bytes()) == len(sound)


@needs_compiler
def test_a_compiler_may_have_options(fresh, monkeypatch):
    monkeypatch.setenv("CC", "cc -pipe")
    assert built() is not None


@pytest.mark.skipif(c_build.request_extension() is None, reason="there is no C compiler, or no headers of Python")
def test_a_module_of_another_ones_name_stays_what_it_is():
    assert "blocks" not in sys.modules


@pytest.mark.parametrize("compiler", ["none-of-this-name", "broken"])
def test_a_compiler_that_lacks_or_fails_is_told_and_done_without(fresh, tmp_path, monkeypatch, caplog, compiler):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no luck >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO, "kernels.runtime.c_build"):
        assert c_build.cpu_library() is None
    assert ("no luck" if compiler == "broken" else "no C compiler") in caplog.text
