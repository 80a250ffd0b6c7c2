"""A placement is whole and of its schema, and its links' predicted times are the formula's."""

import numpy as np
import pytest

from dpiframe_core.embedding.placement import (
    Links,
    Placement,
    TablePlacement,
    predicted_links,
    tier_reads,
    uniform,
)
from dpiframe_core.errors import InputError
from tests.dpiframe_core.embedding.plan_schema import counts_of, schema_of

SCHEMA = schema_of((6, 16), (3, 1))  # rows of 64 and 4 bytes
COUNTS = counts_of([100, 40, 20, 10, 8, 2], [5, 70, 3], rows=10)
RANKS = {"t1": np.array([1, 0, 2], np.uint32)}
PLACED = Placement(2, (TablePlacement("t0", 6, 1, 4), TablePlacement("t1", 3, 1, 2)), RANKS)
LINKS = Links(local=1000.0, peer=100.0, host=10.0, host_waits=())


def test_reads_are_counted_by_the_tier_of_their_rank():
    assert tier_reads(COUNTS, PLACED) == {"t0": (100, 70, 10), "t1": (70, 5, 3)}


def test_reads_of_a_table_of_several_parts_are_those_of_all_rows():
    rows = 3 * 65536 + 5
    rng = np.random.default_rng(0)
    counts, ranks = counts_of(rng.integers(0, 9, rows)), rng.permutation(rows).astype(np.uint32)
    placed = Placement(2, (TablePlacement("t0", rows, 70_000, 150_000),), {"t0": ranks})
    by_rank = np.empty(rows, np.int64)
    by_rank[ranks] = counts.tables["t0"]
    want = by_rank[:70_000].sum(), by_rank[70_000:150_000].sum(), by_rank[150_000:].sum()
    assert tier_reads(counts, placed) == {"t0": want}


def test_each_link_takes_what_is_read_over_it():
    hot, warm, cold = 64 * 100 + 32 * 70, 64 * 70 + 32 * 5, 64 * 10 + 32 * 3  # a row of 4 bytes moves 32
    want = (hot + warm / 2) / 1000 / 10, warm / 2 / 100 / 10, cold / 10 / 10
    assert predicted_links(SCHEMA, COUNTS, PLACED, LINKS) == pytest.approx(want)


def test_all_in_hbm_and_all_in_host_memory_take_what_one_link_takes():
    moved = 64 * 180 + 32 * 78
    assert predicted_links(SCHEMA, COUNTS, uniform(SCHEMA, hot=True), LINKS) == pytest.approx((moved / 1e4, 0, 0))
    assert predicted_links(SCHEMA, COUNTS, uniform(SCHEMA, hot=False), LINKS) == pytest.approx((0, 0, moved / 100))


def test_bytes_are_those_of_the_fullest_gpu_and_of_the_cold_rows():
    assert PLACED.gpu_bytes(SCHEMA) == 64 * (1 + 2) + 4 * (1 + 1) + 3 * 4  # shares of 3 and 1 warm rows, 3 ranks
    assert PLACED.host_bytes(SCHEMA) == 64 * 2 + 4 * 1
    int8 = schema_of((6, 16), dtype="int8")
    assert uniform(int8, hot=True).gpu_bytes(int8) == sum(t.bytes_used for t in int8.tables)


def test_a_read_of_the_host_takes_no_less_than_the_wait_for_an_address_of_so_many():
    links = Links(host=10.0, host_waits=((100, 20.0), (300, 40.0)))
    assert [links.host_s(4, spread) for spread in (0, 100, 150, 300, 1000)] == [20, 20, 25, 40, 40]
    assert (links.host_s(4), links.host_s(512, 0), Links(host=10.0, host_waits=()).host_s(4)) == (40, 51.2, 3.2)


def test_cold_rows_take_what_a_read_takes_among_as_many_of_them():
    links = Links(local=1e30, peer=1e30, host=1e30, host_waits=((0, 0.0), (260, 260.0)))  # a second for each byte that is cold
    assert predicted_links(SCHEMA, COUNTS, PLACED, links).cold == pytest.approx((64 * 2 + 4) * (10 + 3) / 10)
    assert predicted_links(SCHEMA, COUNTS, uniform(SCHEMA, hot=True), links).cold == 0


