"""How lookup launches are cut: what the kernel takes for granted, and what a sweep on an H200 found to be fast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.lookup_tiling import tiling

ROWS, PROCESSORS, PINNED = st.integers(1, 1 << 17), st.integers(1, 200), st.booleans()
UNITS, TOTALS = st.integers(0, 4000), st.integers(1, 300)


def lanes_of(t, units):
    """As embedding.cu computes them."""
    return t.unit_threads // units if 0 < units < t.unit_threads else 1


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED)
def test_a_multiprocessor_holds_the_blocks_that_the_kernel_is_compiled_for(rows, units, totals, processors, pinned):
    t = tiling(rows, units, totals, processors, pinned)
    threads = t.unit_threads + t.total_threads
    assert t.unit_threads % 32 == t.total_threads % 32 == 0
    assert 32 <= threads <= 1024
    assert t.blocks >= 1
    assert 65536 // (t.blocks * threads) >= 42 or t.blocks == 1  # registers a thread


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED)
def test_fewer_threads_than_a_warp_are_idle_in_each_pass_over_the_units(rows, units, totals, processors, pinned):
    t = tiling(rows, units, totals, processors, pinned)
    work = lanes_of(t, units) * units
    passes = -(-work // t.unit_threads) if units else 0
    assert 0 <= passes * t.unit_threads - work < 32 * max(1, passes)
    assert passes <= -(-units // 224)


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED)
def test_blocks_have_few_rows(rows, units, totals, processors, pinned):
    t = tiling(rows, units, totals, processors, pinned)
    assert 1 <= t.rows <= (16 if pinned else 32)


# 39 fields of 16 columns: 156 units in float32, 78 in bfloat16; 26 fields: 104 and 52, and of 128 columns 832 and 416.
@pytest.mark.parametrize(
    ("rows", "units", "pinned", "expected"),
    [
        (16, 78, True, (8, 320)),
        (64, 156, True, (8, 320)),
        (256, 156, True, (8, 320)),
        (1024, 78, True, (16, 320)),
        (4096, 78, True, (16, 320)),
        (16384, 78, True, (16, 320)),
        (1024, 416, True, (8, 416)),
        (4096, 416, True, (8, 224)),
        (256, 52, False, (4, 128)),
        (1024, 104, False, (8, 224)),
        (4096, 52, False, (16, 128)),
        (4096, 78, False, (16, 160)),
        (16384, 78, False, (32, 160)),
        (16384, 104, False, (32, 224)),
        (1024, 416, False, (8, 416)),
        (16384, 416, False, (8, 224)),
        (4096, 832, False, (8, 224)),
    ],
)
def test_measured_best_rows_and_threads_of_an_h200(rows, units, pinned, expected):
    t = tiling(rows, units, 0, 132, pinned)
    assert (t.rows, t.unit_threads) == expected


# 26 fields of 10 ids and 16 columns
@pytest.mark.parametrize(
    ("rows", "units", "pinned", "expected"),
    [
        (1024, 52, False, (8, 416)),
        (1024, 104, False, (8, 416)),
        (4096, 52, False, (16, 416)),
        (4096, 104, False, (16, 416)),
        (1024, 52, True, (8, 416)),
        (1024, 104, True, (8, 416)),
    ],
)
def test_measured_best_rows_and_threads_of_pooled_units(rows, units, pinned, expected):
    t = tiling(rows, units, 0, 132, pinned, pooled=True)
    assert (t.rows, t.unit_threads) == expected
