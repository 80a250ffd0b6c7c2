"""How lookup launches are cut: what the kernel takes for granted, and what a sweep on an H200 found to be fast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.lookup.bag_parts import BagParts
from kernels.lookup.plan import Kind
from kernels.lookup.tiling import (
    HistoryPart,
    bag_tiling,
    far_tiling,
    history_blocks,
    history_parts,
    history_tiling,
    tiling,
)
from kernels.lookup.units import How, Unit

ROWS, PROCESSORS, PINNED, POOLED = st.integers(1, 1 << 17), st.integers(1, 200), st.booleans(), st.booleans()
UNITS, TOTALS = st.integers(0, 4000), st.integers(1, 300)


def lanes_of(t, units):
    """As embedding.cu computes them."""
    return t.unit_threads // units if 0 < units < t.unit_threads else 1


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED, POOLED)
def test_a_multiprocessor_holds_the_blocks_that_the_kernel_is_compiled_for(rows, units, totals, processors, pinned, pooled):
    t = tiling(rows, units, totals, processors, pinned, pooled)
    threads = t.unit_threads + t.total_threads
    assert t.unit_threads % 32 == t.total_threads % 32 == 0
    assert 32 <= threads <= 1024
    assert t.blocks >= 1
    assert 65536 // (t.blocks * threads) >= 64 or t.blocks == 1  # registers a thread


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED, POOLED)
def test_fewer_threads_than_a_warp_are_idle_in_each_pass_over_the_units(rows, units, totals, processors, pinned, pooled):
    t = tiling(rows, units, totals, processors, pinned, pooled)
    work = lanes_of(t, units) * units
    passes = -(-work // t.unit_threads) if units else 0
    assert 0 <= passes * t.unit_threads - work < 32 * max(1, passes)
    assert passes <= -(-units // 224)


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED, POOLED)
def test_blocks_have_few_rows(rows, units, totals, processors, pinned, pooled):
    t = tiling(rows, units, totals, processors, pinned, pooled)
    assert 1 <= t.rows <= (16 if pinned else 32)


# 39 fields of 16 columns: 156 units in float32, 78 in bfloat16; 26 fields: 104 and 52, and of 128 columns 832 and 416.
# Pooled: bags of 10.
@pytest.mark.parametrize(
    ("rows", "units", "pinned", "pooled", "expected"),
    [
        (16, 78, True, False, (8, 320)),
        (64, 156, True, False, (8, 320)),
        (256, 156, True, False, (8, 320)),
        (1024, 78, True, False, (16, 320)),
        (4096, 78, True, False, (16, 320)),
        (16384, 78, True, False, (16, 320)),
        (1024, 416, True, False, (8, 416)),
        (4096, 416, True, False, (8, 224)),
        (256, 52, False, False, (4, 128)),
        (1024, 104, False, False, (4, 128)),
        (1024, 52, False, False, (4, 128)),
        (1024, 78, False, False, (4, 96)),
        (2048, 104, False, False, (8, 128)),
        (2048, 52, False, False, (8, 128)),
        (4096, 104, False, False, (16, 224)),
        (4096, 52, False, False, (16, 128)),
        (4096, 78, False, False, (16, 160)),
        (16384, 78, False, False, (32, 160)),
        (16384, 104, False, False, (32, 224)),
        (1024, 416, False, False, (8, 416)),
        (16384, 416, False, False, (8, 224)),
        (4096, 832, False, False, (8, 224)),
        (1024, 52, True, True, (8, 416)),
        (1024, 104, True, True, (8, 416)),
        (1024, 52, False, True, (8, 416)),
        (4096, 52, False, True, (16, 416)),
        (4096, 104, False, True, (16, 416)),
    ],
)
def test_measured_best_rows_and_threads_of_an_h200(rows, units, pinned, pooled, expected):
    t = tiling(rows, units, 0, 132, pinned, pooled)
    assert (t.rows, t.unit_threads) == expected


def bags_of(parts, team, sums=0, read_bytes=0):
    """As many parts, or, of none, 26 singles, the first of which reads all. A team has 8 columns a thread."""
    units = tuple(Unit(How(Kind.GATHER, counted=i == 0), 0, ids=1, row_bytes=read_bytes) for i in range(parts or 26))
    return BagParts(team, 8 * team, sums, units if parts else (), () if parts else units)


@given(ROWS, UNITS, TOTALS, st.integers(0, 300), st.integers(1, 32), st.integers(0, 9), PROCESSORS, PINNED)
def test_blocks_of_parts_have_few_rows_and_registers(rows, units, totals, parts, team, sums, processors, pinned):
    t = bag_tiling(rows, units, totals, bags_of(parts, team, sums), processors, pinned)
    threads = t.unit_threads + t.total_threads
    assert t.unit_threads % 32 == t.total_threads % 32 == 0
    assert 32 <= threads <= 1024
    assert 65536 // (t.blocks * threads) >= (80 if t.flight == 8 else 64)  # registers a thread
    assert 1 <= t.rows <= 8
    if t.evict_first:
        assert -(-rows // t.rows) <= t.blocks * processors, "all blocks run at once"


@pytest.mark.parametrize(
    ("rows", "team", "pinned", "tiers", "expected"),
    [
        (64, 16, True, False, (1, 288, 1, 8, False)),
        (132, 16, True, False, (1, 288, 1, 8, False)),
        (256, 16, False, False, (2, 320, 2, 8, False)),
        (512, 16, False, False, (2, 512, 2, 4, False)),
        (1024, 16, False, False, (4, 512, 2, 4, True)),
        (1024, 16, True, False, (4, 512, 2, 4, True)),
        (1024, 16, False, True, (4, 320, 2, 8, False)),
        (2048, 16, True, False, (4, 320, 2, 8, False)),
        (2048, 16, False, False, (4, 256, 4, 4, True)),
        (4096, 16, False, False, (8, 256, 4, 4, True)),
        (4225, 16, False, False, (4, 256, 4, 4, False)),
        (8192, 16, True, False, (4, 256, 4, 4, False)),
        (16384, 8, False, False, (8, 256, 4, 4, False)),
        (16384, 16, False, False, (4, 256, 4, 4, False)),
        (8192, 16, True, True, (4, 320, 2, 8, False)),
        (8192, 16, False, True, (8, 320, 2, 8, False)),
    ],
)
def test_measured_best_tilings_of_mlperfs_bags(rows, team, pinned, tiers, expected):
    """In float16: 17 parts a row, four sums, 214 ids."""
    t = bag_tiling(rows, 0, 0, bags_of(17, team, 4, 214 * 16 * team), 132, pinned, tiers)
    assert (t.rows, t.unit_threads, t.blocks, t.flight, t.evict_first) == expected


def test_the_l1_keeps_rows_where_a_multiprocessor_reads_many():
    """26 bags of 10, dim 128, float32: 4,096 rows took 66.5 us with rows kept, 71.9 without; 2,048 45.5 and 44.2 (H200)."""
    found = [bag_tiling(rows, 0, 0, bags_of(26, 32, 0, 260 * 512), 132, False) for rows in (1024, 2048, 4096, 8192)]
    assert [(t.rows, t.evict_first) for t in found] == [(4, True), (4, True), (8, False), (8, False)]


@given(ROWS, st.integers(0, 320), st.sampled_from([1, 2, 3, 4, 8, 16, 32]), TOTALS, PROCESSORS, PINNED)
def test_far_rows_are_taken_by_whole_warps_one_or_two_tables_at_a_time(rows, parts, team, totals, processors, pinned):
    own = bag_tiling(rows, 0, totals, bags_of(parts, team), processors, pinned, True)
    t = far_tiling(rows, own, team, parts, processors)
    if rows < 4 * processors:
        assert t == own
        return
    at_once = t.unit_threads // 32 * (32 // team)  # teams, each of which takes a part of a row, or a single of eight
    assert t.unit_threads % 32 == 0
    assert 64 <= t.unit_threads <= 320
    assert at_once <= max(2 * t.rows if parts else 16, 64 // team + 64 % team)
    assert t.rows in ((4, 8) if parts else (16,))


@pytest.mark.parametrize(
    ("rows", "team", "parts", "expected"),
    [(1024, 8, 16, (4, 64)), (4096, 8, 16, (8, 128)), (1024, 8, 0, (16, 128)), (4096, 8, 0, (16, 128)), (527, 8, 0, (4, 320))],
)
def test_far_rows_are_cut_as_measured(rows, team, parts, expected):
    t = far_tiling(rows, bag_tiling(rows, 0, 0, bags_of(parts, team), 132, True, True), team, parts, 132)
    assert (t.rows, t.unit_threads) == expected


@pytest.mark.parametrize(
    ("rows", "cold_reads", "by_table"), [(1024, 4.88, False), (1024, 4.89, True), (4096, 0.73, False), (4096, 0.74, True)]
)
def test_few_cold_reads_of_bags_are_taken_by_as_many_threads_as_near_ones(rows, cold_reads, by_table):
    own = bag_tiling(rows, 0, 0, bags_of(16, 8), 132, True, True)
    assert (far_tiling(rows, own, 8, 16, 132, cold_reads) != own) == by_table
    assert far_tiling(rows, own, 8, 0, 132, cold_reads) != own  # single ids gain from few threads even so


@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 2, 4, 8])), max_size=900), st.integers(1, 40))
def test_parts_of_histories_have_a_thread_a_unit_and_read_the_words_of_their_ids(ids, warps):
    ids = tuple(sorted((at * width, width) for at, width in ids))
    parts = history_parts(ids, 32 * warps)
    assert [i for part in parts for i in range(part.first, part.end)] == list(range(len(ids)))
    for part in parts:
        assert 0 < part.end - part.first <= 32 * warps
        assert part.end_word - part.first_word <= 1024
        for at, width in ids[part.first : part.end]:
            assert 4 * part.first_word <= at
            assert at + width <= 4 * part.end_word


@pytest.mark.parametrize(
    ("rows", "once", "totals", "threads"),
    [(1, 850, 0, None), (1, 1800, 0, 480), (8, 450, 0, 480), (64, 450, 4, 416), (256, 450, 0, 480), (512, 450, 0, None)],
)
def test_blocks_of_few_rows_have_more_threads_beside_histories(rows, once, totals, threads):
    plain = tiling(rows, 24, totals, 132, True, False)
    t = history_tiling(rows, plain, once, 132)
    assert t == plain if threads is None else (t.rows, t.unit_threads) == (plain.rows, threads)
    assert t.unit_threads % 32 == 0


def test_parts_of_a_history_are_alike():
    ids = tuple((2 * (i // 8), 2) for i in range(900))  # 112 places of two bytes, of eight units each
    assert [p.end - p.first for p in history_parts(ids, 384)] == [300, 300, 300]
    assert history_parts(ids, 384)[1] == HistoryPart(300, 600, 18, 38)


@pytest.mark.parametrize(
    ("parts", "rows", "ahead", "blocks"),
    [
        (0, 64, False, 0),
        (3, 1, False, 3),
        (3, 8, False, 24),
        (3, 64, False, 30),
        (3, 1024, True, 255),
        (40, 64, False, 40),
    ],
)
def test_histories_take_a_block_for_each_part_of_as_many_contexts_as_may_read_the_header(parts, rows, ahead, blocks):
    assert history_blocks(parts, rows, ahead) == blocks