@pytest.mark.parametrize("waits", [((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0))])
def test_waits_that_fall_are_refused(waits):
    with pytest.raises(InputError, match=r"links.host_waits: got .* expected rising numbers of bytes, and of seconds"):
        Links(host_waits=waits)


@pytest.mark.parametrize(("row_bytes", "moved"), [(1, 32), (32, 32), (33, 64), (512, 512)])
def test_a_read_moves_whole_pieces_of_32_bytes(row_bytes, moved):
    assert Links().moved(row_bytes) == moved


def test_links_work_at_the_same_time_and_a_gpu_reads_its_share_of_the_warm_rows_itself():
    assert Links(1.0, 1.0, 1.0).seconds(4, 10, 8, 3) == (12, 6, 3)


@pytest.mark.parametrize("name", ["local", "peer", "host", "least_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_link_without_a_speed_is_refused(name, value):
    with pytest.raises(InputError, match=rf"links.{name}: got {value}, expected a finite number above 0"):
        Links(**{name: value})


@pytest.mark.parametrize(("hot", "warm"), [(-1, 2), (3, 2), (0, 7)])
def test_ends_out_of_order_are_refused(hot, warm):
    with pytest.raises(InputError, match=rf"tables.t0: got \({hot}, {warm}, 6, 6\), expected 0 <= hot <= warm <= "):
        TablePlacement("t0", 6, hot, warm)


@pytest.mark.parametrize("in_files", [-1, 3, 7])
def test_files_alone_hold_none_of_the_rows_that_a_memory_holds(in_files):
    with pytest.raises(InputError, match=rf"tables.t0: got \(1, 4, {6 - in_files}, 6\), expected .* rows - in_files <= rows"):
        TablePlacement("t0", 6, 1, 4, in_files)


def test_reads_of_rows_in_files_are_those_of_the_last_ranks():
    counts = counts_of([50, 20, 20, 5, 4, 1], [1, 90, 9], rows=100)
    placed = Placement(
        1, (TablePlacement("t0", 6, 1, 1, 2), TablePlacement("t1", 3, 1, 1, 1)), {"t1": np.array([2, 0, 1], np.uint32)}
    )
    assert placed.file_reads(counts) == pytest.approx((4 + 1 + 1) / 200)
    assert placed.host_bytes(SCHEMA) == 3 * SCHEMA.tables[0].row_bytes + SCHEMA.tables[1].row_bytes


@pytest.mark.parametrize(
    ("gpus", "tables", "ranks", "message"),
    [
        (0, (), {}, "gpus: got 0, expected at least 1"),
        (1, PLACED.tables, RANKS, r"tables.t0: got \(1, 4\), expected no warm rows on a single GPU"),
        (2, PLACED.tables, {"t0": RANKS["t1"]}, r"ranks.t0: got 'uint32\[3\]', expected uint32\[6\]"),
        (2, PLACED.tables, {"t1": np.arange(3)}, r"ranks.t1: got 'int64\[3\]', expected uint32\[3\]"),
        (2, PLACED.tables, {"no": RANKS["t1"]}, r"ranks.no: got 'uint32\[3\]', expected one of the tables \['t0', 't1'\]"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(gpus, tables, ranks, message):
    with pytest.raises(InputError, match=message):
        Placement(gpus, tables, ranks)


@pytest.mark.parametrize("reads", [-1.0, np.nan])
def test_cold_reads_are_a_number(reads):
    with pytest.raises(InputError, match=f"cold_reads: got {reads}, expected 0 or more"):
        Placement(2, PLACED.tables, RANKS, reads)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (PLACED.tables[:1], r"tables: got \['t0'\], expected the model's, \['t0', 't1'\]"),
        (PLACED.tables[::-1], r"tables: got \['t1', 't0'\], expected the model's"),
        ((TablePlacement("t0", 5, 1, 1), PLACED.tables[1]), "tables.t0.rows: got 5, expected 6, as the model has"),
    ],
)
def test_a_placement_of_other_tables_is_refused(tables, message):
    with pytest.raises(InputError, match=message):
        predicted_links(SCHEMA, COUNTS, Placement(2, tables))
