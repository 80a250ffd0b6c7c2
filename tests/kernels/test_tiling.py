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
    registers = 65536 // (t.blocks * threads)
    assert registers >= (64 if t.unroll == 8 else 42) or t.blocks == 1


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED)
def test_fewer_threads_than_a_warp_are_idle_in_each_pass_over_the_units(rows, units, totals, processors, pinned):
    t = tiling(rows, units, totals, processors, pinned)
    work = lanes_of(t, units) * units
    passes = -(-work // t.unit_threads) if units else 0
    assert 0 <= passes * t.unit_threads - work < 32 * max(1, passes)
    assert passes <= -(-units // 416)


@given(ROWS, UNITS, TOTALS, PROCESSORS, PINNED)
def test_blocks_have_few_rows(rows, units, totals, processors, pinned):
    t = tiling(rows, units, totals, processors, pinned)
    assert 1 <= t.rows <= (16 if pinned else 32)


# 39 fields: 156 units are 16 float32 columns a field, 78 the same in bfloat16, 1248 and 624 are 128 columns.
@pytest.mark.parametrize(
    ("rows", "units", "pinned", "expected"),
    [
        (64, 156, True, (8, 640)),
        (256, 156, True, (16, 640)),
        (1024, 156, True, (16, 640)),
        (1024, 52, True, (16, 416)),
        (4096, 156, True, (4, 160)),
        (4096, 52, True, (4, 128)),
        (16384, 156, True, (16, 320)),
        (16384, 52, True, (16, 224)),
        (1024, 416, True, (4, 416)),
        (16384, 416, True, (16, 416)),
        (1, 1248, False, (1, 640)),
        (1024, 1248, True, (4, 640)),
        (4096, 1248, True, (4, 416)),
        (4096, 156, False, (16, 320)),
        (16384, 104, False, (32, 224)),
        (16384, 832, False, (16, 416)),
    ],
)
def test_measured_best_rows_and_threads_of_an_h200(rows, units, pinned, expected):
    t = tiling(rows, units, 39, 132, pinned)
    assert (t.rows, t.unit_threads) == expected
