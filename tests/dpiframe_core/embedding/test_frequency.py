"""Frequencies are those of the sorted counts, and ranks are a stable sort by falling count."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpiframe_core.embedding.frequency import frequencies, frequency_ranks

# Around the bound of 16 bits below which counts go through a histogram, and far above it.
COUNT = st.one_of(st.integers(0, 3), st.integers(65533, 65538), st.integers(0, 2**40))
COUNTS = st.lists(COUNT, min_size=1, max_size=40).map(lambda values: np.array(values, np.int64))


@given(COUNTS, st.data())
def test_rows_and_reads_are_those_of_the_sorted_counts(counts, data):
    found, falling = frequencies(counts), np.sort(counts)[::-1]
    for rank in range(len(counts)):
        assert found.count_at(rank) == falling[rank]
    for rows in range(len(counts) + 1):
        assert found.reads_of(rows) == falling[:rows].sum()
    above = data.draw(st.one_of(COUNT, st.sampled_from(counts.tolist())))
    assert found.rows_above(above) == (counts > above).sum()


@given(COUNTS)
def test_ranks_fall_with_the_count_and_equal_counts_keep_the_order_of_ids(counts):
    ranks = frequency_ranks(counts)
    order = np.lexsort((np.arange(len(counts)), -counts))
    if ranks is None:
        assert (order == np.arange(len(counts))).all()
    else:
        assert ranks.dtype == np.uint32
        assert (ranks[order] == np.arange(len(counts))).all()


def test_ids_in_the_order_of_falling_frequency_need_no_ranks():
    assert frequency_ranks(np.array([70000, 9, 9, 0])) is None
    assert frequency_ranks(np.array([9, 70000, 9, 0])).tolist() == [1, 0, 2, 3]
